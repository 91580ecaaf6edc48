"""The port of another rank, over a stream: orders, answers, events, and what the end of either side looks like."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from kvmanager.ids import TransferId, WorkerEpoch
from tests.transceiver.small_worker import FINGERPRINT, Memory, SmallWorker, handoff, pages
from transceiver.endpoint import Identity
from transceiver.errors import BookCorrupt, HandshakeRefused, RankLost
from transceiver.loopback import LoopbackHub, LoopbackTransport
from transceiver.port import Broke, Delivered, Ready, ReceiveSpec, SendSpec, TransferEvent
from transceiver.pump import Pump
from transceiver.remote import PortServer, RemotePort, Stream
from transceiver.wire import Place, TerminalState

NUM_TOKENS = 10
SOURCE, DESTINATION = pages(3, 1, 2), pages(9, 8, 7)
LIMIT_S = 20.0


class Steps:
    """Told to the first rank, and over at the other."""

    def __init__(self) -> None:
        self.told = self.over = 0

    def behind(self, step: int) -> Ready:
        return lambda: self.over >= step


@dataclass
class Ends:
    """Both ends of a stream: the first rank's port, and the other rank's, which serves it."""

    hub: LoopbackHub
    remote: RemotePort
    pump: Pump
    server: PortServer
    memory: Memory
    steps: Steps

    def poll_until(self, over: Callable[[list[TransferEvent]], bool]) -> list[TransferEvent]:
        events: list[TransferEvent] = []
        end_s = time.monotonic() + LIMIT_S
        while not over(events):
            assert time.monotonic() < end_s, events
            events += self.remote.poll(0.0)
            time.sleep(0.002)
        return events


@pytest.fixture
def ends() -> Iterator[Ends]:
    hub, steps, memory = LoopbackHub(), Steps(), Memory(32, 5)
    identity = Identity(WorkerEpoch("other"), "any", FINGERPRINT, Place(worker=WorkerEpoch("first")))
    pump = Pump(identity, memory.pools, lambda: LoopbackTransport(hub, WorkerEpoch("other"), memory.pools))
    ours, theirs = sockets()
    made: list[PortServer] = []
    serving = threading.Thread(
        target=lambda: made.append(PortServer(pump, Stream(theirs, LIMIT_S), steps.behind))
    )
    serving.start()
    remote = RemotePort(Stream(ours, LIMIT_S), lambda: steps.told, start_s=LIMIT_S, timeout_s=LIMIT_S)
    serving.join()
    yield Ends(hub, remote, pump, made[0], memory, steps)
    remote.close()
    made[0].close()


def sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


def peer(ends: Ends) -> SmallWorker:
    """A worker that the other rank ships to, polled by a thread of its own for as long as the test runs."""
    worker = SmallWorker.on(ends.hub, "peer")

    def poll() -> None:
        while not ends.remote._ended:
            worker.endpoint.poll(time.monotonic())
            time.sleep(0.002)

    worker.expect("t", NUM_TOKENS, DESTINATION, ttl_s=LIMIT_S)
    threading.Thread(target=poll, daemon=True).start()
    return worker


def sending(to: SmallWorker) -> SendSpec:
    return SendSpec(
        transfer=TransferId("t"),
        peer=to.epoch,
        num_tokens=NUM_TOKENS,
        source=SOURCE,
        destination=DESTINATION,
        ttl_s=LIMIT_S,
    )


def test_a_rank_ships_by_orders_when_its_own_steps_are_over(ends: Ends) -> None:
    to = peer(ends)
    assert ends.remote.hello() == ends.pump.hello()
    assert ends.remote.connect(to.endpoint.hello()) == to.epoch
    ends.remote.hold(TransferId("t"), to.epoch, LIMIT_S)
    ends.remote.open(sending(to))
    ends.steps.told = 3
    ends.remote.push(TransferId("t"), 8)
    ends.remote.finish(TransferId("t"), handoff(NUM_TOKENS))
    ends.remote.check()  # behind all orders
    time.sleep(0.05)
    assert ends.pump.stats().sending == 1
    assert not to.memory.target.any(), "written before the step was over"
    ends.steps.over = 3
    (delivered,) = ends.poll_until(bool)
    assert isinstance(delivered, Delivered)
    assert to.memory.holds(DESTINATION.target, ends.memory, SOURCE.target)


def test_what_a_rank_cannot_do_comes_back_as_the_end_of_the_transfer(ends: Ends) -> None:
    stranger = SmallWorker.on(ends.hub, "stranger")
    ends.remote.open(sending(stranger))
    (broke,) = ends.poll_until(bool)
    assert isinstance(broke, Broke)
    assert broke.state is TerminalState.FAILED
    assert "stranger is not connected" in broke.reason
    spec = ReceiveSpec(transfer=TransferId("r"), num_tokens=100, destination=pages(1), ttl_s=LIMIT_S)
    ends.remote.expect(spec)
    (broke,) = ends.poll_until(bool)
    assert isinstance(broke, Broke)
    assert "needs 25" in broke.reason


def test_an_expected_transfer_is_given_up_by_order(ends: Ends) -> None:
    woken = threading.Event()
    ends.remote.wake_on_event(woken.set)
    spec = ReceiveSpec(
        transfer=TransferId("r"), num_tokens=NUM_TOKENS, destination=DESTINATION, ttl_s=LIMIT_S
    )
    ends.remote.expect(spec)
    ends.remote.abort(TransferId("r"), "no longer wanted")
    (broke,) = ends.poll_until(bool)
    assert broke == Broke(TransferId("r"), TerminalState.CANCELLED, "no longer wanted")
    assert woken.is_set()
    ends.remote.disconnect(WorkerEpoch("a stranger"))  # harmless
    ends.remote.check()


def test_refusals_and_corrupt_books_are_told_as_what_they_are(ends: Ends) -> None:
    with pytest.raises(HandshakeRefused, match="cannot connect to itself"):
        ends.remote.connect(ends.pump.hello())

    def corrupt() -> None:
        raise BookCorrupt("nothing adds up")

    ends.pump.check = corrupt  # type: ignore[method-assign]
    with pytest.raises(BookCorrupt, match="nothing adds up"):
        ends.remote.check()


def test_a_rank_that_is_gone_is_lost_to_whoever_asks_or_polls(ends: Ends) -> None:
    ends.server.close()
    with pytest.raises(RankLost, match="gone"):
        ends.poll_until(lambda _: False)
    with pytest.raises(RankLost):
        ends.remote.connect(b"whoever")
    ends.remote.abort(TransferId("t"), "nobody hears it, and that is no error of its own")


def test_a_transfer_thread_that_ends_takes_its_rank_along(ends: Ends) -> None:
    def fail(now_s: float) -> None:
        raise RuntimeError("the transport fails")

    ends.pump._endpoint._transport.poll = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(RankLost):
        ends.poll_until(lambda _: False)


def test_a_rank_that_never_introduces_itself_is_waited_for_in_bounded_time() -> None:
    ours, theirs = sockets()
    with pytest.raises(RankLost, match="did not introduce itself"):
        RemotePort(Stream(ours, 1.0), lambda: 0, start_s=0.05, timeout_s=1.0)
    theirs.close()
    ours.close()


def test_a_frame_that_nobody_reads_ends_the_stream() -> None:
    ours, theirs = sockets()
    stream = Stream(ours, 0.2)
    with pytest.raises(OSError, match=r"unavailable|timed out"):
        for _ in range(1000):
            stream.send(bytes(1 << 20))
    with pytest.raises(OSError, match=r"."):
        stream.send(b"more")
    theirs.close()
