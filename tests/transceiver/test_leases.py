"""Leases are short and live by heartbeat: a sender that waits keeps its reservation, one that is gone loses it."""

from __future__ import annotations

import pytest

from kvmanager.ids import TransferId, WorkerEpoch
from tests.transceiver.small_worker import Clock, SmallWorker, handoff, pages
from transceiver import wire
from transceiver.errors import DuplicateTransfer, UnknownPeer
from transceiver.loopback import LoopbackHub
from transceiver.port import Broke, Delivered, Landed, SendSpec, TransferEvent
from transceiver.records import Timing
from transceiver.wire import TerminalState

T = TransferId("t")
TIMING = Timing(lease_s=1.0, heartbeat_s=0.2)


class Link:
    def __init__(self) -> None:
        self.hub = LoopbackHub()
        self.sender = SmallWorker.on(self.hub, "sender", fill_seed=1, timing=TIMING)
        self.receiver = SmallWorker.on(self.hub, "receiver", timing=TIMING)
        self.sender.endpoint.connect(self.receiver.endpoint.hello())
        self.both = Clock(self.sender, self.receiver)

    def run(self, seconds: float) -> tuple[list[TransferEvent], list[TransferEvent]]:
        seen = self.both.run(seconds)
        return seen[self.sender.epoch], seen[self.receiver.epoch]

    def alone(self, worker: SmallWorker, seconds: float) -> list[TransferEvent]:
        """The other worker is silent."""
        clock = Clock(worker)
        clock.now_s = self.both.now_s
        events = clock.run(seconds)[worker.epoch]
        self.both.now_s = clock.now_s
        return events

    def expect(self, ttl_s: float = 60.0) -> None:
        self.receiver.expect("t", 10, pages(11, 12, 13), ttl_s)

    def open(self, ttl_s: float = 60.0) -> None:
        self.sender.open("t", self.receiver, 10, pages(1, 2, 3), pages(11, 12, 13), ttl_s)

    def hold(self, ttl_s: float = 60.0) -> None:
        self.sender.endpoint.hold(T, self.receiver.epoch, ttl_s)


def ended(events: list[TransferEvent], state: TerminalState, words: str = "") -> bool:
    (event,) = events
    return isinstance(event, Broke) and event.state is state and words in event.reason


def test_a_queued_transfer_outlives_many_leases_and_lands() -> None:
    link = Link()
    link.expect()
    link.hold()
    assert link.run(5.0) == ([], [])
    link.open()
    link.sender.endpoint.finish(T, handoff(10))
    sent, received = link.run(0.2)
    assert [type(event) for event in (*sent, *received)] == [Delivered, Landed]


def test_a_slow_prefill_outlives_many_leases_and_lands() -> None:
    link = Link()
    link.expect()
    link.open()
    for position in (4, 8):
        link.sender.endpoint.push(T, position)
        assert link.run(3.0) == ([], [])
    link.sender.endpoint.finish(T, handoff(10))
    sent, received = link.run(0.2)
    assert [type(event) for event in (*sent, *received)] == [Delivered, Landed]


def test_heartbeats_do_not_stretch_the_time_that_the_engine_gave() -> None:
    link = Link()
    link.expect(ttl_s=2.0)
    link.hold()
    assert link.run(1.9) == ([], [])
    _, received = link.run(0.2)
    assert ended(received, TerminalState.EXPIRED, "not complete within 2.0 s")


def test_a_reservation_that_nobody_claims_costs_one_lease() -> None:
    link = Link()
    link.expect()
    assert link.alone(link.receiver, 0.95) == []
    assert ended(link.alone(link.receiver, 0.1), TerminalState.EXPIRED, "nothing was heard of its sender")


@pytest.mark.parametrize("told_by", ["abort", "deadline"])
def test_a_queued_transfer_that_ends_is_told_to_the_receiver_at_once(told_by: str) -> None:
    link = Link()
    link.expect()
    link.hold(ttl_s=0.5)
    link.run(0.1)
    if told_by == "abort":
        link.sender.endpoint.abort(T, "the prompt was cancelled")
        link.sender.endpoint.abort(T, "twice")
    sent, received = link.run(0.6)
    state = TerminalState.CANCELLED if told_by == "abort" else TerminalState.EXPIRED
    assert ended(sent, state)
    assert ended(received, state, "ended by the sender")


def test_the_queue_learns_within_a_heartbeat_that_the_receiver_gave_up() -> None:
    link = Link()
    link.expect()
    link.hold()
    link.run(0.1)
    link.receiver.endpoint.abort(T, "the client left")
    sent, received = link.run(2 * TIMING.heartbeat_s)
    assert ended(received, TerminalState.CANCELLED)
    assert ended(sent, TerminalState.CANCELLED, "the client left")


@pytest.mark.parametrize("when", ["opening", "writing", "finishing"])
def test_a_sender_gives_up_a_receiver_that_has_fallen_silent_after_a_lease(when: str) -> None:
    link = Link()
    link.expect()
    link.open()
    if when in ("writing", "finishing"):
        link.run(0.1)
    if when == "finishing":
        link.sender.endpoint.finish(T, handoff(10))
    events = link.alone(link.sender, TIMING.lease_s + 0.1)
    assert ended(events, TerminalState.EXPIRED)


def test_a_replayed_or_older_heartbeat_keeps_nothing_alive() -> None:
    link = Link()
    heard: list[bytes] = []

    def record(source: WorkerEpoch, destination: WorkerEpoch, message: bytes) -> bool:
        if isinstance(wire.decode(message), wire.Renew):
            heard.append(message)
        return False

    link.hub.drop = record
    link.expect()
    link.hold()
    link.run(0.5)
    assert len(heard) > 1
    link.hub.drop = None
    for _ in range(30):
        for message in heard:
            link.hub.send(link.sender.epoch, link.receiver.epoch, message)
        events = link.alone(link.receiver, 0.05)
        if events:
            break
    assert ended(events, TerminalState.EXPIRED)


def test_a_strangers_heartbeats_for_a_bound_transfer_change_nothing() -> None:
    link = Link()
    link.expect()
    link.open()
    link.run(0.1)
    forger = SmallWorker.on(link.hub, "forger")
    forger.endpoint.connect(link.receiver.endpoint.hello())
    forger.endpoint.connect(link.sender.endpoint.hello())
    for attempt in range(40):
        for transfer in (T, TransferId(f"made up {attempt}")):
            link.hub.send(
                forger.epoch, link.receiver.epoch, wire.encode(wire.Renew(transfer, 10**6 + attempt))
            )
            link.hub.send(forger.epoch, link.sender.epoch, wire.encode(wire.Grant(transfer, 0, 1e9)))
        events = link.alone(link.receiver, 0.05)
        if events:
            break
    assert ended(events, TerminalState.EXPIRED)
    closed = wire.Closed(T, TerminalState.FAILED, "a lie", quiet=True)
    link.hub.send(forger.epoch, link.receiver.epoch, wire.encode(closed))
    assert link.alone(link.receiver, 0.1) == []
    assert link.receiver.endpoint.stats().quarantined == 1
    assert not link.receiver.endpoint._book._records.closed


def test_a_hold_names_its_mistakes() -> None:
    link = Link()
    with pytest.raises(UnknownPeer):
        link.sender.endpoint.hold(T, WorkerEpoch("nobody"), 1.0)
    link.hold()
    with pytest.raises(DuplicateTransfer):
        link.hold()


def test_a_held_transfer_ends_when_its_peer_is_gone_and_leaves_nothing() -> None:
    link = Link()
    link.hold()
    link.sender.endpoint.disconnect(link.receiver.epoch)
    assert ended(link.alone(link.sender, 0.1), TerminalState.FAILED, "worker receiver is gone")
    link.alone(link.sender, 6.0)
    assert link.sender.endpoint.urgency == 0


@pytest.mark.parametrize("attempts_known", [True, False])
def test_what_one_rank_s_port_held_another_s_opens_and_the_lease_goes_on(attempts_known: bool) -> None:
    """Words to the receiver are numbered, so that a late one stretches no lease: who goes on must go on counting."""
    link = Link()
    other = SmallWorker.on(link.hub, "other", fill_seed=2, timing=TIMING)
    other.endpoint.connect(link.receiver.endpoint.hello())
    clock = Clock(link.sender, link.receiver, other)
    link.expect()
    link.hold()
    clock.run(5.0)
    attempts = link.sender.endpoint.let_go(T)
    with pytest.raises(DuplicateTransfer):
        link.sender.endpoint.let_go(T)
    other.endpoint.open(
        SendSpec(
            transfer=T,
            peer=link.receiver.epoch,
            num_tokens=10,
            source=pages(1, 2, 3),
            destination=pages(11, 12, 13),
            ttl_s=60.0,
            first_attempt=attempts if attempts_known else 0,
        )
    )
    seen = clock.run(3.0)
    assert (seen[link.receiver.epoch] == []) == attempts_known
    if attempts_known:
        other.endpoint.finish(T, handoff(10))
        assert [type(event) for event in clock.run(0.2)[link.receiver.epoch]] == [Landed]
        assert link.receiver.memory.holds((11, 12, 13), other.memory, (1, 2, 3))
