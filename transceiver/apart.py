"""`TransferPort` of a worker whose ranks keep requests apart: a transfer is one rank's, with all heads of its pages.

Each rank is to its peers a worker of one rank, with an epoch of its own, introduced together with the others:

    connect     every rank, to every rank of the peer that it may ship to
    expect      the rank whose pages they are; the reservation names its epoch
    hold        the first rank, because nobody knows yet which rank will compute the prompt
    open        the rank whose pages they are, which goes on with what the first rank held
    push ..     that rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from kvmanager.ids import TransferId, WorkerEpoch
from transceiver import wire
from transceiver.errors import DuplicateTransfer, UnknownTransfer
from transceiver.group import GroupPort
from transceiver.port import Broke, PortStats, Ready, ReceiveSpec, SendSpec, TransferEvent
from transceiver.wire import Handoff

_FIRST = 0


class ApartPort:
    """Implements `TransferPort`. `connect`, `disconnect` and `stats` may be called from any thread."""

    def __init__(self, ports: Sequence[GroupPort]) -> None:
        """`ports`: one for each rank, in order, each of that rank alone; the first is this process's own."""
        self._ports = tuple(ports)
        self._hellos = [port.hello() for port in self._ports]
        self._ranks: dict[TransferId, int] = {}

    @property
    def epochs(self) -> tuple[WorkerEpoch, ...]:
        """By which each rank is known to peers."""
        return tuple(wire.decode_hello(hello).epoch for hello in self._hellos)

    def hello(self) -> bytes:
        return wire.encode_group(self._hellos)

    def connect(self, hello: bytes) -> WorkerEpoch:
        first, *others = self._ports
        worker = first.connect(hello)
        for port in others:
            port.connect(hello)
        return worker

    def disconnect(self, epoch: WorkerEpoch) -> None:
        for port in self._ports:
            port.disconnect(epoch)

    def hold(self, transfer: TransferId, peer: WorkerEpoch, ttl_s: float) -> None:
        self._ports[_FIRST].hold(transfer, peer, ttl_s)
        self._ranks[transfer] = _FIRST

    def let_go(self, transfer: TransferId) -> int:
        attempts = self._port_of(transfer).let_go(transfer)
        del self._ranks[transfer]
        return attempts

    def open(self, spec: SendSpec) -> None:
        rank = spec.source.rank
        if spec.transfer in self._ranks and rank != _FIRST:
            spec = replace(spec, first_attempt=self.let_go(spec.transfer))
        self._ports[rank].open(spec)
        self._ranks[spec.transfer] = rank

    def push(self, transfer: TransferId, end_position: int, ready: Ready | None = None) -> None:
        self._port_of(transfer).push(transfer, end_position, ready)

    def finish(self, transfer: TransferId, handoff: Handoff, ready: Ready | None = None) -> None:
        self._port_of(transfer).finish(transfer, handoff, ready)

    def expect(self, spec: ReceiveSpec) -> None:
        if spec.transfer in self._ranks:
            raise DuplicateTransfer(spec.transfer)
        rank = spec.destination.rank
        self._ports[rank].expect(spec)
        self._ranks[spec.transfer] = rank

    def abort(self, transfer: TransferId, reason: str) -> None:
        if transfer in self._ranks:
            self._port_of(transfer).abort(transfer, reason)

    def poll(self, now_s: float) -> list[TransferEvent]:
        events = [event for port in self._ports for event in port.poll(now_s)]
        for event in events:
            if not isinstance(event, Broke) or event.pages_safe:
                self._ranks.pop(event.transfer, None)
        return events

    def wake_on_event(self, wake: Callable[[], None]) -> None:
        for port in self._ports:
            port.wake_on_event(wake)

    def stats(self) -> PortStats:
        """Of all ranks together; `write_s` is the first rank's."""
        stats = [port.stats() for port in self._ports]
        return PortStats(
            **{field.name: sum(getattr(each, field.name) for each in stats) for field in fields(PortStats)}
        )

    def check(self) -> None:
        for port in self._ports:
            port.check()

    def close(self) -> None:
        for port in self._ports:
            port.close()

    def _port_of(self, transfer: TransferId) -> GroupPort:
        try:
            return self._ports[self._ranks[transfer]]
        except KeyError:
            raise UnknownTransfer(transfer) from None
