"""One worker's end of all its transfers: the shell between a `TransferBook` and a
`Transport`.

Life cycle: built over a transport, connected to peers by their hellos, polled by the thread that owns it,
closed once. Calls change the book; `poll` alone does I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from kvmanager.ids import TransferId, WorkerEpoch
from transceiver.annex import DEFAULT_STAGING_BYTES, Annex, Inspect, Prepare
from transceiver.book import TransferBook, Urgency
from transceiver.errors import TransportError
from transceiver.port import PortStats, Ready, ReceiveSpec, SendSpec, TransferEvent
from transceiver.records import Action, CancelWrite, DropPeer, Meet, Notify, Timing
from transceiver.sending import Mark
from transceiver.transport import Transport, Write
from transceiver.wire import ONLY_RANK, Fingerprint, Handoff, Hello, Place, Pools, encode, with_tags


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this rank of a worker is to its peers: one epoch per process incarnation, its worker's role, what its KV
    means, and which rank it is.
    """

    epoch: WorkerEpoch
    role: str
    fingerprint: Fingerprint
    place: Place = ONLY_RANK


class Endpoint:
    """Implements `TransferPort`. `connect`, `poll` and `close` belong to the thread that owns the transport; the
    rest may be called from any thread: the book's lock is never held during I/O.
    """

    def __init__(
        self,
        identity: Identity,
        pools: Pools,
        transport: Transport,
        timing: Timing | None = None,
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        """Raises TransportError when the transport cannot register the endpoint's own memory."""
        self._transport = transport
        self._annex = Annex(pools, identity.fingerprint, staging_bytes)
        own = [self._annex.staging] if self._annex.tags is None else [self._annex.staging, self._annex.tags]
        transport.register(own)
        if self._annex.tags is not None:
            transport.stage_tags(self._annex.staged_tags)
        self._lock = threading.Lock()
        self._moved = False
        ours = Hello(
            epoch=identity.epoch,
            role=identity.role,
            fingerprint=identity.fingerprint,
            pools=with_tags(pools, self._annex.tags),
            transport=transport.name,
            metadata=transport.metadata(),
            place=identity.place,
        )
        self._hello = encode(ours)
        self._book = TransferBook(ours, self._annex.staging, timing)

    def hello(self) -> bytes:
        return self._hello

    def connect(self, hello: bytes) -> WorkerEpoch:
        with self._lock:
            theirs, new = self._book.admit(hello)
        if new:
            try:
                self._transport.add_peer(theirs)
            except TransportError as error:
                self._dismiss(theirs.epoch, str(error))
                raise
        return theirs.epoch

    def disconnect(self, epoch: WorkerEpoch) -> None:
        with self._lock:
            self._book.dismiss_worker(epoch, "disconnected")

    def hold(self, transfer: TransferId, peer: WorkerEpoch, ttl_s: float) -> None:
        with self._lock:
            self._book.hold(transfer, peer, ttl_s)

    def let_go(self, transfer: TransferId) -> int:
        with self._lock:
            return self._book.let_go(transfer)

    def open(self, spec: SendSpec) -> None:
        with self._lock:
            self._book.open(spec)

    def push(self, transfer: TransferId, end_position: int, ready: Ready | None = None) -> None:
        with self._lock:
            self._book.push(transfer, end_position, ready)

    def finish(self, transfer: TransferId, handoff: Handoff, ready: Ready | None = None) -> None:
        with self._lock:
            self._book.finish(transfer, handoff, ready)

    def expect(self, spec: ReceiveSpec) -> None:
        with self._lock:
            self._book.expect(spec)

    def abort(self, transfer: TransferId, reason: str) -> None:
        with self._lock:
            self._book.abort(transfer, reason)

    def poll(self, now_s: float) -> list[TransferEvent]:
        inbound = self._transport.poll(now_s)
        self._ask_the_device()
        with self._lock:
            actions = self._book.step(now_s, inbound)
        for peer, reason in self._perform(actions):
            self._dismiss(peer, reason)
        self._moved = bool(actions or inbound.messages or inbound.ended or inbound.lost)
        with self._lock:
            return self._book.take_events()

    @property
    def moved(self) -> bool:
        """Whether the last poll found or did anything."""
        return self._moved

    @property
    def urgency(self) -> Urgency:
        with self._lock:
            return self._book.urgency

    def wake_on_event(self, wake: Callable[[], None]) -> None:
        """Events come from `poll` itself, so there is nothing to wake for."""

    def stats(self) -> PortStats:
        with self._lock:
            return self._book.stats()

    def check(self) -> None:
        with self._lock:
            self._book.check()

    def close(self) -> None:
        self._transport.close()

    def _ask_the_device(self) -> None:
        """Find out which forwards have finished. Asking is I/O, so the book is unlocked meanwhile."""
        with self._lock:
            awaited = self._book.awaited()
        for transfer, marks in awaited:
            reached: Mark | None = None
            failure: RuntimeError | None = None
            try:
                for mark in marks:
                    if mark.ready is not None and not mark.ready():
                        break
                    reached = mark
            except RuntimeError as error:
                failure = error
            with self._lock:
                if failure is not None:
                    reason = f"the forward that computes its KV failed: {failure}"
                    self._book.computing_failed(transfer, reason)
                elif reached is not None:
                    self._book.reached(transfer, reached)

    def _dismiss(self, peer: WorkerEpoch, reason: str) -> None:
        with self._lock:
            self._book.dismiss(peer, reason)

    def _perform(self, actions: Sequence[Action]) -> list[tuple[WorkerEpoch, str]]:
        """Carry out what the book decided, in its order. Returns the peers that the transport could not take."""
        refused: list[tuple[WorkerEpoch, str]] = []
        for action in actions:
            match action:
                case Prepare():
                    self._annex.prepare(action)
                case Write():
                    self._transport.write(action)
                case Inspect():
                    mismatch = self._annex.inspect(action)
                    with self._lock:
                        self._book.inspected(action.transfer, mismatch)
                case Notify():
                    self._transport.notify(action.peer, action.message)
                case CancelWrite():
                    self._transport.cancel(action.write)
                case Meet():
                    try:
                        self._transport.add_peer(action.hello)
                    except TransportError as error:
                        refused.append((action.hello.epoch, str(error)))
                case DropPeer():
                    self._transport.remove_peer(action.peer)
                case _:
                    assert_never(action)
        return refused
