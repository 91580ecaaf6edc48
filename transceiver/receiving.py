"""The receiving half of a worker's transfers: expectations, grants, and the proof that pages are safe again. Pure.

`expect` announces a transfer; the first Open that matches it binds its writer and is granted a lease, counted by the
writer from when it sent that Open. So the writer's right to write ends before our own clock says so, however long the
grant was under way. `Broke` is reported when nobody can write the pages any more: never granted, the writer said
Closed or Done, the writer is gone, or its lease and a grace are over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmanager.ids import TransferId, WorkerEpoch
from transceiver import plan, wire
from transceiver.demand import Demand, demand
from transceiver.errors import BookCorrupt, DuplicateTransfer
from transceiver.peers import Peers
from transceiver.port import Broke, Landed, ReceiveSpec
from transceiver.records import ClosedTransfer, Key, Records, Side, remote_outcome
from transceiver.transfer import Outcome, Receiver, ReceiverCommand, ReceiverEvent, ReceiverPhase
from transceiver.wire import Hello, TerminalState


@dataclass(slots=True)
class _Receiving:
    spec: ReceiveSpec
    demand: Demand
    state: Receiver = field(default_factory=Receiver)
    deadline_s: float | None = None  # None until the first step sees it
    writer: WorkerEpoch | None = None
    ship_draft: bool = True
    done: wire.Done | None = None


class Receiving:
    """All incoming transfers of one worker."""

    def __init__(self, ours: Hello, peers: Peers, records: Records) -> None:
        self._ours = ours
        self._peers = peers
        self._records = records
        self._open: dict[TransferId, _Receiving] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, transfer: TransferId) -> bool:
        return transfer in self._open

    @property
    def granted(self) -> bool:
        """Whether any peer may be writing our pages."""
        return any(entry.state.phase is not ReceiverPhase.EXPECTING for entry in self._open.values())

    def expect(self, spec: ReceiveSpec) -> None:
        if spec.transfer in self._open or _key(spec.transfer) in self._records.closed:
            raise DuplicateTransfer(spec.transfer)
        needed = demand(self._ours.fingerprint, self._ours.pools, spec.num_tokens)
        pools = self._ours.pools
        plan.require_pages("target", spec.destination.target, needed.target_pages, pools.target.num_pages)
        if pools.draft is not None:
            plan.require_pages("draft", spec.destination.draft, needed.draft_pages, pools.draft.num_pages)
        self._open[spec.transfer] = _Receiving(spec, needed)

    def abort(self, transfer: TransferId, reason: str) -> None:
        if transfer in self._open:
            self._on(transfer, ReceiverEvent.CANCELLED, Outcome(TerminalState.CANCELLED, reason))

    def peer_gone(self, peer: WorkerEpoch, outcome: Outcome) -> None:
        for transfer in [key for key, entry in self._open.items() if entry.writer == peer]:
            self._on(transfer, ReceiverEvent.PEER_GONE, outcome)

    def advance(self, now_s: float) -> None:
        """Deadlines."""
        for transfer, entry in list(self._open.items()):
            deadline_s = self._deadline(entry, now_s)
            if now_s >= deadline_s and entry.state.phase is not ReceiverPhase.BREAKING:
                expired = Outcome(TerminalState.EXPIRED, f"not complete within {entry.spec.ttl_s} s")
                self._on(transfer, ReceiverEvent.EXPIRED, expired)
            grace_s = self._records.timing.grace_s
            if entry.state.phase is ReceiverPhase.BREAKING and now_s >= deadline_s + grace_s:
                self._on(transfer, ReceiverEvent.LEASE_OVER)

    # what writers say

    def hear_open(self, source: WorkerEpoch, message: wire.Open, now_s: float) -> None:
        transfer = message.transfer
        entry = self._open.get(transfer)
        if entry is None:
            self._repeat_end(source, transfer)
            return
        reason = _mismatch(entry, source, message)
        if reason:
            self._records.answer(source, wire.Refuse(transfer, reason))
            return
        entry.writer = source
        entry.ship_draft = message.ship_draft
        lease_s = self._deadline(entry, now_s) - now_s
        commands = self._on(transfer, ReceiverEvent.OPENED)
        if ReceiverCommand.TELL_GRANT in commands and lease_s > 0:
            self._records.answer(source, wire.Grant(transfer, message.attempt, lease_s))

    def hear_done(self, source: WorkerEpoch, message: wire.Done) -> None:
        transfer = message.transfer
        entry = self._open.get(transfer)
        if entry is None:
            self._repeat_end(source, transfer)
            return
        if entry.writer != source:
            return
        want_draft = entry.demand.draft_bytes if entry.ship_draft else 0
        wanted = (entry.spec.num_tokens, entry.demand.target_bytes, want_draft, entry.ship_draft)
        handoff = message.handoff
        arrived = (handoff.num_tokens, message.bytes_target, message.bytes_draft, handoff.draft_shipped)
        if arrived == wanted:
            entry.done = message
            self._on(transfer, ReceiverEvent.COMPLETED)
            return
        words = "tokens, target bytes, draft bytes, draft shipped"
        reason = f"the sender is done with {arrived} ({words}); {wanted} were expected"
        self._on(transfer, ReceiverEvent.MISDELIVERED, Outcome(TerminalState.FAILED, reason))

    def hear_closed(self, source: WorkerEpoch, message: wire.Closed) -> None:
        transfer = message.transfer
        entry = self._open.get(transfer)
        if entry is None:
            self._records.settled(_key(transfer), source)
            self._records.answer(source, wire.Ack(transfer))
            return
        granted = entry.writer is not None
        if not granted:
            entry.writer = source  # it gave up before its Open arrived
        if entry.writer != source:
            return
        quiet = message.quiet or not granted
        event = ReceiverEvent.WRITER_CLOSED if quiet else ReceiverEvent.WRITER_ABANDONED
        self._on(transfer, event, remote_outcome(Side.SENDER, message.state, message.reason))

    def _repeat_end(self, source: WorkerEpoch, transfer: TransferId) -> None:
        """An Open or Done about a transfer that is not open here: repeat how it ended, or say that it is unknown."""
        closed = self._records.closed.get(_key(transfer))
        if closed is None or closed.peer not in (None, source):
            self._records.answer(source, wire.Refuse(transfer, "not expected here"))
        elif closed.outcome.state is TerminalState.DONE:
            self._records.answer(source, wire.Ack(transfer))
        else:
            self._records.answer(source, wire.Abort(transfer, closed.outcome.state, closed.outcome.reason))

    # transitions

    def _on(
        self, transfer: TransferId, event: ReceiverEvent, outcome: Outcome | None = None
    ) -> tuple[ReceiverCommand, ...]:
        entry = self._open[transfer]
        before = entry.state.phase
        entry.state, commands = entry.state.on(event, outcome)
        if entry.state.phase is not before:
            self._records.settled(_key(transfer))
        for command in commands:
            self._obey(transfer, entry, command)
        return commands

    def _obey(self, transfer: TransferId, entry: _Receiving, command: ReceiverCommand) -> None:
        key, ending = _key(transfer), entry.state.outcome
        match command:
            case ReceiverCommand.TELL_GRANT:
                pass  # by hear_open, which knows the attempt and the time
            case ReceiverCommand.TELL_ACK:
                assert entry.writer is not None
                self._records.answer(entry.writer, wire.Ack(transfer))
            case ReceiverCommand.TELL_ABORT:
                assert entry.writer is not None
                assert ending is not None
                if key not in self._records.outbox:
                    self._records.say(key, entry.writer, wire.Abort(transfer, ending.state, ending.reason))
            case ReceiverCommand.REPORT:
                assert ending is not None
                self._report(transfer, entry, ending)

    def _report(self, transfer: TransferId, entry: _Receiving, ending: Outcome) -> None:
        del self._open[transfer]
        closed = ClosedTransfer(entry.writer, ending)
        done = entry.done
        if ending.state is TerminalState.DONE and done is not None:
            self._records.count_bytes(done.bytes_target, done.bytes_draft)
            landed = Landed(transfer, done.handoff, done.bytes_target, done.bytes_draft)
            self._records.close(_key(transfer), closed, landed)
        else:
            self._records.close(_key(transfer), closed, Broke(transfer, ending.state, ending.reason))

    def _deadline(self, entry: _Receiving, now_s: float) -> float:
        if entry.deadline_s is None:
            entry.deadline_s = now_s + entry.spec.ttl_s
        return entry.deadline_s

    def check(self) -> None:
        """Raises BookCorrupt when an entry contradicts its phase."""
        for transfer, entry in self._open.items():
            phase, bound = entry.state.phase, entry.writer is not None
            if phase is ReceiverPhase.CLOSED or _key(transfer) in self._records.closed:
                raise BookCorrupt(f"receiver is open and closed in {phase}", transfer)
            if bound != (phase is not ReceiverPhase.EXPECTING):
                raise BookCorrupt(f"receiver in {phase} has writer {entry.writer}", transfer)
            if entry.writer is not None and entry.writer not in self._peers:
                raise BookCorrupt(f"receiver in {phase} has lost its writer", transfer)
            if _key(transfer) in self._records.outbox and phase is not ReceiverPhase.BREAKING:
                raise BookCorrupt(f"receiver in {phase} asks its writer to stop", transfer)


def _key(transfer: TransferId) -> Key:
    return (Side.RECEIVER, transfer)


def _mismatch(entry: _Receiving, source: WorkerEpoch, message: wire.Open) -> str:
    """Why this Open is not the one expected; empty when it is."""
    spec, needed = entry.spec, entry.demand
    if entry.writer not in (None, source):
        return "another worker is writing it"
    if message.num_tokens != spec.num_tokens:
        return f"{message.num_tokens} tokens offered, {spec.num_tokens} expected"
    if message.target_pages != tuple(spec.destination.target[: needed.target_pages]):
        return "the target pages are not those reserved"
    if message.ship_draft and message.draft_pages != tuple(spec.destination.draft[: needed.draft_pages]):
        return "the draft pages are not those reserved"
    return ""
