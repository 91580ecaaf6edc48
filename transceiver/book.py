"""All transfers of one worker: peers, both halves, deadlines, what must be said again. Pure.

Calls (`open`, `push`, `abort`, …) only change the book. `step(now_s, inbound)` takes what the transport found, advances
every transfer, and returns the I/O to do; whoever owns the transport carries it out. So the book may be guarded by a
lock that is never held during I/O. Messages from strangers or about unknown transfers change nothing and grow nothing.
"""

from __future__ import annotations

import enum
from typing import assert_never

from kvmanager.ids import TransferId, WorkerEpoch
from transceiver import wire
from transceiver.errors import BookCorrupt, WireError
from transceiver.peers import Peers
from transceiver.port import PortStats, Ready, ReceiveSpec, SendSpec, TransferEvent
from transceiver.receiving import Receiving
from transceiver.records import Action, DropPeer, Key, Meet, Records, Side, Timing
from transceiver.sending import Mark, Sending
from transceiver.transfer import Outcome
from transceiver.transport import Inbound
from transceiver.wire import Hello, Region, TerminalState


class Urgency(enum.IntEnum):
    """How soon the next step should come."""

    IDLE = 0
    OPEN = 1  # a transfer waits for something: a chunk, a grant, an answer
    WRITTEN_TO = 2  # a peer may be writing our pages, and some links need our polls for that
    AWAITING = 3  # the device computes what is to be shipped next
    MOVING = 4  # writes or actions are under way


class TransferBook:
    """One worker's transfers. `ours` is this worker's hello; it never changes."""

    def __init__(self, ours: Hello, staging: Region, timing: Timing | None = None) -> None:
        """`staging`: where this worker gathers what cannot be written from its pools directly."""
        self.ours = ours
        self._packed_hello = wire.encode(ours)
        self._records = Records(timing or Timing())
        self._peers = Peers(ours, self._records.timing.max_introduced, staging.size_bytes)
        self._sending = Sending(ours, self._peers, self._records, staging)
        self._receiving = Receiving(ours, self._peers, self._records)
        self._writing_since_s: float | None = None

    # calls

    def admit(self, packed: bytes) -> tuple[Hello, bool]:
        """Check a peer's hello; returns it, and whether the peer is new and must be made known to the transport."""
        theirs, new = self._peers.admit(packed)
        if new:
            # A drop that nobody has carried out yet must not hit the new connection.
            self._records.actions = [a for a in self._records.actions if a != DropPeer(theirs.epoch)]
            # Known to each other from now on, and the link is up before the first transfer needs it. Should this be
            # lost, whatever wants an answer from a peer that has not spoken yet brings it again.
            self._records.answer(theirs.epoch, wire.Introduce(self._packed_hello))
        return theirs, new

    def dismiss_worker(self, worker: WorkerEpoch, reason: str) -> None:
        """A worker is gone, and with it all its ranks."""
        for peer in self._peers.of(worker):
            self.dismiss(peer, reason)

    def dismiss(self, peer: WorkerEpoch, reason: str) -> None:
        """A rank is gone, though others of its worker may live. Its transfers break at once: a dead one writes no more.

        A stranger is harmless.
        """
        if not self._peers.drop(peer):
            return
        self._records.actions.append(DropPeer(peer))
        gone = Outcome(TerminalState.FAILED, f"worker {peer} is gone: {reason}")
        self._sending.peer_gone(peer, gone)
        self._receiving.peer_gone(peer, gone)
        self._records.forget_peer(peer)

    def hold(self, transfer: TransferId, peer: WorkerEpoch, ttl_s: float) -> None:
        self._sending.hold(transfer, peer, ttl_s)

    def let_go(self, transfer: TransferId) -> int:
        return self._sending.let_go(transfer)

    def open(self, spec: SendSpec) -> None:
        self._sending.open(spec)

    def push(self, transfer: TransferId, end_position: int, ready: Ready | None = None) -> None:
        self._sending.push(transfer, end_position, ready)

    def finish(self, transfer: TransferId, handoff: wire.Handoff, ready: Ready | None = None) -> None:
        self._sending.finish(transfer, handoff, ready)

    def awaited(self) -> list[tuple[TransferId, tuple[Mark, ...]]]:
        """What the device has yet to finish, in its order: whoever may do I/O asks, and tells `reached`."""
        return self._sending.awaited()

    def reached(self, transfer: TransferId, mark: Mark) -> None:
        """The device has finished this mark, and with it those before it."""
        self._sending.reached(transfer, mark)

    def computing_failed(self, transfer: TransferId, reason: str) -> None:
        """The device will not finish what was pushed."""
        self._sending.computing_failed(transfer, reason)

    def expect(self, spec: ReceiveSpec) -> None:
        self._receiving.expect(spec)

    def abort(self, transfer: TransferId, reason: str) -> None:
        self._sending.abort(transfer, reason)
        self._receiving.abort(transfer, reason)

    def inspected(self, transfer: TransferId, mismatch: str) -> None:
        """The answer to an `Inspect`: why the content is wrong, or nothing."""
        self._receiving.inspected(transfer, mismatch)

    def take_events(self) -> list[TransferEvent]:
        events, self._records.events = self._records.events, []
        return events

    # one step

    def step(self, now_s: float, inbound: Inbound) -> list[Action]:
        """Advance everything by what the transport found and by the clock. The actions are in order."""
        if self._writing_since_s is not None:
            self._records.write_s += now_s - self._writing_since_s
        for ended in inbound.ended:
            self._sending.write_ended(ended)
        for source, data in inbound.messages:
            self._hear(source, data, now_s)
        for peer, reason in inbound.lost:
            self.dismiss(peer, reason)
        self._sending.advance(now_s)
        self._receiving.advance(now_s)
        self._say_what_is_due(now_s)
        self._writing_since_s = now_s if self._sending.writing else None
        actions, self._records.actions = self._records.actions, []
        return actions

    def _say_what_is_due(self, now_s: float) -> None:
        for key, outgoing in self._records.due(now_s, self._is_open):
            message = outgoing.message
            if isinstance(message, wire.Open):
                message = self._sending.opening(key[1], outgoing, now_s)
            peer = self._peers.get(outgoing.peer)
            # One that has not answered for long may have lost the connection, and with it the memory of us.
            lost = outgoing.pause_s >= self._records.timing.resend_max_s
            if peer is not None and (lost or not peer.heard):
                self._records.answer(outgoing.peer, wire.Introduce(self._packed_hello))
            self._records.answer(outgoing.peer, message)

    def _is_open(self, key: Key) -> bool:
        side, transfer = key
        return transfer in (self._sending if side is Side.SENDER else self._receiving)

    def _hear(self, source: WorkerEpoch, data: bytes, now_s: float) -> None:
        try:
            message = wire.decode(data)
        except WireError:
            return
        if isinstance(message, wire.Introduce):
            theirs = self._peers.meet(source, message.hello)
            if theirs is not None:
                self._records.actions.append(Meet(theirs))
            return
        peer = self._peers.get(source)
        if peer is None:
            return
        peer.heard = True
        match message:
            case wire.Open():
                self._receiving.hear_open(source, message, now_s)
            case wire.Renew():
                self._receiving.hear_renew(source, message, now_s)
            case wire.Done():
                self._receiving.hear_done(source, message)
            case wire.Closed():
                self._receiving.hear_closed(source, message)
            case wire.Grant():
                self._sending.hear_grant(source, message)
            case wire.Refuse():
                self._sending.hear_refuse(source, message)
            case wire.Ack():
                self._sending.hear_ack(source, message)
            case wire.Abort():
                self._sending.hear_abort(source, message)
            case _:
                assert_never(message)

    # questions

    @property
    def urgency(self) -> Urgency:
        if self._records.actions or self._sending.writing:
            return Urgency.MOVING
        if self._sending.awaiting:
            return Urgency.AWAITING
        if self._receiving.granted:
            return Urgency.WRITTEN_TO
        sending, receiving = self._sending, self._receiving
        waiting = (
            len(sending) + sending.num_held + sending.num_late + len(receiving) + len(self._records.outbox)
        )
        return Urgency.OPEN if waiting else Urgency.IDLE

    def stats(self) -> PortStats:
        records = self._records
        return PortStats(
            sending=len(self._sending),
            receiving=len(self._receiving) - self._receiving.num_quarantined,
            quarantined=self._receiving.num_quarantined,
            done=records.ends[TerminalState.DONE],
            failed=records.ends[TerminalState.FAILED],
            cancelled=records.ends[TerminalState.CANCELLED],
            expired=records.ends[TerminalState.EXPIRED],
            bytes_target=records.bytes_target,
            bytes_draft=records.bytes_draft,
            write_s=records.write_s,
        )

    def check(self) -> None:
        """Raises BookCorrupt when the bookkeeping contradicts itself."""
        self._sending.check()
        self._receiving.check()
        if len(self._records.closed) > self._records.timing.closed_memory:
            raise BookCorrupt(f"{len(self._records.closed)} closed transfers are remembered")
        for _, transfer in (
            key for key, entry in self._records.outbox.items() if entry.peer not in self._peers
        ):
            raise BookCorrupt("a message waits for a worker that is gone", transfer)
