"""All transfers of one worker: peers, state machines, deadlines, what must be said again. Pure.

Calls (`open`, `push`, `abort`, …) only change the book. `step(now_s, inbound)` takes what the transport
found, advances every transfer, and returns the I/O to do; whoever owns the transport carries it out. So the
book may be guarded by a lock that is never held during I/O.

Writes need a grant. A receiver answers an Open with a lease; the sender counts it from when it *sent* that
Open, so its right to write always ends before the receiver's clock says so, however long the grant was under
way. A receiver that never granted gives its pages back at once.

Messages get lost, so each transfer has at most one message that wants an answer (Open, Done, Closed, Abort),
re-sent with growing pauses until answered or given up. A closed transfer is remembered (the latest
`closed_memory`) for answering repetitions; nothing else survives, and messages from strangers or about
unknown transfers grow nothing.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from kvmanager.ids import TransferId, WorkerEpoch
from transceiver import handshake, plan, wire
from transceiver.errors import (
    BookCorrupt,
    DuplicateTransfer,
    HandshakeRefused,
    PlanError,
    UnknownPeer,
    UnknownTransfer,
    WireError,
)
from transceiver.port import Broke, Delivered, Landed, PortStats, ReceiveSpec, SendSpec, TransferEvent
from transceiver.transfer import (
    Outcome,
    Receiver,
    ReceiverCommand,
    ReceiverEvent,
    ReceiverPhase,
    Sender,
    SenderCommand,
    SenderEvent,
    SenderPhase,
)
from transceiver.transport import Inbound, Write, WriteId
from transceiver.wire import Hello, Message, TerminalState


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds. `grace_s`: how long past its lease a silent writer is still feared. `quiesce_s`: how long a
    failing sender lets its writes complete before it cancels them. `linger_s`: how long a closed transfer
    repeats itself."""

    resend_first_s: float = 0.02
    resend_max_s: float = 0.5
    grace_s: float = 1.0
    quiesce_s: float = 1.0
    linger_s: float = 5.0
    closed_memory: int = 4096
    max_introduced: int = 256


class Urgency(enum.IntEnum):
    IDLE = 0
    OPEN = 1  # a transfer waits for something: a chunk, a grant, an answer
    WRITTEN_TO = 2  # a peer may be writing our pages, and some links need our polls for that
    MOVING = 3  # writes or actions are under way


@dataclass(frozen=True, slots=True)
class Notify:
    peer: WorkerEpoch
    message: bytes


@dataclass(frozen=True, slots=True)
class CancelWrite:
    write: WriteId


@dataclass(frozen=True, slots=True)
class Meet:
    """A peer introduced itself: make it known to the transport."""

    hello: Hello


@dataclass(frozen=True, slots=True)
class DropPeer:
    peer: WorkerEpoch


Action = Write | Notify | CancelWrite | Meet | DropPeer


@dataclass(slots=True)
class _Peer:
    hello: Hello
    packed: bytes
    introduced: bool  # it came to us; such peers are bounded
    heard: bool = False  # it has spoken, so it knows us


@dataclass(slots=True)
class _Outgoing:
    """A message that wants an answer. `give_up_s` None: as long as its transfer is open."""

    peer: WorkerEpoch
    message: Message
    pause_s: float
    next_s: float = -math.inf
    give_up_s: float | None = None


@dataclass(slots=True)
class _Sending:
    spec: SendSpec
    state: Sender = field(default_factory=Sender)
    deadline_s: float | None = None  # None until the first step sees it
    lease_end_s: float = -math.inf
    open_sent_s: list[float] = field(default_factory=list)  # by attempt
    ready_position: int = 0
    shipped_target: int = 0  # pages
    shipped_draft: int = 0
    in_flight: set[WriteId] = field(default_factory=set)
    quiesce_by_s: float | None = None
    quiet: bool = True  # False: a cancelled write may still arrive
    handoff: wire.Handoff | None = None


@dataclass(slots=True)
class _Receiving:
    spec: ReceiveSpec
    state: Receiver = field(default_factory=Receiver)
    deadline_s: float | None = None
    writer: WorkerEpoch | None = None
    ship_draft: bool = True
    done: wire.Done | None = None


@dataclass(frozen=True, slots=True)
class _Closed:
    peer: WorkerEpoch | None
    outcome: Outcome
    quiet: bool = True


_SENDER = "sender"
_RECEIVER = "receiver"
_Key = tuple[str, TransferId]


class TransferBook:
    """One worker's transfers. `ours` is this worker's hello; it never changes."""

    def __init__(self, ours: Hello, timing: Timing | None = None) -> None:
        self.ours = ours
        self._packed_hello = wire.encode(ours)
        self._timing = timing or Timing()
        self._peers: dict[WorkerEpoch, _Peer] = {}
        self._sending: dict[TransferId, _Sending] = {}
        self._receiving: dict[TransferId, _Receiving] = {}
        self._outbox: dict[_Key, _Outgoing] = {}
        self._closed: OrderedDict[_Key, _Closed] = OrderedDict()
        self._writes: dict[WriteId, TransferId] = {}
        self._next_write = 0
        self._actions: list[Action] = []
        self._events: list[TransferEvent] = []
        self._ends: Counter[TerminalState] = Counter()
        self._bytes_target = 0
        self._bytes_draft = 0

    # ---- calls of the engine

    def admit(self, packed: bytes) -> tuple[Hello, bool]:
        """Check a peer's hello; returns it, and whether the peer is new and must be made known to the
        transport.
        """
        theirs = self._vet(packed)
        known = self._peers.get(theirs.epoch)
        if known is not None:
            known.introduced = False
            return theirs, False
        self._peers[theirs.epoch] = _Peer(theirs, packed, introduced=False)
        # A drop that nobody has carried out yet must not hit the new connection.
        self._actions = [action for action in self._actions if action != DropPeer(theirs.epoch)]
        return theirs, True

    def dismiss(self, peer: WorkerEpoch, reason: str) -> None:
        """The peer is gone. Its transfers break at once: a dead worker writes no more."""
        if self._peers.pop(peer, None) is None:
            return
        self._actions.append(DropPeer(peer))
        gone = Outcome(TerminalState.FAILED, f"worker {peer} is gone: {reason}")
        for transfer, sending in list(self._sending.items()):
            if sending.spec.peer == peer:
                self._sender_event(transfer, SenderEvent.PEER_GONE, gone)
        for transfer, receiving in list(self._receiving.items()):
            if receiving.writer == peer:
                self._receiver_event(transfer, ReceiverEvent.PEER_GONE, gone)
        self._outbox = {key: entry for key, entry in self._outbox.items() if entry.peer != peer}

    def open(self, spec: SendSpec) -> None:
        self._require_new(_SENDER, spec.transfer, self._sending)
        peer = self._peers.get(spec.peer)
        if peer is None:
            raise UnknownPeer(spec.peer, spec.transfer)
        theirs = peer.hello.pools
        need_target, need_draft = self._pages_needed(spec.num_tokens)
        plan.require_pages("source target", spec.source.target, need_target, self.ours.pools.target.num_pages)
        plan.require_pages(
            "destination target", spec.destination.target, need_target, theirs.target.num_pages
        )
        if spec.ship_draft and self.ours.pools.draft is not None and theirs.draft is not None:
            plan.require_pages("source draft", spec.source.draft, need_draft, self.ours.pools.draft.num_pages)
            plan.require_pages(
                "destination draft", spec.destination.draft, need_draft, theirs.draft.num_pages
            )
        self._sending[spec.transfer] = _Sending(spec)
        self._say(
            (_SENDER, spec.transfer),
            spec.peer,
            wire.Open(
                transfer=spec.transfer,
                attempt=0,
                num_tokens=spec.num_tokens,
                target_pages=spec.destination.target[:need_target],
                draft_pages=spec.destination.draft[:need_draft],
                ship_draft=spec.ship_draft,
            ),
        )

    def push(self, transfer: TransferId, end_position: int) -> None:
        sending = self._find_sending(transfer)
        if sending is None:
            return
        if not sending.ready_position <= end_position <= sending.spec.num_tokens:
            raise PlanError(
                f"push to {end_position} after {sending.ready_position} of {sending.spec.num_tokens} tokens",
                transfer,
            )
        sending.ready_position = end_position

    def finish(self, transfer: TransferId, handoff: wire.Handoff) -> None:
        sending = self._find_sending(transfer)
        if sending is None:
            return
        if handoff.num_tokens != sending.spec.num_tokens:
            raise PlanError(
                f"handoff of {handoff.num_tokens} tokens, opened for {sending.spec.num_tokens}", transfer
            )
        if sending.handoff is not None:
            raise PlanError("finished twice", transfer)
        sending.ready_position = sending.spec.num_tokens
        sending.handoff = wire.with_draft_shipped(handoff, sending.spec.ship_draft)

    def expect(self, spec: ReceiveSpec) -> None:
        self._require_new(_RECEIVER, spec.transfer, self._receiving)
        need_target, need_draft = self._pages_needed(spec.num_tokens)
        pools = self.ours.pools
        plan.require_pages("destination target", spec.destination.target, need_target, pools.target.num_pages)
        if pools.draft is not None:
            plan.require_pages("destination draft", spec.destination.draft, need_draft, pools.draft.num_pages)
        self._receiving[spec.transfer] = _Receiving(spec)

    def abort(self, transfer: TransferId, reason: str) -> None:
        cancelled = Outcome(TerminalState.CANCELLED, reason)
        if transfer in self._sending:
            self._sender_event(transfer, SenderEvent.CANCELLED, cancelled)
        if transfer in self._receiving:
            self._receiver_event(transfer, ReceiverEvent.CANCELLED, cancelled)

    def take_events(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events

    @property
    def urgency(self) -> Urgency:
        """How soon the next step should come."""
        if self._actions or self._writes:
            return Urgency.MOVING
        if any(
            receiving.state.phase is not ReceiverPhase.EXPECTING for receiving in self._receiving.values()
        ):
            return Urgency.WRITTEN_TO
        return Urgency.OPEN if self._sending or self._receiving or self._outbox else Urgency.IDLE

    def stats(self) -> PortStats:
        return PortStats(
            sending=len(self._sending),
            receiving=len(self._receiving),
            done=self._ends[TerminalState.DONE],
            failed=self._ends[TerminalState.FAILED],
            cancelled=self._ends[TerminalState.CANCELLED],
            expired=self._ends[TerminalState.EXPIRED],
            bytes_target=self._bytes_target,
            bytes_draft=self._bytes_draft,
        )

    # ---- one step

    def step(self, now_s: float, inbound: Inbound) -> list[Action]:
        """Advance everything by what the transport found and by the clock. The actions are in order."""
        for ended in inbound.ended:
            self._write_ended(ended.write, ended.failure)
        for source, data in inbound.messages:
            self._hear(source, data, now_s)
        for peer, reason in inbound.lost:
            self.dismiss(peer, reason)
        for transfer in list(self._sending):
            self._advance_sender(transfer, now_s)
        for transfer in list(self._receiving):
            self._advance_receiver(transfer, now_s)
        self._flush_outbox(now_s)
        actions, self._actions = self._actions, []
        return actions

    def _advance_sender(self, transfer: TransferId, now_s: float) -> None:
        sending = self._sending[transfer]
        if sending.deadline_s is None:
            sending.deadline_s = now_s + sending.spec.ttl_s
        if sending.state.phase is SenderPhase.WRITING:
            limit_s = min(sending.deadline_s, sending.lease_end_s)
        else:
            limit_s = sending.deadline_s
        if now_s >= limit_s and sending.state.phase is not SenderPhase.QUIESCING:
            expired = Outcome(TerminalState.EXPIRED, f"not finished within {sending.spec.ttl_s} s")
            self._sender_event(transfer, SenderEvent.EXPIRED, expired)
        if sending.state.phase is SenderPhase.WRITING:
            self._ship(transfer, sending)
            if sending.handoff is not None and not sending.in_flight:
                self._sender_event(transfer, SenderEvent.ALL_WRITTEN)
        if sending.state.phase is SenderPhase.QUIESCING:
            self._quiesce(transfer, sending, now_s)

    def _ship(self, transfer: TransferId, sending: _Sending) -> None:
        """Write the pages that became final since the last time: each page travels once."""
        spec, fingerprint = sending.spec, self.ours.fingerprint
        end = plan.pages_final(sending.ready_position, spec.num_tokens, fingerprint.target.page_size)
        target = plan.page_runs(spec.source.target, spec.destination.target, sending.shipped_target, end)
        sending.shipped_target = end
        draft: tuple[plan.PageRun, ...] = ()
        if fingerprint.draft is not None and spec.ship_draft:
            end = plan.pages_final(sending.ready_position, spec.num_tokens, fingerprint.draft.page_size)
            draft = plan.page_runs(spec.source.draft, spec.destination.draft, sending.shipped_draft, end)
            sending.shipped_draft = end
        if target or draft:
            write = Write(WriteId(self._next_write), spec.peer, target, draft)
            self._next_write += 1
            self._writes[write.write] = transfer
            sending.in_flight.add(write.write)
            self._actions.append(write)

    def _quiesce(self, transfer: TransferId, sending: _Sending, now_s: float) -> None:
        if sending.quiesce_by_s is None:
            sending.quiesce_by_s = now_s + self._timing.quiesce_s
        if sending.in_flight and now_s >= sending.quiesce_by_s:
            self._cancel_writes(sending)
            sending.quiet = False
        if not sending.in_flight:
            self._sender_event(transfer, SenderEvent.QUIET)

    def _cancel_writes(self, sending: _Sending) -> None:
        for write in sorted(sending.in_flight):
            del self._writes[write]
            self._actions.append(CancelWrite(write))
        sending.in_flight.clear()

    def _advance_receiver(self, transfer: TransferId, now_s: float) -> None:
        receiving = self._receiving[transfer]
        if receiving.deadline_s is None:
            receiving.deadline_s = now_s + receiving.spec.ttl_s
        if now_s >= receiving.deadline_s and receiving.state.phase is not ReceiverPhase.BREAKING:
            expired = Outcome(TerminalState.EXPIRED, f"not complete within {receiving.spec.ttl_s} s")
            self._receiver_event(transfer, ReceiverEvent.EXPIRED, expired)
        lease_over = now_s >= receiving.deadline_s + self._timing.grace_s
        if lease_over and receiving.state.phase is ReceiverPhase.BREAKING:
            self._receiver_event(transfer, ReceiverEvent.LEASE_OVER)

    def _write_ended(self, write: WriteId, failure: str | None) -> None:
        transfer = self._writes.pop(write, None)
        if transfer is None:
            return
        self._sending[transfer].in_flight.discard(write)
        if failure is not None:
            failed = Outcome(TerminalState.FAILED, f"write failed: {failure}")
            self._sender_event(transfer, SenderEvent.WRITE_FAILED, failed)

    # ---- messages

    def _say(self, key: _Key, peer: WorkerEpoch, message: Message) -> None:
        self._outbox[key] = _Outgoing(peer, message, self._timing.resend_first_s)

    def _answer(self, peer: WorkerEpoch, message: Message) -> None:
        self._actions.append(Notify(peer, wire.encode(message)))

    def _flush_outbox(self, now_s: float) -> None:
        for key, entry in list(self._outbox.items()):
            live = key[1] in (self._sending if key[0] == _SENDER else self._receiving)
            if not live and entry.give_up_s is None:
                entry.give_up_s = now_s + self._timing.linger_s
            if entry.give_up_s is not None and now_s >= entry.give_up_s:
                del self._outbox[key]
                continue
            if now_s < entry.next_s:
                continue
            entry.next_s = now_s + entry.pause_s
            entry.pause_s = min(2 * entry.pause_s, self._timing.resend_max_s)
            message = entry.message
            if isinstance(message, wire.Open):
                sending = self._sending[message.transfer]
                message = wire.with_attempt(message, len(sending.open_sent_s))
                sending.open_sent_s.append(now_s)
                if not self._peers[entry.peer].heard:
                    self._answer(entry.peer, wire.Introduce(self._packed_hello))
            self._answer(entry.peer, message)

    def _hear(self, source: WorkerEpoch, data: bytes, now_s: float) -> None:
        try:
            message = wire.decode(data)
        except WireError:
            return
        if isinstance(message, wire.Introduce):
            self._meet(source, message.hello)
            return
        peer = self._peers.get(source)
        if peer is None:
            return
        peer.heard = True
        match message:
            case wire.Open():
                self._hear_open(source, message, now_s)
            case wire.Done():
                self._hear_done(source, message)
            case wire.Closed():
                self._hear_closed(source, message)
            case wire.Grant():
                self._hear_grant(source, message)
            case wire.Refuse():
                refused = Outcome(TerminalState.FAILED, f"refused by the receiver: {message.reason}")
                if self._is_peer_of_sender(source, message.transfer):
                    self._sender_event(message.transfer, SenderEvent.REFUSED, refused)
            case wire.Ack():
                self._hear_ack(source, message)
            case wire.Abort():
                self._hear_abort(source, message)

    def _meet(self, source: WorkerEpoch, packed: bytes) -> None:
        """A worker that is about to write to us. What we would refuse to connect to stays unknown."""
        if source in self._peers:
            return
        if sum(peer.introduced for peer in self._peers.values()) >= self._timing.max_introduced:
            return
        try:
            theirs = self._vet(packed)
        except (HandshakeRefused, WireError):
            return
        if theirs.epoch == source:
            self._peers[source] = _Peer(theirs, packed, introduced=True, heard=True)
            self._actions.append(Meet(theirs))

    # receiver's side

    def _hear_open(self, source: WorkerEpoch, message: wire.Open, now_s: float) -> None:
        transfer = message.transfer
        receiving = self._receiving.get(transfer)
        if receiving is None:
            self._answer_closed_receiver(source, transfer)
            return
        if receiving.writer is not None and receiving.writer != source:
            self._answer(source, wire.Refuse(transfer, "another worker is writing it"))
            return
        reason = self._mismatch(receiving.spec, message)
        if reason:
            self._answer(source, wire.Refuse(transfer, reason))
            return
        if receiving.deadline_s is None:
            receiving.deadline_s = now_s + receiving.spec.ttl_s
        receiving.writer = source
        receiving.ship_draft = message.ship_draft
        _, commands = self._receiver_event(transfer, ReceiverEvent.OPENED)
        if ReceiverCommand.TELL_GRANT in commands:
            lease_s = receiving.deadline_s - now_s
            if lease_s > 0:
                self._answer(source, wire.Grant(transfer, message.attempt, lease_s))

    def _mismatch(self, spec: ReceiveSpec, message: wire.Open) -> str:
        need_target, need_draft = self._pages_needed(spec.num_tokens)
        if message.num_tokens != spec.num_tokens:
            return f"{message.num_tokens} tokens offered, {spec.num_tokens} expected"
        if message.target_pages != tuple(spec.destination.target[:need_target]):
            return "the target pages are not those reserved"
        if message.ship_draft and message.draft_pages != tuple(spec.destination.draft[:need_draft]):
            return "the draft pages are not those reserved"
        return ""

    def _hear_done(self, source: WorkerEpoch, message: wire.Done) -> None:
        receiving = self._receiving.get(message.transfer)
        if receiving is None:
            self._answer_closed_receiver(source, message.transfer)
            return
        if receiving.writer != source:
            return
        want_target, want_draft = self._bytes_needed(receiving.spec.num_tokens, receiving.ship_draft)
        if (
            (message.bytes_target, message.bytes_draft) == (want_target, want_draft)
            and message.handoff.num_tokens == receiving.spec.num_tokens
            and message.handoff.draft_shipped == receiving.ship_draft
        ):
            receiving.done = message
            self._receiver_event(message.transfer, ReceiverEvent.COMPLETED)
        else:
            reason = (
                f"{message.bytes_target} target and {message.bytes_draft} draft bytes of "
                f"{message.handoff.num_tokens} tokens arrived; "
                f"{want_target} and {want_draft} of {receiving.spec.num_tokens} were expected"
            )
            self._receiver_event(
                message.transfer, ReceiverEvent.MISDELIVERED, Outcome(TerminalState.FAILED, reason)
            )

    def _hear_closed(self, source: WorkerEpoch, message: wire.Closed) -> None:
        key = (_RECEIVER, message.transfer)
        outgoing = self._outbox.get(key)
        if message.transfer not in self._receiving:
            if outgoing is not None and outgoing.peer == source:
                del self._outbox[key]
            self._answer(source, wire.Ack(message.transfer))
            return
        receiving = self._receiving[message.transfer]
        granted = receiving.writer is not None
        if receiving.writer is None:
            receiving.writer = source  # it gave up before its Open arrived
        if receiving.writer != source:
            return
        state = TerminalState.FAILED if message.state is TerminalState.DONE else message.state
        outcome = Outcome(state, f"ended by the sender: {message.reason}")
        quiet = message.quiet or not granted
        event = ReceiverEvent.WRITER_CLOSED if quiet else ReceiverEvent.WRITER_ABANDONED
        self._receiver_event(message.transfer, event, outcome)

    def _answer_closed_receiver(self, source: WorkerEpoch, transfer: TransferId) -> None:
        """An Open or Done about a transfer that is not open here: repeat how it ended, or say that it is
        unknown.
        """
        closed = self._closed.get((_RECEIVER, transfer))
        if closed is None or (closed.peer is not None and closed.peer != source):
            self._answer(source, wire.Refuse(transfer, "not expected here"))
        elif closed.outcome.state is TerminalState.DONE:
            self._answer(source, wire.Ack(transfer))
        else:
            self._answer(source, wire.Abort(transfer, closed.outcome.state, closed.outcome.reason))

    # sender's side

    def _is_peer_of_sender(self, source: WorkerEpoch, transfer: TransferId) -> bool:
        sending = self._sending.get(transfer)
        return sending is not None and sending.spec.peer == source

    def _hear_grant(self, source: WorkerEpoch, message: wire.Grant) -> None:
        sending = self._sending.get(message.transfer)
        if sending is None or sending.spec.peer != source:
            return
        if not 0 <= message.attempt < len(sending.open_sent_s):
            return
        lease_end_s = sending.open_sent_s[message.attempt] + message.lease_s
        if not math.isfinite(lease_end_s):
            return
        sending.lease_end_s = max(sending.lease_end_s, lease_end_s)
        self._sender_event(message.transfer, SenderEvent.GRANTED)

    def _hear_ack(self, source: WorkerEpoch, message: wire.Ack) -> None:
        key = (_SENDER, message.transfer)
        sending = self._sending.get(message.transfer)
        if sending is not None:
            if sending.spec.peer == source and sending.state.phase is SenderPhase.FINISHING:
                self._sender_event(message.transfer, SenderEvent.ACKED)
            return
        outgoing = self._outbox.get(key)
        if outgoing is not None and outgoing.peer == source:
            del self._outbox[key]

    def _hear_abort(self, source: WorkerEpoch, message: wire.Abort) -> None:
        transfer = message.transfer
        if transfer in self._sending:
            if self._is_peer_of_sender(source, transfer):
                state = TerminalState.FAILED if message.state is TerminalState.DONE else message.state
                outcome = Outcome(state, f"ended by the receiver: {message.reason}")
                self._sender_event(transfer, SenderEvent.ABORTED, outcome)
            return
        closed = self._closed.get((_SENDER, transfer))
        if closed is None:
            # Forgotten or never known: either way this incarnation writes nothing of it.
            self._answer(source, wire.Closed(transfer, TerminalState.FAILED, "unknown transfer", quiet=True))
        elif closed.peer == source:
            self._answer(
                source, wire.Closed(transfer, closed.outcome.state, closed.outcome.reason, closed.quiet)
            )

    # ---- transitions

    def _sender_event(self, transfer: TransferId, event: SenderEvent, outcome: Outcome | None = None) -> None:
        sending = self._sending[transfer]
        before = sending.state.phase
        sending.state, commands = sending.state.on(event, outcome)
        key = (_SENDER, transfer)
        if sending.state.phase is not before:
            self._outbox.pop(key, None)  # whatever was asked is answered or moot
        closing = sending.state.outcome
        for command in commands:
            match command:
                case SenderCommand.TELL_DONE:
                    assert sending.handoff is not None
                    bytes_target, bytes_draft = self._bytes_shipped(sending)
                    done = wire.Done(
                        transfer=transfer,
                        handoff=sending.handoff,
                        bytes_target=bytes_target,
                        bytes_draft=bytes_draft,
                    )
                    self._say(key, sending.spec.peer, done)
                case SenderCommand.STOP_WRITES:
                    # In flight writes may complete; only those of a dead peer are cancelled at once.
                    if event is SenderEvent.PEER_GONE:
                        self._cancel_writes(sending)
                case SenderCommand.TELL_CLOSED:
                    assert closing is not None
                    if sending.spec.peer in self._peers:
                        closed = wire.Closed(transfer, closing.state, closing.reason, sending.quiet)
                        self._say(key, sending.spec.peer, closed)
                case SenderCommand.REPORT:
                    assert closing is not None
                    self._close_sender(transfer, sending, closing)

    def _close_sender(self, transfer: TransferId, sending: _Sending, outcome: Outcome) -> None:
        del self._sending[transfer]
        self._remember((_SENDER, transfer), _Closed(sending.spec.peer, outcome, sending.quiet))
        if outcome.state is TerminalState.DONE:
            bytes_target, bytes_draft = self._bytes_shipped(sending)
            self._count_bytes(bytes_target, bytes_draft)
            self._events.append(Delivered(transfer, bytes_target, bytes_draft))
        else:
            self._events.append(Broke(transfer, outcome.state, outcome.reason))

    def _receiver_event(
        self, transfer: TransferId, event: ReceiverEvent, outcome: Outcome | None = None
    ) -> tuple[Receiver, tuple[ReceiverCommand, ...]]:
        receiving = self._receiving[transfer]
        before = receiving.state.phase
        receiving.state, commands = receiving.state.on(event, outcome)
        key = (_RECEIVER, transfer)
        if receiving.state.phase is not before:
            self._outbox.pop(key, None)
        closing = receiving.state.outcome
        for command in commands:
            match command:
                case ReceiverCommand.TELL_GRANT:
                    pass  # said by the caller, who knows the time and the attempt
                case ReceiverCommand.TELL_ACK:
                    assert receiving.writer is not None
                    self._answer(receiving.writer, wire.Ack(transfer))
                case ReceiverCommand.TELL_ABORT:
                    assert receiving.writer is not None
                    assert closing is not None
                    if key not in self._outbox:
                        self._say(key, receiving.writer, wire.Abort(transfer, closing.state, closing.reason))
                case ReceiverCommand.REPORT:
                    assert closing is not None
                    self._close_receiver(transfer, receiving, closing)
        return receiving.state, commands

    def _close_receiver(self, transfer: TransferId, receiving: _Receiving, outcome: Outcome) -> None:
        del self._receiving[transfer]
        self._remember((_RECEIVER, transfer), _Closed(receiving.writer, outcome))
        done = receiving.done
        if outcome.state is TerminalState.DONE and done is not None:
            self._count_bytes(done.bytes_target, done.bytes_draft)
            self._events.append(Landed(transfer, done.handoff, done.bytes_target, done.bytes_draft))
        else:
            self._events.append(Broke(transfer, outcome.state, outcome.reason))

    def _remember(self, key: _Key, closed: _Closed) -> None:
        self._ends[closed.outcome.state] += 1
        self._closed[key] = closed
        while len(self._closed) > self._timing.closed_memory:
            self._closed.popitem(last=False)

    # ---- small questions

    def _vet(self, packed: bytes) -> Hello:
        theirs = handshake.admit(self.ours, packed)
        if theirs.epoch == self.ours.epoch:
            raise HandshakeRefused([f"worker {theirs.epoch} cannot connect to itself"])
        known = self._peers.get(theirs.epoch)
        if known is not None and known.packed != packed:
            raise HandshakeRefused([f"worker {theirs.epoch} introduced itself differently before"])
        return theirs

    def _require_new(
        self,
        side: str,
        transfer: TransferId,
        open_ones: dict[TransferId, _Sending] | dict[TransferId, _Receiving],
    ) -> None:
        if transfer in open_ones or (side, transfer) in self._closed:
            raise DuplicateTransfer(transfer)

    def _find_sending(self, transfer: TransferId) -> _Sending | None:
        """The outgoing transfer; None when it has ended, which its engine will learn from the next poll."""
        sending = self._sending.get(transfer)
        if sending is None and (_SENDER, transfer) not in self._closed:
            raise UnknownTransfer(transfer)
        return sending

    def _pages_needed(self, num_tokens: int) -> tuple[int, int]:
        if num_tokens < 1:
            raise PlanError(f"a transfer of {num_tokens} tokens")
        fingerprint = self.ours.fingerprint
        draft = 0 if fingerprint.draft is None else fingerprint.draft.pages_for(num_tokens)
        return fingerprint.target.pages_for(num_tokens), draft

    def _bytes_needed(self, num_tokens: int, ship_draft: bool) -> tuple[int, int]:
        target, draft = self._pages_needed(num_tokens)
        pools = self.ours.pools
        draft_page_bytes = 0 if pools.draft is None or not ship_draft else pools.draft.page_bytes
        return target * pools.target.page_bytes, draft * draft_page_bytes

    def _bytes_shipped(self, sending: _Sending) -> tuple[int, int]:
        pools = self.ours.pools
        draft_page_bytes = 0 if pools.draft is None else pools.draft.page_bytes
        return sending.shipped_target * pools.target.page_bytes, sending.shipped_draft * draft_page_bytes

    def _count_bytes(self, bytes_target: int, bytes_draft: int) -> None:
        self._bytes_target += bytes_target
        self._bytes_draft += bytes_draft

    def check(self) -> None:
        """Raises BookCorrupt when the bookkeeping contradicts itself."""

        def require(holds: bool, what: str) -> None:
            if not holds:
                raise BookCorrupt(what)

        for transfer, sending in self._sending.items():
            phase = sending.state.phase
            owned = {write for write, owner in self._writes.items() if owner == transfer}
            require(owned == sending.in_flight, f"writes of {transfer}: {owned} != {sending.in_flight}")
            require(phase is not SenderPhase.CLOSED, f"closed sender {transfer} is still open")
            require((_SENDER, transfer) not in self._closed, f"sender {transfer} is open and closed")
            require(
                sending.spec.peer in self._peers or phase is SenderPhase.QUIESCING,
                f"sender {transfer} in {phase} without a peer",
            )
            asking = (_SENDER, transfer) in self._outbox
            wants = phase in (SenderPhase.OPENING, SenderPhase.FINISHING)
            require(asking == wants, f"sender {transfer} in {phase} asks: {asking}")
            if phase in (SenderPhase.OPENING, SenderPhase.FINISHING):
                require(not sending.in_flight, f"sender {transfer} in {phase} has writes in flight")
            final = plan.pages_final(
                sending.ready_position, sending.spec.num_tokens, self.ours.fingerprint.target.page_size
            )
            require(sending.shipped_target <= final, f"sender {transfer} shipped pages that are not final")
        for transfer, receiving in self._receiving.items():
            phase_r = receiving.state.phase
            require(phase_r is not ReceiverPhase.CLOSED, f"closed receiver {transfer} is still open")
            require((_RECEIVER, transfer) not in self._closed, f"receiver {transfer} is open and closed")
            bound = receiving.writer is not None
            require(
                bound == (phase_r is not ReceiverPhase.EXPECTING),
                f"receiver {transfer} in {phase_r} has writer {receiving.writer}",
            )
            require(
                receiving.writer is None or receiving.writer in self._peers,
                f"receiver {transfer} in {phase_r} without a peer",
            )
        require(
            all(owner in self._sending for owner in self._writes.values()),
            "a write of a closed transfer",
        )
        require(
            len(self._closed) <= self._timing.closed_memory,
            f"{len(self._closed)} closed transfers remembered",
        )
        require(
            all(entry.peer in self._peers for entry in self._outbox.values()),
            "a message to a lost peer",
        )
