"""The port over a thread: same answers as the endpoint, errors to the caller, and a quiet thread when idle."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvmanager.ids import TransferId, WorkerEpoch
from tests.transceiver.small_worker import FINGERPRINT, Memory, handoff, pages
from transceiver.endpoint import Identity
from transceiver.errors import (
    HandshakeRefused,
    PlanError,
    PumpStopped,
    TransportError,
    UnknownPeer,
    WireError,
)
from transceiver.loopback import LoopbackHub, LoopbackTransport
from transceiver.port import Delivered, Landed, ReceiveSpec, SendSpec, TransferEvent, TransferPort
from transceiver.pump import Pump
from transceiver.transport import Inbound, Transport

T = TransferId("t")


class Pumps:
    """Pumps over one hub, closed at the end."""

    def __init__(self) -> None:
        self.hub = LoopbackHub()
        self.memories: dict[str, Memory] = {}
        self._open: list[Pump] = []

    def start(
        self,
        name: str,
        fill_seed: int | None = None,
        wrap: Callable[[Transport], Transport] = lambda transport: transport,
        on_event: Callable[[], None] | None = None,
    ) -> Pump:
        epoch = WorkerEpoch(name)
        memory = self.memories[name] = Memory(32, fill_seed)
        pump = Pump(
            Identity(epoch, "any", FINGERPRINT),
            memory.pools,
            lambda: wrap(LoopbackTransport(self.hub, epoch, memory.pools)),
            on_event=on_event,
        )
        self._open.append(pump)
        return pump

    def close(self) -> None:
        for pump in self._open:
            pump.close()


@pytest.fixture
def pumps() -> Iterator[Pumps]:
    opened = Pumps()
    yield opened
    opened.close()


def wait_for(port: TransferPort, timeout_s: float = 5.0) -> TransferEvent:
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        events = port.poll(time.monotonic())
        if events:
            return events[0]
        time.sleep(0.001)
    raise AssertionError("no event")


class Breaks:
    """A transport that raises from `poll` once it is told to."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.armed = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def poll(self, now_s: float) -> Inbound:
        if self.armed:
            raise ValueError("the card is on fire")
        return self._inner.poll(now_s)


def test_a_transfer_between_two_threads_delivers_its_bytes(pumps: Pumps) -> None:
    sender, receiver = pumps.start("sender", fill_seed=3), pumps.start("receiver")
    assert sender.connect(receiver.hello()) == "receiver"
    receiver.expect(ReceiveSpec(transfer=T, num_tokens=10, destination=pages(4, 5, 6), ttl_s=5))
    sender.open(
        SendSpec(
            transfer=T,
            peer=WorkerEpoch("receiver"),
            num_tokens=10,
            source=pages(1, 2, 3),
            destination=pages(4, 5, 6),
            ttl_s=5,
        )
    )
    sender.push(T, 5)
    sender.finish(T, handoff(10))
    assert isinstance(wait_for(receiver), Landed)
    assert isinstance(wait_for(sender), Delivered)
    assert pumps.memories["receiver"].holds((4, 5, 6), pumps.memories["sender"], (1, 2, 3))
    sender.check()
    receiver.check()
    assert sender.stats().done == receiver.stats().done == 1


def test_an_event_rings_the_engine(pumps: Pumps) -> None:
    rung = threading.Event()
    receiver = pumps.start("receiver", on_event=rung.set)
    receiver.expect(ReceiveSpec(transfer=T, num_tokens=4, destination=pages(1), ttl_s=5))
    receiver.abort(T, "not wanted")
    assert rung.wait(2.0)
    assert len(receiver.poll(0.0)) == 1


def test_what_the_endpoint_refuses_is_raised_at_the_caller(pumps: Pumps) -> None:
    pump = pumps.start("one")
    with pytest.raises(WireError):
        pump.connect(b"junk")
    with pytest.raises(HandshakeRefused, match="itself"):
        pump.connect(pump.hello())
    spec = SendSpec(
        transfer=T, peer=WorkerEpoch("x"), num_tokens=4, source=pages(1), destination=pages(1), ttl_s=1
    )
    with pytest.raises(UnknownPeer):
        pump.open(spec)
    with pytest.raises(PlanError):
        pump.expect(ReceiveSpec(transfer=T, num_tokens=4, destination=pages(), ttl_s=1))


def test_a_transport_that_cannot_start_is_raised_by_the_constructor(pumps: Pumps) -> None:
    def refuse(_: Transport) -> Transport:
        raise TransportError("no such card")

    with pytest.raises(TransportError, match="no such card"):
        pumps.start("one", wrap=refuse)


def test_a_thread_that_died_is_told_to_every_caller(pumps: Pumps, caplog: pytest.LogCaptureFixture) -> None:
    broken: list[Breaks] = []

    def wrap(transport: Transport) -> Transport:
        broken.append(Breaks(transport))
        return broken[0]  # type: ignore[return-value]

    pump = pumps.start("one", wrap=wrap)
    broken[0].armed = True
    with pytest.raises(PumpStopped) as stopped:
        wait_for(pump)
    assert isinstance(stopped.value.__cause__, ValueError)
    for call in (
        lambda: pump.connect(b""),
        lambda: pump.abort(T, "x"),
        lambda: pump.expect(ReceiveSpec(transfer=T, num_tokens=4, destination=pages(1), ttl_s=1)),
    ):
        with pytest.raises(PumpStopped):
            call()
    assert "the transfer thread ends" in caplog.text


def test_a_closed_pump_answers_that_it_is_closed(pumps: Pumps) -> None:
    pump = pumps.start("one")
    pump.close()
    pump.close()
    with pytest.raises(PumpStopped):
        pump.poll(0.0)
    with pytest.raises(PumpStopped):
        pump.connect(b"")


def test_an_idle_pump_uses_next_to_no_processor_time(pumps: Pumps) -> None:
    pumps.start("one")
    time.sleep(0.1)
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    assert used_s < 0.05
