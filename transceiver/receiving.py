"""The receiving half of a worker's transfers: expectations, grants, and the proof that pages are safe again. Pure.

`expect` announces a transfer; the first Open that matches it binds its writer and is granted a lease, counted by the
writer from when it sent that Open. So the writer's right to write ends before our own clock says so, however long the
grant was under way. The lease is short and each Open and Renew that is newer than all before it extends it, up to the
time that the engine gave the whole transfer: a sender that falls silent, queued or writing, costs a lease and no more.

With a content check, Done is not the end: the shell inspects what has landed, and `inspected` brings the answer.
`Broke` is reported at once. If the writer may have writes under way by then, the pages are not safe: a write that was
posted arrives when it likes, and a lease does not stop it. They are in quarantine until the writer, asked again and
again, says Closed or Done, or is gone; then `Released` is reported. The clock never ends a quarantine.

Where either worker has several ranks, each rank that writes here has a leg of its own: the first Open of one of them
divides the transfer into its legs, which end as one (`transceiver.consensus`). Before that nobody knows how many.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from transceiver import plan, wire
from transceiver.annex import Inspect
from transceiver.consensus import Consensus, Wholes
from transceiver.content import PageBatch, owner_of
from transceiver.demand import Demand, bytes_due, demand
from transceiver.errors import BookCorrupt, DuplicateTransfer
from transceiver.formats import Route
from transceiver.lanes import batch, routes
from transceiver.pairing import leg_name, legs_between, ships, whole_of
from transceiver.peers import Peers
from transceiver.port import Broke, Landed, ReceiveSpec, Released, TransferEvent
from transceiver.records import ClosedTransfer, Key, Records, Side, remote_outcome
from transceiver.transfer import DONE, Outcome, Receiver, ReceiverCommand, ReceiverEvent, ReceiverPhase
from transceiver.wire import DRAFT, TARGET, Hello, Place, Region, TerminalState


@dataclass(frozen=True, slots=True)
class _Due:
    """What the writer's Done must say, and what is looked at then. Known when the transfer is opened, and wanted in a
    hurry when it is done.

    `arrived`: tokens, target bytes, draft bytes, draft shipped. `inspect` None: nothing is looked at.
    """

    arrived: tuple[int, int, int, bool]
    inspect: Inspect | None


@dataclass(slots=True)
class _Receiving:
    spec: ReceiveSpec
    demand: Demand
    state: Receiver = field(default_factory=Receiver)
    deadline_s: float | None = None  # None until the first step sees it
    silent_s: float = 0.0  # when the lease ends unless the sender speaks
    last_attempt: int = -1  # the newest Open or Renew heard
    writer: WorkerEpoch | None = None
    ship_draft: bool = True
    due: _Due | None = None  # once there is a writer
    done: wire.Done | None = None


class Receiving:
    """All incoming transfers of one worker."""

    def __init__(self, ours: Hello, peers: Peers, records: Records) -> None:
        self._ours = ours
        self._peers = peers
        self._records = records
        self._open: dict[TransferId, _Receiving] = {}
        self._wholes = Wholes()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, transfer: TransferId) -> bool:
        return transfer in self._open

    @property
    def granted(self) -> bool:
        """Whether any peer is writing our pages with our leave."""
        return any(entry.state.phase is ReceiverPhase.GRANTED for entry in self._open.values())

    @property
    def num_quarantined(self) -> int:
        """Broken transfers whose pages a write may still reach."""
        return sum(entry.state.phase is ReceiverPhase.BREAKING for entry in self._open.values())

    def expect(self, spec: ReceiveSpec) -> None:
        transfer = spec.transfer
        if transfer in self._open or transfer in self._wholes or _key(transfer) in self._records.closed:
            raise DuplicateTransfer(transfer)
        needed = demand(self._ours.fingerprint, self._ours.pools, spec.num_tokens)
        pools = self._ours.pools
        plan.require_pages("target", spec.destination.target, needed.target_pages, pools.target.num_pages)
        if pools.draft is not None:
            plan.require_pages("draft", spec.destination.draft, needed.draft_pages, pools.draft.num_pages)
        self._open[transfer] = _Receiving(spec, needed)

    def abort(self, transfer: TransferId, reason: str) -> None:
        for leg in self._wholes.legs_of(transfer) or (transfer,):
            if leg in self._open:
                self._on(leg, ReceiverEvent.CANCELLED, Outcome(TerminalState.CANCELLED, reason))

    def peer_gone(self, peer: WorkerEpoch, outcome: Outcome) -> None:
        for transfer in [key for key, entry in self._open.items() if entry.writer == peer]:
            if transfer not in self._open:
                continue  # another leg's end was its own
            self._on(transfer, ReceiverEvent.PEER_GONE, outcome)

    def advance(self, now_s: float) -> None:
        """Leases and deadlines."""
        for transfer, entry in list(self._open.items()):
            if transfer not in self._open:
                continue  # another leg's end was its own
            deadline_s = self._lease_end(entry, now_s)
            if now_s >= deadline_s and entry.state.phase is not ReceiverPhase.BREAKING:
                self._on(transfer, ReceiverEvent.EXPIRED, Outcome(TerminalState.EXPIRED, _why(entry, now_s)))

    # what writers say

    def hear_open(self, source: WorkerEpoch, message: wire.Open, now_s: float) -> None:
        transfer = message.transfer
        entry = self._leg(source, transfer)
        if entry is None:
            self._repeat_end(source, transfer)
            return
        reason = self._mismatch(entry, source, message)
        if reason:
            self._records.answer(source, wire.Refuse(transfer, reason))
            return
        entry.writer = source
        if entry.due is None or entry.ship_draft is not message.ship_draft:
            entry.ship_draft = message.ship_draft
            entry.due = self._foresee(entry, source)
        self._grant(source, entry, message, now_s)

    def hear_renew(self, source: WorkerEpoch, message: wire.Renew, now_s: float) -> None:
        """Before the Open anybody who knows the transfer's id may renew; it is worth no more than the deadline."""
        entry = self._open.get(message.transfer) or self._undivided(source, message.transfer)
        if entry is None:
            self._repeat_end(source, message.transfer)
        elif entry.writer == source:
            self._grant(source, entry, message, now_s)
        elif entry.writer is None:
            self._extend(entry, message.attempt, now_s)

    def _grant(
        self, source: WorkerEpoch, entry: _Receiving, message: wire.Open | wire.Renew, now_s: float
    ) -> None:
        if entry.state.phase is not ReceiverPhase.BREAKING:
            self._extend(entry, message.attempt, now_s)
        lease_s = self._lease_end(entry, now_s) - now_s
        commands = self._on(message.transfer, ReceiverEvent.OPENED)
        if ReceiverCommand.TELL_GRANT in commands and lease_s > 0:
            self._records.answer(source, wire.Grant(message.transfer, message.attempt, lease_s))

    def _extend(self, entry: _Receiving, attempt: int, now_s: float) -> None:
        """A word that is newer than all before it renews the lease; a replayed one does not."""
        self._lease_end(entry, now_s)
        if attempt > entry.last_attempt:
            entry.last_attempt = attempt
            entry.silent_s = max(entry.silent_s, now_s + self._records.timing.lease_s)

    def hear_done(self, source: WorkerEpoch, message: wire.Done) -> None:
        transfer = message.transfer
        entry = self._open.get(transfer)
        if entry is None:
            self._repeat_end(source, transfer)
            return
        due = entry.due
        if entry.writer != source or entry.done is not None or due is None:
            return
        handoff = message.handoff
        arrived = (handoff.num_tokens, message.bytes_target, message.bytes_draft, handoff.draft_shipped)
        if arrived != due.arrived:
            words = "tokens, target bytes, draft bytes, draft shipped"
            reason = f"the sender is done with {arrived} ({words}); {due.arrived} were expected"
            self._on(transfer, ReceiverEvent.MISDELIVERED, Outcome(TerminalState.FAILED, reason))
            return
        entry.done = message
        if due.inspect is None:
            self._on(transfer, ReceiverEvent.COMPLETED)
        else:
            self._records.actions.append(due.inspect)

    def _mismatch(self, entry: _Receiving, source: WorkerEpoch, message: wire.Open) -> str:
        """Why this Open is not the one expected; empty when it is."""
        spec, needed, writer = entry.spec, entry.demand, self._peers.get(source)
        assert writer is not None  # it has just been heard
        if entry.writer not in (None, source):
            return "another worker is writing it"
        if leg_name(whole_of(spec.transfer), writer.hello.place, self._ours.place) != spec.transfer:
            return f"it is no leg from rank {writer.hello.place.rank} of {writer.hello.place.size}"
        if message.num_tokens != spec.num_tokens:
            return f"{message.num_tokens} tokens offered, {spec.num_tokens} expected"
        target, draft = ships(writer.hello, self._ours)
        if target and message.target_pages != tuple(spec.destination.target[: needed.target_pages]):
            return "the target pages are not those reserved"
        draft = draft and message.ship_draft
        if draft and message.draft_pages != tuple(spec.destination.draft[: needed.draft_pages]):
            return "the draft pages are not those reserved"
        return ""

    def _foresee(self, entry: _Receiving, source: WorkerEpoch) -> _Due:
        writer = self._peers.get(source)
        assert writer is not None  # it has just been heard
        ways = routes(writer.hello, self._ours)
        inspect = None
        if self._ours.pools.tags is not None:
            inspect = Inspect(entry.spec.transfer, self._batches(entry, source, ways))
        shipped = bytes_due(entry.demand, ways, entry.ship_draft)
        return _Due((entry.spec.num_tokens, *shipped, entry.ship_draft), inspect)

    def inspected(self, transfer: TransferId, mismatch: str) -> None:
        """What the inspection of a landed transfer found; empty when all is right."""
        entry = self._open.get(transfer)
        if entry is None:
            return
        if mismatch:
            self._on(transfer, ReceiverEvent.MISDELIVERED, Outcome(TerminalState.FAILED, mismatch))
        else:
            self._on(transfer, ReceiverEvent.COMPLETED)

    def _batches(
        self, entry: _Receiving, writer: WorkerEpoch, ways: tuple[Route | None, Route | None]
    ) -> tuple[PageBatch, ...]:
        pools, destination = self._ours.pools, entry.spec.destination
        owner = owner_of(writer, entry.spec.transfer)

        def pages_in(pool: int, way: Route, region: Region, pages: tuple[PageId, ...]) -> PageBatch:
            first = way.shipped.parts[0].geometry.first_page(entry.spec.num_tokens)
            indices = range(first, first + len(pages))
            return batch(owner, pool, way, region.address, pages, pages, indices)

        target, draft = ways
        found = []
        if target is not None:
            target_pages = destination.target[: entry.demand.target_pages]
            found.append(pages_in(TARGET, target, pools.target, target_pages))
        if draft is not None and pools.draft is not None and entry.ship_draft:
            found.append(pages_in(DRAFT, draft, pools.draft, destination.draft[: entry.demand.draft_pages]))
        return tuple(found)

    def hear_closed(self, source: WorkerEpoch, message: wire.Closed) -> None:
        transfer = message.transfer
        entry = self._leg(source, transfer)
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
        closed = self._records.closed.get(_key(transfer)) or self._records.closed.get(
            _key(whole_of(transfer))
        )
        if closed is None and self._ours.follows:
            return  # this worker's first rank, which does know, may be about to tell
        if closed is None or closed.peer not in (None, source):
            self._records.answer(source, wire.Refuse(transfer, "not expected here"))
        elif closed.outcome.state is TerminalState.DONE:
            self._records.answer(source, wire.Ack(transfer))
        else:
            self._records.answer(source, wire.Abort(transfer, closed.outcome.state, closed.outcome.reason))

    # the legs of a transfer that several ranks write here

    def _leg(self, source: WorkerEpoch, leg: TransferId) -> _Receiving | None:
        """What is open under this name. The first word of one of several writers divides what was expected whole."""
        whole = self._undivided(source, leg)
        if whole is not None:
            self._divide(source, whole)
        return self._open.get(leg)

    def _undivided(self, source: WorkerEpoch, leg: TransferId) -> _Receiving | None:
        """The transfer that this is a leg of, if nobody has begun to write it."""
        transfer, writer = whole_of(leg), self._peers.get(source)
        entry = self._open.get(transfer)
        if transfer == leg or entry is None or entry.writer is not None or writer is None:
            return None
        return entry if leg in self._legs_from(writer.hello, transfer) else None

    def _divide(self, source: WorkerEpoch, entry: _Receiving) -> None:
        transfer, writer = entry.spec.transfer, self._peers.get(source)
        assert writer is not None  # it has just been heard
        found = self._legs_from(writer.hello, transfer)
        del self._open[transfer]
        for leg in found:
            self._open[leg] = replace(entry, spec=replace(entry.spec, transfer=leg), last_attempt=-1)
        with_draft = {leg for leg, ships_draft in found.items() if ships_draft}
        self._wholes.begin(Consensus(transfer, frozenset(found), frozenset(with_draft)))

    def _legs_from(self, writer: Hello, transfer: TransferId) -> dict[TransferId, bool]:
        """The legs by which a writer's worker fills our pages, and whether each ships draft context."""
        here, there = self._ours.place, writer.place
        if here.size == there.size == 1:
            return {}
        return {
            leg_name(transfer, Place(leg.source, there.size), here): bool(leg.draft_heads)
            for leg in legs_between(self._ours.fingerprint, there.size, here.size)
            if leg.destination == here.rank
        }

    def _tell(self, event: TransferEvent) -> None:
        """Report an event of what is open here: of a leg, what follows from it for the whole."""
        whole = self._wholes.whole_of(event.transfer)
        if whole is None:
            self._report(event)
            return
        verdict = self._wholes.hear(event)
        for leg in verdict.abort:
            self.abort(leg, "another leg of its transfer broke")
        for told in verdict.events:
            self._report(told)
            match told:
                case Broke(state=state, reason=reason):
                    self._records.remember(_key(whole), ClosedTransfer(None, Outcome(state, reason)))
                case Landed():
                    self._records.remember(_key(whole), ClosedTransfer(None, DONE))
                case _:
                    pass

    def _report(self, event: TransferEvent) -> None:
        match event:
            case Broke():
                self._records.report(event.state, event)
            case Landed():
                self._records.report(TerminalState.DONE, event)
            case _:
                self._records.events.append(event)

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
                self._end(transfer, entry, ending)
            case ReceiverCommand.RELEASE:
                assert ending is not None
                del self._open[transfer]
                self._records.remember(key, ClosedTransfer(entry.writer, ending))
                self._tell(Released(transfer))

    def _end(self, transfer: TransferId, entry: _Receiving, ending: Outcome) -> None:
        if entry.state.phase is ReceiverPhase.BREAKING:
            self._tell(Broke(transfer, ending.state, ending.reason, pages_safe=False))
            return
        del self._open[transfer]
        self._records.remember(_key(transfer), ClosedTransfer(entry.writer, ending))
        done = entry.done
        if ending.state is TerminalState.DONE and done is not None:
            self._records.count_bytes(done.bytes_target, done.bytes_draft)
            self._tell(Landed(transfer, done.handoff, done.bytes_target, done.bytes_draft))
        else:
            self._tell(Broke(transfer, ending.state, ending.reason))

    def _lease_end(self, entry: _Receiving, now_s: float) -> float:
        if entry.deadline_s is None:
            entry.deadline_s = now_s + entry.spec.ttl_s
            entry.silent_s = now_s + self._records.timing.lease_s
        return min(entry.deadline_s, entry.silent_s)

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


def _why(entry: _Receiving, now_s: float) -> str:
    if entry.deadline_s is not None and now_s >= entry.deadline_s:
        return f"not complete within {entry.spec.ttl_s} s"
    return "nothing was heard of its sender for the length of a lease"
