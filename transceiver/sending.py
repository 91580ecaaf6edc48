"""The sending half of a worker's transfers: what may be written, what was, and when the source pages are free. Pure.

A transfer may wait here before it is opened (`hold`): until then and until its end, a Renew every heartbeat keeps the
receiver's lease alive. Nothing is written before the receiver's grant, nothing after its lease. `push` moves the
position up to which KV is final; `advance` writes the pages that became final since, as far as the staging buffer has
room, so each page travels once, whatever the chunks. The handoff follows when every write has completed. A failing
transfer lets its writes complete before it says Closed, because that word tells the receiver that its pages are safe.
Writes that take too long for that outlive their transfer here: it closes without the promise, its receiver keeps its
pages and asks on, and hears it when they are over.

A push that comes with a `Ready` leaves a mark. Marks are passed in their order only, so a page is never written before
the forward that fills it has finished, nor before an earlier chunk's.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from kvmanager.ids import TransferId, WorkerEpoch
from transceiver import wire
from transceiver.annex import Prepare
from transceiver.arena import Arena, Span
from transceiver.content import owner_of
from transceiver.errors import BookCorrupt, DuplicateTransfer, PlanError, UnknownPeer, UnknownTransfer
from transceiver.holding import Holding
from transceiver.lanes import Cargo, Lane, lanes
from transceiver.peers import Peers
from transceiver.port import Broke, Delivered, Ready, SendSpec
from transceiver.records import CancelWrite, ClosedTransfer, Key, Outgoing, Records, Side, remote_outcome
from transceiver.transfer import Outcome, Sender, SenderCommand, SenderEvent, SenderPhase
from transceiver.transport import Write, WriteEnded, WriteId
from transceiver.wire import DRAFT, TARGET, Hello, Region, TerminalState

_FIRST_PAGES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """KV of positions < end_position is final once `ready` says so; None: once all before it is."""

    end_position: int
    ready: Ready | None


@dataclass(slots=True)
class _Sending:
    spec: SendSpec
    lanes: tuple[Lane, ...]
    first_attempt: int
    state: Sender = field(default_factory=Sender)
    deadline_s: float | None = None  # None until the first step sees it
    lease_end_s: float = -math.inf
    asked_s: dict[int, float] = field(default_factory=dict)  # when an Open or Renew was sent, by attempt
    next_renew_s: float = math.inf
    asking: SenderPhase | None = None  # the phase whose question (Open, Done) wants an answer
    answer_by_s: float = math.inf
    ready_position: int = 0
    marks: deque[Mark] = field(default_factory=deque)  # pushed, not yet ready; in order
    in_flight: dict[WriteId, list[Span]] = field(
        default_factory=dict
    )  # with what each uses of the staging buffer
    quiesce_by_s: float | None = None
    quiet: bool = True  # False: a cancelled write may still arrive
    handoff: wire.Handoff | None = None

    @property
    def pushed_position(self) -> int:
        """Up to where the engine has pushed, ready or not."""
        return self.marks[-1].end_position if self.marks else self.ready_position


class Sending:
    """All outgoing transfers of one worker."""

    def __init__(self, ours: Hello, peers: Peers, records: Records, staging: Region) -> None:
        self._ours = ours
        self._peers = peers
        self._records = records
        self._staging = staging
        self._arena = Arena(staging.size_bytes)
        self._on_device = ours.pools.target.device is not None
        self._held = Holding(peers, records)
        self._open: dict[TransferId, _Sending] = {}
        self._writes: dict[WriteId, TransferId] = {}
        self._late: dict[WriteId, tuple[WorkerEpoch, TransferId]] = {}  # in flight, their transfers closed
        self._next_write = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def __contains__(self, transfer: TransferId) -> bool:
        return transfer in self._open

    @property
    def num_late(self) -> int:
        """Writes still in flight of transfers that have closed."""
        return len(self._late)

    @property
    def writing(self) -> bool:
        """Whether any write of an open transfer is in flight."""
        return bool(self._writes)

    @property
    def awaiting(self) -> bool:
        """Whether any open transfer waits for its forward."""
        return any(entry.marks for entry in self._open.values())

    # calls of the engine

    def hold(self, transfer: TransferId, peer: WorkerEpoch, ttl_s: float) -> None:
        if transfer in self._held or transfer in self._open or _key(transfer) in self._records.closed:
            raise DuplicateTransfer(transfer)
        if peer not in self._peers:
            raise UnknownPeer(peer, transfer)
        self._held.hold(transfer, peer, ttl_s)

    def let_go(self, transfer: TransferId) -> int:
        if transfer not in self._held:
            raise DuplicateTransfer(transfer)
        return self._held.take(transfer)

    def open(self, spec: SendSpec) -> None:
        if spec.transfer in self._open or _key(spec.transfer) in self._records.closed:
            raise DuplicateTransfer(spec.transfer)
        peer = self._peers.get(spec.peer)
        if peer is None:
            raise UnknownPeer(spec.peer, spec.transfer)
        found = lanes(
            self._ours,
            peer.hello,
            owner=owner_of(self._ours.epoch, spec.transfer),
            num_tokens=spec.num_tokens,
            source=spec.source,
            destination=spec.destination,
            ship_draft=spec.ship_draft,
        )
        first_attempt = max(self._held.take(spec.transfer), spec.first_attempt)
        self._open[spec.transfer] = _Sending(spec, found, first_attempt)
        pages = {lane.pool: lane.destination for lane in found}
        opening = wire.Open(
            transfer=spec.transfer,
            attempt=0,
            num_tokens=spec.num_tokens,
            target_pages=pages.get(TARGET, ()),
            draft_pages=pages.get(DRAFT, ()),
            ship_draft=spec.ship_draft,
        )
        self._records.say(_key(spec.transfer), spec.peer, opening)

    def push(self, transfer: TransferId, end_position: int, ready: Ready | None) -> None:
        entry = self._find(transfer)
        if entry is None:
            return
        if not entry.pushed_position <= end_position <= entry.spec.num_tokens:
            raise PlanError(
                f"push to {end_position} after {entry.pushed_position} of {entry.spec.num_tokens} tokens",
                transfer,
            )
        _mark(entry, end_position, ready)

    def finish(self, transfer: TransferId, handoff: wire.Handoff, ready: Ready | None) -> None:
        entry = self._find(transfer)
        if entry is None:
            return
        if handoff.num_tokens != entry.spec.num_tokens:
            raise PlanError(
                f"handoff of {handoff.num_tokens} tokens, opened for {entry.spec.num_tokens}", transfer
            )
        if entry.handoff is not None:
            raise PlanError("finished twice", transfer)
        _mark(entry, entry.spec.num_tokens, ready)
        entry.handoff = wire.with_draft_shipped(handoff, entry.spec.ship_draft)

    def awaited(self) -> list[tuple[TransferId, tuple[Mark, ...]]]:
        """The marks of every transfer that has some and may yet ship, in order."""
        return [(transfer, tuple(entry.marks)) for transfer, entry in self._open.items() if entry.marks]

    def reached(self, transfer: TransferId, mark: Mark) -> None:
        """The forward behind this mark has finished, and with it those before; a transfer that ended does not care."""
        entry = self._open.get(transfer)
        if entry is None or mark not in entry.marks:
            return
        while (passed := entry.marks.popleft()) is not mark:
            entry.ready_position = passed.end_position
        entry.ready_position = mark.end_position
        _pass_unconditional(entry)

    def computing_failed(self, transfer: TransferId, reason: str) -> None:
        if transfer in self._open:
            self._on(transfer, SenderEvent.CANCELLED, Outcome(TerminalState.FAILED, reason))

    def abort(self, transfer: TransferId, reason: str) -> None:
        if transfer in self._held:
            self._held.end(transfer, Outcome(TerminalState.CANCELLED, reason))
        elif transfer in self._open:
            self._on(transfer, SenderEvent.CANCELLED, Outcome(TerminalState.CANCELLED, reason))

    def peer_gone(self, peer: WorkerEpoch, outcome: Outcome) -> None:
        self._held.peer_gone(peer, outcome)
        for write in [write for write, (to, _) in self._late.items() if to == peer]:
            del self._late[write]
            self._records.actions.append(CancelWrite(write))
        for transfer in [key for key, entry in self._open.items() if entry.spec.peer == peer]:
            self._on(transfer, SenderEvent.PEER_GONE, outcome)

    def _find(self, transfer: TransferId) -> _Sending | None:
        """The outgoing transfer; None when it has ended, which its engine learns from the next poll."""
        entry = self._open.get(transfer)
        if entry is None and _key(transfer) not in self._records.closed:
            raise UnknownTransfer(transfer)
        return entry

    # the clock and the transport

    def write_ended(self, ended: WriteEnded) -> None:
        if self._late.pop(ended.write, None) is not None:
            return  # the receiver, who keeps asking, will hear that it is over
        transfer = self._writes.pop(ended.write, None)
        if transfer is None:
            return  # cancelled before
        self._give_back(self._open[transfer].in_flight.pop(ended.write))
        if ended.failure is not None:
            failed = Outcome(TerminalState.FAILED, f"write failed: {ended.failure}")
            self._on(transfer, SenderEvent.WRITE_FAILED, failed)

    def advance(self, now_s: float) -> None:
        """Deadlines, heartbeats, new writes, and the handoff behind the last of them."""
        self._held.advance(now_s)
        for transfer, entry in list(self._open.items()):
            if entry.deadline_s is None:
                entry.deadline_s = now_s + entry.spec.ttl_s
            limit_s = entry.deadline_s
            if entry.state.phase is SenderPhase.WRITING:
                limit_s = min(limit_s, entry.lease_end_s)
            elif entry.state.phase is not entry.asking:
                entry.asking, entry.answer_by_s = entry.state.phase, now_s + self._records.timing.lease_s
            else:
                limit_s = min(limit_s, entry.answer_by_s)
            if now_s >= limit_s and entry.state.phase is not SenderPhase.QUIESCING:
                expired = Outcome(TerminalState.EXPIRED, _why_expired(entry, now_s))
                self._on(transfer, SenderEvent.EXPIRED, expired)
            if entry.state.phase is SenderPhase.WRITING:
                shipped = _complete(entry)
                self._ship(transfer, entry)
                complete = _complete(entry)
                if self._on_device and complete and not shipped:
                    entry.next_renew_s = (
                        now_s  # a word ahead, for the receiver to look out for what is next: Done
                    )
                self._renew(transfer, entry, now_s)
                if entry.handoff is not None and complete and not entry.in_flight:
                    self._on(transfer, SenderEvent.ALL_WRITTEN)
            if entry.state.phase is SenderPhase.QUIESCING:
                self._quiesce(transfer, entry, now_s)

    def _renew(self, transfer: TransferId, entry: _Sending, now_s: float) -> None:
        if now_s >= entry.next_renew_s:
            entry.next_renew_s = now_s + self._records.timing.heartbeat_s
            self._records.answer(entry.spec.peer, wire.Renew(transfer, _ask(entry, now_s)))

    def opening(self, transfer: TransferId, outgoing: Outgoing, now_s: float) -> wire.Open:
        """The Open to send now. Its attempt names the moment from which a grant will be counted."""
        message = outgoing.message
        assert isinstance(message, wire.Open)
        entry = self._open[transfer]
        entry.next_renew_s = now_s + self._records.timing.heartbeat_s
        return wire.with_attempt(message, _ask(entry, now_s))

    def _ship(self, transfer: TransferId, entry: _Sending) -> None:
        """Write what is final. Where a device does the copying, an idle one gets some pages at once, and the rest is
        made ready meanwhile, in the next step.
        """
        hurry = self._on_device and not entry.in_flight
        while True:
            cargo = Cargo()
            for lane in entry.lanes:
                limit = _FIRST_PAGES if hurry else None
                lane.load(entry.ready_position, self._arena, self._staging, cargo, limit)
            if cargo.empty:
                return
            write = Write(
                write=WriteId(self._next_write),
                peer=entry.spec.peer,
                copies=tuple(cargo.copies),
                tags=tuple(cargo.tags),
                moves=tuple(cargo.moves),
            )
            self._next_write += 1
            self._writes[write.write] = transfer
            entry.in_flight[write.write] = cargo.spans
            if cargo.stages or cargo.stamps:
                self._records.actions.append(Prepare(tuple(cargo.stages), tuple(cargo.stamps)))
            self._records.actions.append(write)
            if hurry:
                return

    def _give_back(self, spans: list[Span]) -> None:
        for span in spans:
            self._arena.give(span)

    def _quiesce(self, transfer: TransferId, entry: _Sending, now_s: float) -> None:
        if entry.quiesce_by_s is None:
            entry.quiesce_by_s = now_s + self._records.timing.quiesce_s
        if entry.in_flight and now_s >= entry.quiesce_by_s:
            for write in self._let_go(entry):
                self._late[write] = (entry.spec.peer, transfer)
        if not entry.in_flight:
            self._on(transfer, SenderEvent.QUIET)

    def _let_go(self, entry: _Sending) -> list[WriteId]:
        """Wait no longer for the writes in flight. Whatever they carry in the end goes to pages in quarantine."""
        writes = sorted(entry.in_flight)
        for write in writes:
            del self._writes[write]
            self._give_back(entry.in_flight.pop(write))
        return writes

    def _is_quiet(self, transfer: TransferId) -> bool:
        return all(late != transfer for _, late in self._late.values())

    # what the receiver says

    def hear_grant(self, source: WorkerEpoch, message: wire.Grant) -> None:
        entry = self._sent_to(source, message.transfer)
        if entry is None or message.attempt not in entry.asked_s:
            return
        lease_end_s = entry.asked_s[message.attempt] + message.lease_s
        if math.isfinite(lease_end_s):
            entry.lease_end_s = max(entry.lease_end_s, lease_end_s)
            self._on(message.transfer, SenderEvent.GRANTED)

    def hear_refuse(self, source: WorkerEpoch, message: wire.Refuse) -> None:
        refused = Outcome(TerminalState.FAILED, f"refused by the receiver: {message.reason}")
        if self._held.is_for(source, message.transfer):
            self._held.end(message.transfer, refused, tell=False)
        elif self._sent_to(source, message.transfer) is not None:
            self._on(message.transfer, SenderEvent.REFUSED, refused)

    def hear_ack(self, source: WorkerEpoch, message: wire.Ack) -> None:
        entry = self._open.get(message.transfer)
        if entry is None:
            self._records.settled(_key(message.transfer), source)
        elif entry.spec.peer == source and entry.state.phase is SenderPhase.FINISHING:
            self._on(message.transfer, SenderEvent.ACKED)

    def hear_abort(self, source: WorkerEpoch, message: wire.Abort) -> None:
        transfer = message.transfer
        if transfer in self._held:
            if self._held.is_for(source, transfer):
                self._held.end(transfer, remote_outcome(Side.RECEIVER, message.state, message.reason))
            return
        if transfer in self._open:
            if self._sent_to(source, transfer) is not None:
                outcome = remote_outcome(Side.RECEIVER, message.state, message.reason)
                self._on(transfer, SenderEvent.ABORTED, outcome)
            return
        closed = self._records.closed.get(_key(transfer))
        if closed is None:
            # Forgotten or never known: either way nothing of it is begun any more.
            quiet = self._is_quiet(transfer)
            self._records.answer(
                source, wire.Closed(transfer, TerminalState.FAILED, "unknown transfer", quiet)
            )
        elif closed.peer == source:
            ended = closed.outcome
            quiet = closed.quiet and self._is_quiet(transfer)
            self._records.answer(source, wire.Closed(transfer, ended.state, ended.reason, quiet))

    def _sent_to(self, source: WorkerEpoch, transfer: TransferId) -> _Sending | None:
        entry = self._open.get(transfer)
        return entry if entry is not None and entry.spec.peer == source else None

    # transitions

    def _on(self, transfer: TransferId, event: SenderEvent, outcome: Outcome | None = None) -> None:
        entry = self._open[transfer]
        before = entry.state.phase
        entry.state, commands = entry.state.on(event, outcome)
        if entry.state.phase is not before:
            self._records.settled(_key(transfer))
        if entry.state.phase in (SenderPhase.QUIESCING, SenderPhase.CLOSED):
            entry.marks.clear()  # nothing more of it is shipped
        for command in commands:
            self._obey(transfer, entry, command, event)

    def _obey(
        self, transfer: TransferId, entry: _Sending, command: SenderCommand, event: SenderEvent
    ) -> None:
        key, peer, ending = _key(transfer), entry.spec.peer, entry.state.outcome
        match command:
            case SenderCommand.TELL_DONE:
                assert entry.handoff is not None
                bytes_target, bytes_draft = self._bytes_shipped(entry)
                done = wire.Done(
                    transfer=transfer,
                    handoff=entry.handoff,
                    bytes_target=bytes_target,
                    bytes_draft=bytes_draft,
                )
                self._records.say(key, peer, done)
            case SenderCommand.STOP_WRITES:
                # Writes in flight may complete, as proof that they are over; those to a dead peer never will.
                if event is SenderEvent.PEER_GONE and entry.in_flight:
                    entry.quiet = False
                    self._records.actions.extend(map(CancelWrite, self._let_go(entry)))
            case SenderCommand.TELL_CLOSED:
                assert ending is not None
                if peer in self._peers:
                    quiet = entry.quiet and self._is_quiet(transfer)
                    self._records.say(key, peer, wire.Closed(transfer, ending.state, ending.reason, quiet))
            case SenderCommand.REPORT:
                assert ending is not None
                self._report(transfer, entry, ending)

    def _report(self, transfer: TransferId, entry: _Sending, ending: Outcome) -> None:
        del self._open[transfer]
        closed = ClosedTransfer(entry.spec.peer, ending, entry.quiet)
        if ending.state is TerminalState.DONE:
            bytes_target, bytes_draft = self._bytes_shipped(entry)
            self._records.count_bytes(bytes_target, bytes_draft)
            self._records.close(_key(transfer), closed, Delivered(transfer, bytes_target, bytes_draft))
        else:
            self._records.close(_key(transfer), closed, Broke(transfer, ending.state, ending.reason))

    def _bytes_shipped(self, entry: _Sending) -> tuple[int, int]:
        """The target's, and the drafter's unless they are to be left alone where they arrive."""
        shipped = [lane.bytes_shipped for lane in entry.lanes]
        draft_bytes = sum(draft for _, draft in shipped) if entry.spec.ship_draft else 0
        return sum(target for target, _ in shipped), draft_bytes

    def check(self) -> None:
        """Raises BookCorrupt when an entry contradicts its phase or its writes."""
        for transfer, entry in self._open.items():
            phase = entry.state.phase
            if phase is SenderPhase.CLOSED or _key(transfer) in self._records.closed:
                raise BookCorrupt(f"sender is open and closed in {phase}", transfer)
            owned = {write for write, owner in self._writes.items() if owner == transfer}
            if owned != entry.in_flight.keys():
                raise BookCorrupt(f"sender owns writes {owned}, has {entry.in_flight} in flight", transfer)
            if entry.in_flight and phase in (SenderPhase.OPENING, SenderPhase.FINISHING):
                raise BookCorrupt(f"sender in {phase} has writes in flight", transfer)
            if entry.spec.peer not in self._peers and phase is not SenderPhase.QUIESCING:
                raise BookCorrupt(f"sender in {phase} has lost its peer", transfer)
            asks = _key(transfer) in self._records.outbox
            if asks != (phase in (SenderPhase.OPENING, SenderPhase.FINISHING)):
                raise BookCorrupt(f"sender in {phase} asks its peer something: {asks}", transfer)
            if any(lane.shipped > lane.final(entry.ready_position) for lane in entry.lanes):
                raise BookCorrupt("sender shipped pages that are not final", transfer)
            positions = [entry.ready_position, *(mark.end_position for mark in entry.marks)]
            if positions != sorted(positions):
                raise BookCorrupt(f"sender awaits positions out of order: {positions}", transfer)
            if entry.marks and entry.marks[0].ready is None:
                raise BookCorrupt("sender awaits what is ready", transfer)
        self._held.check(self._open)
        self._arena.check()
        if self._arena.num_taken != sum(
            len(spans) for entry in self._open.values() for spans in entry.in_flight.values()
        ):
            raise BookCorrupt("the staging buffer is used by writes that are over")
        if any(owner not in self._open for owner in self._writes.values()):
            raise BookCorrupt("a write in flight belongs to no open transfer")
        if any(peer not in self._peers or transfer in self._open for peer, transfer in self._late.values()):
            raise BookCorrupt("a late write goes to a worker that is gone, or its transfer is open")


def _complete(entry: _Sending) -> bool:
    return all(lane.shipped == lane.num_pages for lane in entry.lanes)


def _key(transfer: TransferId) -> Key:
    return (Side.SENDER, transfer)


def _mark(entry: _Sending, end_position: int, ready: Ready | None) -> None:
    if entry.state.phase is not SenderPhase.QUIESCING:
        entry.marks.append(Mark(end_position, ready))
        _pass_unconditional(entry)


def _pass_unconditional(entry: _Sending) -> None:
    """Marks without a condition are passed as soon as nothing is awaited before them."""
    while entry.marks and entry.marks[0].ready is None:
        entry.ready_position = entry.marks.popleft().end_position


def _ask(entry: _Sending, now_s: float) -> int:
    """Number a question to the receiver and note when it was asked; its grant counts from then."""
    attempt = entry.first_attempt + len(entry.asked_s)
    entry.asked_s[attempt] = now_s
    return attempt


def _why_expired(entry: _Sending, now_s: float) -> str:
    if entry.deadline_s is not None and now_s >= entry.deadline_s:
        return f"not finished within {entry.spec.ttl_s} s"
    return "nothing was heard of the receiver for the length of a lease"
