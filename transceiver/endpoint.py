"""One worker's end of all its transfers, single-threaded: the shell between a `TransferBook` and a
`Transport`.

Life cycle: built over a transport, connected to peers by their hellos, polled by the thread that owns it,
closed once. Calls change the book; `poll` alone does I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from kvmanager.ids import TransferId, WorkerEpoch
from transceiver.book import Action, CancelWrite, DropPeer, Meet, Notify, Timing, TransferBook
from transceiver.errors import TransportError
from transceiver.port import PortStats, ReceiveSpec, SendSpec, TransferEvent
from transceiver.transport import Transport, Write
from transceiver.wire import Fingerprint, Handoff, Hello, Pools, encode


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is to its peers: one epoch per process incarnation, its role's name, and what its KV
    means.
    """

    epoch: WorkerEpoch
    role: str
    fingerprint: Fingerprint


class Endpoint:
    """Implements `TransferPort`; use it from one thread."""

    def __init__(
        self, identity: Identity, pools: Pools, transport: Transport, timing: Timing | None = None
    ) -> None:
        self.transport = transport
        self.book = TransferBook(
            Hello(
                epoch=identity.epoch,
                role=identity.role,
                fingerprint=identity.fingerprint,
                pools=pools,
                transport=transport.name,
                metadata=transport.metadata(),
            ),
            timing,
        )

    def hello(self) -> bytes:
        return encode(self.book.ours)

    def connect(self, hello: bytes) -> WorkerEpoch:
        theirs, new = self.book.admit(hello)
        if new:
            try:
                self.transport.add_peer(theirs)
            except TransportError as error:
                self.book.dismiss(theirs.epoch, str(error))
                raise
        return theirs.epoch

    def disconnect(self, epoch: WorkerEpoch) -> None:
        self.book.dismiss(epoch, "disconnected")

    def open(self, spec: SendSpec) -> None:
        self.book.open(spec)

    def push(self, transfer: TransferId, end_position: int) -> None:
        self.book.push(transfer, end_position)

    def finish(self, transfer: TransferId, handoff: Handoff) -> None:
        self.book.finish(transfer, handoff)

    def expect(self, spec: ReceiveSpec) -> None:
        self.book.expect(spec)

    def abort(self, transfer: TransferId, reason: str) -> None:
        self.book.abort(transfer, reason)

    def poll(self, now_s: float) -> list[TransferEvent]:
        for peer, reason in perform(self.book.step(now_s, self.transport.poll(now_s)), self.transport):
            self.book.dismiss(peer, reason)
        return self.book.take_events()

    def stats(self) -> PortStats:
        return self.book.stats()

    def check(self) -> None:
        self.book.check()

    def close(self) -> None:
        self.transport.close()


def perform(actions: Sequence[Action], transport: Transport) -> list[tuple[WorkerEpoch, str]]:
    """Carry out what a book decided, in its order. Returns the peers that the transport could not take, and
    why.
    """
    refused: list[tuple[WorkerEpoch, str]] = []
    for action in actions:
        match action:
            case Write():
                transport.write(action)
            case Notify():
                transport.notify(action.peer, action.message)
            case CancelWrite():
                transport.cancel(action.write)
            case Meet():
                try:
                    transport.add_peer(action.hello)
                except TransportError as error:
                    refused.append((action.hello.epoch, str(error)))
            case DropPeer():
                transport.remove_peer(action.peer)
            case _:
                assert_never(action)
    return refused
