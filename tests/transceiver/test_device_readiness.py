"""Pushes whose forward still runs on the device: never written before it has finished, always in order."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from tests.transceiver.small_worker import PAGE_SIZE, Clock, SmallWorker, handoff, pages
from tests.transceiver.test_pump import Pumps, pumps, wait_for
from transceiver.book import Urgency
from transceiver.errors import PlanError
from transceiver.loopback import LoopbackHub
from transceiver.port import Broke, Delivered, Landed, Pages, ReceiveSpec, SendSpec
from transceiver.wire import TerminalState

__all__ = ["pumps"]

T = TransferId("t")


@dataclass
class Forward:
    """An event on the device."""

    done: bool = False
    asked: int = 0

    def query(self) -> bool:
        self.asked += 1
        return self.done


class Link:
    """Ten tokens on pages 1, 2, 3 here, for pages 11, 12, 13 there; the transfer is granted."""

    def __init__(self, ttl_s: float = 5.0) -> None:
        hub = LoopbackHub()
        self.sender = SmallWorker.on(hub, "sender", fill_seed=1)
        self.receiver = SmallWorker.on(hub, "receiver")
        self.sender.endpoint.connect(self.receiver.endpoint.hello())
        self.clock = Clock(self.sender, self.receiver)
        self.receiver.expect(T, 10, pages(11, 12, 13), ttl_s)
        self.sender.open(T, self.receiver, 10, pages(1, 2, 3), pages(11, 12, 13), ttl_s)
        self.run()

    def run(self, seconds: float = 0.1) -> tuple[list[object], list[object]]:
        seen = self.clock.run(seconds)
        return [*seen[self.sender.epoch]], [*seen[self.receiver.epoch]]

    @property
    def written(self) -> list[int]:
        """Pages that have arrived."""
        return [page for page in (11, 12, 13) if self.receiver.memory.target[page].any()]


def test_a_chunk_stays_at_home_until_its_forward_has_finished() -> None:
    link, forward = Link(), Forward()
    link.sender.endpoint.push(T, 8, forward.query)
    link.run()
    assert link.written == []
    assert forward.asked > 1
    assert link.sender.endpoint.urgency is Urgency.AWAITING
    forward.done = True
    link.run()
    assert link.written == [11, 12]
    asked = forward.asked
    link.run()
    assert forward.asked == asked


def test_a_later_chunk_that_is_ready_first_waits_for_the_earlier_one() -> None:
    link, first, second = Link(), Forward(), Forward(done=True)
    link.sender.endpoint.push(T, 4, first.query)
    link.sender.endpoint.push(T, 8, second.query)
    link.run()
    assert link.written == []
    assert second.asked == 0
    first.done = True
    link.run()
    assert link.written == [11, 12]


def test_a_chunk_that_is_final_now_waits_for_an_earlier_one_that_is_not() -> None:
    link, first = Link(), Forward()
    link.sender.endpoint.push(T, 4, first.query)
    link.sender.endpoint.push(T, 8)
    link.run()
    assert link.written == []
    first.done = True
    link.run()
    assert link.written == [11, 12]


def test_the_handoff_waits_for_the_last_forward() -> None:
    link, last = Link(), Forward()
    link.sender.endpoint.push(T, 8)
    link.sender.endpoint.finish(T, handoff(10), last.query)
    assert link.run() == ([], [])
    assert link.written == [11, 12]
    last.done = True
    (sent,), (received,) = link.run()
    assert isinstance(sent, Delivered)
    assert isinstance(received, Landed)
    assert link.receiver.memory.holds((11, 12, 13), link.sender.memory, (1, 2, 3))


def test_positions_may_not_go_back_behind_what_is_awaited() -> None:
    link, forward = Link(), Forward()
    link.sender.endpoint.push(T, 8, forward.query)
    with pytest.raises(PlanError, match="push to 4 after 8"):
        link.sender.endpoint.push(T, 4)


def test_a_transfer_that_is_cancelled_while_its_forward_runs_ends_at_once_and_writes_nothing() -> None:
    link, forward = Link(), Forward()
    link.sender.endpoint.push(T, 8, forward.query)
    link.run()
    link.sender.endpoint.abort(T, "not wanted any more")
    (sent,), (received,) = link.run()
    assert isinstance(sent, Broke)
    assert isinstance(received, Broke)
    assert (sent.state, received.state) == (TerminalState.CANCELLED, TerminalState.CANCELLED)
    asked, forward.done = forward.asked, True
    link.sender.endpoint.push(T, 10, forward.query)
    link.run()
    assert (link.written, forward.asked) == ([], asked)
    assert link.sender.endpoint.urgency is not Urgency.AWAITING


def test_a_receiver_that_gives_up_ends_the_wait_for_the_forward() -> None:
    link, forward = Link(), Forward()
    link.sender.endpoint.push(T, 8, forward.query)
    link.receiver.endpoint.abort(T, "the client left")
    (sent,), _ = link.run()
    assert isinstance(sent, Broke)
    forward.done = True
    link.run()
    assert link.written == []


def test_a_forward_that_fails_breaks_its_transfer_on_both_sides_and_no_other() -> None:
    link, other = Link(), Forward()
    link.receiver.expect("u", 4, pages(21))
    link.sender.open("u", link.receiver, 4, pages(4), pages(21))
    link.sender.endpoint.push(TransferId("u"), 4, other.query)

    def failed() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    link.sender.endpoint.push(T, 4)
    link.sender.endpoint.push(T, 8, failed)
    (sent,), (received,) = link.run()
    assert isinstance(sent, Broke)
    assert isinstance(received, Broke)
    assert (sent.transfer, sent.state, received.state) == (T, TerminalState.FAILED, TerminalState.FAILED)
    assert "illegal memory access" in sent.reason
    assert 12 not in link.written
    other.done = True
    link.sender.endpoint.finish(TransferId("u"), handoff(4))
    (sent,), (received,) = link.run()
    assert isinstance(sent, Delivered)
    assert isinstance(received, Landed)


def test_a_forward_that_never_finishes_costs_the_transfers_time_and_no_more() -> None:
    link, forward = Link(ttl_s=0.5), Forward()
    link.sender.endpoint.push(T, 8, forward.query)
    (sent,), _ = link.run(1.0)
    assert isinstance(sent, Broke)
    assert sent.state is TerminalState.EXPIRED


def test_the_transfer_thread_asks_and_the_engine_goes_on(pumps: Pumps) -> None:
    sender, receiver = pumps.start("sender", fill_seed=3), pumps.start("receiver")
    sender.connect(receiver.hello())
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
    done, asked, askers = threading.Event(), threading.Event(), set()

    def query() -> bool:
        askers.add(threading.current_thread().name)
        asked.set()
        return done.is_set()

    sender.push(T, 10, query)
    sender.finish(T, handoff(10))
    assert asked.wait(5.0)
    assert not pumps.memories["receiver"].target.any()
    done.set()
    assert isinstance(wait_for(receiver), Landed)
    assert isinstance(wait_for(sender), Delivered)
    assert askers == {"transceiver-sender"}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_page_is_ever_written_before_the_forwards_up_to_it_have_finished(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 6 * PAGE_SIZE))
    count = -(-num_tokens // PAGE_SIZE)
    destination = [PageId(16 + page) for page in data.draw(st.permutations(range(count)))]
    source = Pages(*[tuple(PageId(1 + page) for page in range(count))] * 2)
    there = Pages(tuple(destination), tuple(destination))
    hub = LoopbackHub()
    sender, receiver = SmallWorker.on(hub, "sender", fill_seed=5), SmallWorker.on(hub, "receiver")
    sender.endpoint.connect(receiver.endpoint.hello())
    clock = Clock(sender, receiver)
    receiver.expect(T, num_tokens, there)
    sender.open(T, receiver, num_tokens, source, there)
    ends = [*sorted(data.draw(st.lists(st.integers(0, num_tokens), max_size=4))), num_tokens]
    forwards = [Forward() for _ in ends]
    conditional = [data.draw(st.booleans()) for _ in ends]
    for index, end in enumerate(ends[:-1]):
        sender.endpoint.push(T, end, forwards[index].query if conditional[index] else None)
    sender.endpoint.finish(T, handoff(num_tokens), forwards[-1].query if conditional[-1] else None)
    seen: list[object] = []
    for number in [None, *data.draw(st.permutations(range(len(ends))))]:
        if number is not None:
            forwards[number].done = True
        seen += clock.run(0.03)[receiver.epoch]
        final = 0
        for end, forward, waits in zip(ends, forwards, conditional, strict=True):
            if waits and not forward.done:
                break
            final = end
        arrived = [bool(receiver.memory.target[page].any()) for page in destination]
        complete = count if final == num_tokens else final // PAGE_SIZE
        assert arrived == [True] * complete + [False] * (count - complete)
        assert bool(seen) == (final == num_tokens)
    assert [type(event) for event in seen] == [Landed]
