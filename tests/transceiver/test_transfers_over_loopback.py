"""Whole transfers between small workers over the loopback link, calm and with one chosen fault at a time."""

from __future__ import annotations

import pytest

from kvmanager.ids import TransferId, WorkerEpoch
from tests.transceiver.small_worker import DRAFT, TARGET, Clock, SmallWorker, handoff, pages
from transceiver import wire
from transceiver.book import Urgency
from transceiver.errors import DuplicateTransfer, PlanError, UnknownPeer, UnknownTransfer
from transceiver.loopback import Faults, LoopbackHub
from transceiver.port import Broke, Delivered, Landed, Pages, Released
from transceiver.records import Timing
from transceiver.wire import TerminalState

T = TransferId("t")
MANY = 200  # transfers enough to show a leak


class Link:
    """A sender with content, a receiver without, connected one way."""

    def __init__(self, faults: Faults | None = None, timing: Timing | None = None) -> None:
        self.hub = LoopbackHub(faults=faults)
        self.sender = SmallWorker.on(self.hub, "sender", fill_seed=1, timing=timing)
        self.receiver = SmallWorker.on(self.hub, "receiver", timing=timing)
        self.sender.endpoint.connect(self.receiver.endpoint.hello())
        self.clock = Clock(self.sender, self.receiver)

    def run(self, seconds: float) -> tuple[list[object], list[object]]:
        seen = self.clock.run(seconds)
        return [*seen[self.sender.epoch]], [*seen[self.receiver.epoch]]

    def start(self, num_tokens: int = 10, ttl_s: float = 5.0, transfer: str = "t") -> None:
        """Pages 1, 2, 3 here to pages 11, 12, 13 there."""
        self.receiver.expect(transfer, num_tokens, pages(11, 12, 13), ttl_s)
        self.sender.open(transfer, self.receiver, num_tokens, pages(1, 2, 3), pages(11, 12, 13), ttl_s)

    def lose(self, *kinds: type) -> None:
        """Lose the first message of each kind."""
        remaining = set(kinds)

        def drop(source: WorkerEpoch, destination: WorkerEpoch, message: bytes) -> bool:
            kind = type(wire.decode(message))
            if kind in remaining:
                remaining.discard(kind)
                return True
            return False

        self.hub.drop = drop

    def lose_all(self, *kinds: type) -> None:
        self.hub.drop = lambda source, destination, message: isinstance(wire.decode(message), kinds)

    @property
    def arrived(self) -> bool:
        return self.receiver.memory.holds((11, 12, 13), self.sender.memory, (1, 2, 3))


def test_target_and_draft_pages_arrive_and_bytes_follow_the_formula() -> None:
    link = Link()
    link.start(num_tokens=10)
    link.sender.endpoint.finish(T, handoff(10))
    sent, received = link.run(0.2)
    assert link.arrived
    target_bytes, draft_bytes = 3 * TARGET.page_bytes, 3 * DRAFT.page_bytes
    assert sent == [Delivered(T, target_bytes, draft_bytes)]
    assert received == [Landed(T, handoff(10), target_bytes, draft_bytes)]
    stats = link.receiver.endpoint.stats()
    assert (stats.done, stats.receiving, stats.bytes_target, stats.bytes_draft) == (
        1,
        0,
        target_bytes,
        draft_bytes,
    )


def test_the_time_of_writes_is_counted_and_no_other() -> None:
    link = Link(faults=Faults(max_write_delay_s=0.4))
    link.start(num_tokens=10)
    link.run(3.0)
    assert link.sender.endpoint.stats().write_s == 0.0, "nothing is final yet"
    link.sender.endpoint.finish(T, handoff(10))
    link.run(3.0)
    written_s = link.sender.endpoint.stats().write_s
    assert 0.0 < written_s <= 0.4 + 2 * link.clock.step_s
    link.run(3.0)
    assert link.sender.endpoint.stats().write_s == written_s
    assert link.receiver.endpoint.stats().write_s == 0.0


def test_pages_travel_while_later_chunks_are_still_to_come() -> None:
    link = Link()
    link.start(num_tokens=10)
    link.sender.endpoint.push(T, 9)
    link.run(0.2)
    here, there = link.sender.memory, link.receiver.memory
    assert there.holds((11, 12), here, (1, 2))
    assert not there.target[13].any()
    here.target[1:3] = 0  # pages shipped once are not read again
    link.sender.endpoint.finish(T, handoff(10))
    link.run(0.2)
    assert there.target[11].any()
    assert there.holds((13,), here, (3,))


def test_look_ahead_pages_stay_at_home() -> None:
    link = Link()
    link.receiver.expect("t", 5, pages(11, 12, 13, 14))
    link.sender.open("t", link.receiver, 5, pages(1, 2, 3), pages(11, 12))
    link.sender.endpoint.finish(T, handoff(5))
    _, received = link.run(0.2)
    assert received == [Landed(T, handoff(5), 2 * TARGET.page_bytes, 2 * DRAFT.page_bytes)]
    assert not link.receiver.memory.target[13:15].any()


def test_draft_pages_left_out_on_purpose_are_said_to_be() -> None:
    link = Link()
    link.receiver.expect("t", 8, pages(11, 12))
    link.sender.open(
        "t", link.receiver, 8, Pages(pages(1, 2).target), Pages(pages(11, 12).target), ship_draft=False
    )
    link.sender.endpoint.finish(T, handoff(8))
    _, received = link.run(0.2)
    (landed,) = received
    assert isinstance(landed, Landed)
    assert (landed.handoff.draft_shipped, landed.bytes_draft) == (False, 0)
    assert not link.receiver.memory.draft.any()


def test_a_worker_without_a_drafter_ships_the_target_alone() -> None:
    hub = LoopbackHub()
    plain = wire.Fingerprint(target_model="t", target_dtype="bfloat16", target=TARGET)
    sender = SmallWorker.on(hub, "sender", fill_seed=1, fingerprint=plain)
    receiver = SmallWorker.on(hub, "receiver", fingerprint=plain)
    sender.endpoint.connect(receiver.endpoint.hello())
    receiver.expect("t", 8, Pages(pages(4, 5).target))
    sender.open("t", receiver, 8, Pages(pages(1, 2).target), Pages(pages(4, 5).target))
    sender.endpoint.finish(T, handoff(8))
    seen = Clock(sender, receiver).run(0.2)
    assert seen[sender.epoch] == [Delivered(T, 2 * TARGET.page_bytes, 0)]


def test_a_first_token_that_ends_the_request_is_an_ordinary_handoff() -> None:
    link = Link()
    link.start()
    end_of_text = handoff(10, first_token=0)
    link.sender.endpoint.finish(T, end_of_text)
    sent, received = link.run(0.2)
    assert isinstance(sent[0], Delivered)
    assert isinstance(received[0], Landed)
    assert received[0].handoff == end_of_text


@pytest.mark.parametrize("kind", [wire.Introduce, wire.Open, wire.Grant, wire.Done, wire.Ack])
def test_any_single_lost_message_delays_a_transfer_and_no_more(kind: type) -> None:
    link = Link()
    link.lose(kind)
    link.start()
    link.sender.endpoint.finish(T, handoff(10))
    sent, received = link.run(0.5)
    assert [type(event) for event in (*sent, *received)] == [Delivered, Landed]
    assert link.arrived


@pytest.mark.parametrize("kind", [wire.Abort, wire.Closed, wire.Ack])
def test_a_lost_word_about_the_end_is_repeated(kind: type) -> None:
    link = Link()
    link.start()
    link.run(0.1)
    link.lose(kind)
    link.receiver.endpoint.abort(T, "the client left")
    sent, received = link.run(0.5)
    assert [type(event) for event in sent] == [Broke]
    assert received == [Broke(T, TerminalState.CANCELLED, "the client left", pages_safe=False), Released(T)]


def test_the_sender_repeats_done_and_the_receiver_lands_once() -> None:
    link = Link()
    link.lose_all(wire.Ack)
    link.start(ttl_s=3.0)
    link.sender.endpoint.finish(T, handoff(10))
    _, received = link.run(0.9)
    assert [type(event) for event in received] == [Landed]
    link.hub.drop = None
    sent, received = link.run(0.6)
    assert ([type(event) for event in sent], received) == ([Delivered], [])


def test_a_failed_write_breaks_both_sides_within_a_second() -> None:
    link = Link(faults=Faults(write_failure=1.0))
    link.start()
    link.sender.endpoint.push(T, 8)
    sent, received = link.run(0.5)
    for (event,) in (sent, received):
        assert isinstance(event, Broke)
        assert event.state is TerminalState.FAILED
        assert "injected fault" in event.reason


def test_the_senders_abort_reaches_a_receiver_that_never_heard_of_it() -> None:
    link = Link()
    link.lose_all(wire.Open, wire.Introduce)
    link.start()
    link.run(0.1)
    link.sender.endpoint.abort(T, "prefill failed")
    link.run(0.05)
    link.lose_all(wire.Open)
    sent, received = link.run(1.0)
    ends = [event for event in (*sent, *received) if isinstance(event, Broke)]
    assert [event.state for event in received if isinstance(event, Broke)] == [TerminalState.CANCELLED], ends


def test_pages_never_granted_are_free_at_once() -> None:
    link = Link()
    link.receiver.expect("t", 10, pages(11, 12, 13), ttl_s=60)
    link.receiver.endpoint.abort(T, "the client left")
    _, received = link.run(link.clock.step_s)
    assert received == [Broke(T, TerminalState.CANCELLED, "the client left")]
    link.sender.open("t", link.receiver, 10, pages(1, 2, 3), pages(11, 12, 13))
    link.sender.endpoint.finish(T, handoff(10))
    sent, _ = link.run(0.2)
    assert [type(event) for event in sent] == [Broke]
    assert not link.receiver.memory.target.any()


def test_pages_with_a_write_in_flight_are_kept_until_it_has_landed() -> None:
    link = Link()
    link.start()
    link.run(0.1)
    link.hub.faults = Faults(max_write_delay_s=0.4)
    link.sender.endpoint.push(T, 8)
    link.run(link.clock.step_s)
    link.receiver.endpoint.abort(T, "the client left")
    _, received = link.run(link.clock.step_s)
    assert received == [Broke(T, TerminalState.CANCELLED, "the client left", pages_safe=False)]
    for _ in range(200):
        _, received = link.run(link.clock.step_s)
        if received:
            break
        assert not link.receiver.memory.target[11].any(), "written, but not yet reported"
    assert received == [Released(T)]
    link.receiver.memory.target[:] = 0  # the next owner of the pages
    link.run(1.0)
    assert not link.receiver.memory.target.any()


@pytest.mark.parametrize("end", ["it wakes", "it is dead"])
def test_a_sender_that_falls_silent_costs_its_transfer_a_lease_and_is_feared_until_it_speaks_or_is_dead(
    end: str,
) -> None:
    link = Link()
    link.start(ttl_s=1.0)
    link.run(0.1)
    silent = Clock(link.receiver)
    silent.now_s = link.clock.now_s
    assert silent.run(0.8)[link.receiver.epoch] == []
    (broke,) = silent.run(0.2)[link.receiver.epoch]
    assert broke == Broke(T, TerminalState.EXPIRED, "not complete within 1.0 s", pages_safe=False)
    assert silent.run(100.0)[link.receiver.epoch] == []
    stats = link.receiver.endpoint.stats()
    assert (stats.receiving, stats.quarantined, stats.expired) == (0, 1, 1)
    link.clock.now_s = silent.now_s
    if end == "it wakes":
        _, received = link.run(1.0)
    else:
        link.receiver.endpoint.disconnect(link.sender.epoch)
        received = [*silent.run(0.1)[link.receiver.epoch]]
    assert received == [Released(T)]
    assert link.receiver.endpoint.stats().quarantined == 0


def test_a_sender_that_wakes_after_its_lease_writes_nothing() -> None:
    link = Link()
    link.start(ttl_s=1.0)
    link.run(0.1)
    link.sender.endpoint.finish(T, handoff(10))
    asleep = Clock(link.receiver)
    asleep.now_s = link.clock.now_s
    asleep.run(2.0)
    link.clock.now_s = asleep.now_s
    sent, _ = link.run(0.5)
    assert [event.state for event in sent if isinstance(event, Broke)] == [TerminalState.EXPIRED]
    assert not link.receiver.memory.target.any()


def test_a_grant_that_took_long_gives_no_longer_lease() -> None:
    """The lease counts from the Open, so the sender stops before the receiver's deadline, not a delay after it."""
    link = Link()
    grants: list[bytes] = []

    def withhold(source: WorkerEpoch, destination: WorkerEpoch, message: bytes) -> bool:
        if isinstance(wire.decode(message), wire.Grant):
            grants.append(message)
        return isinstance(wire.decode(message), wire.Grant | wire.Abort)

    link.hub.drop = withhold
    link.receiver.expect("t", 10, pages(11, 12, 13), ttl_s=1.0)
    link.sender.open("t", link.receiver, 10, pages(1, 2, 3), pages(11, 12, 13), ttl_s=60)
    link.run(0.9)
    link.hub.drop = None
    link.hub.send(link.receiver.epoch, link.sender.epoch, grants[0])
    link.lose_all(wire.Grant, wire.Abort)
    sent, _ = link.run(0.05)
    assert sent == []
    sent, _ = link.run(0.1)
    link.sender.endpoint.push(T, 8)
    link.run(0.1)
    assert [event.state for event in sent if isinstance(event, Broke)] == [TerminalState.EXPIRED]
    assert not link.receiver.memory.target.any()


def test_a_write_that_outlives_its_transfer_is_feared_until_it_is_over() -> None:
    link = Link(timing=Timing(quiesce_s=0.1, linger_s=0.5))
    link.start(ttl_s=2.0)
    link.run(0.1)
    link.hub.faults = Faults(max_write_delay_s=20.0)
    link.sender.endpoint.push(T, 8)
    link.run(link.clock.step_s)
    ((write, (_, posted)),) = link.hub._workers[link.sender.epoch].pending.items()
    link.hub._workers[link.sender.epoch].pending[write] = (link.clock.now_s + 10.0, posted)
    link.sender.endpoint.abort(T, "prefill failed")
    sent, received = link.run(1.0)
    assert [type(event) for event in sent] == [Broke]
    (broke,) = received
    assert broke == Broke(T, TerminalState.CANCELLED, "ended by the sender: prefill failed", pages_safe=False)
    assert link.run(8.9) == ([], [])
    assert not link.receiver.memory.target.any()
    sent, received = link.run(1.0)
    assert (sent, received) == ([], [Released(T)])
    assert link.receiver.memory.target[11].any(), "it has arrived"
    link.run(1.0)
    assert link.sender.endpoint.urgency == link.receiver.endpoint.urgency == Urgency.IDLE


def test_a_transfer_nobody_expects_is_refused_with_a_reason() -> None:
    link = Link()
    link.sender.open("t", link.receiver, 10, pages(1, 2, 3), pages(11, 12, 13))
    sent, received = link.run(0.2)
    assert sent == [Broke(T, TerminalState.FAILED, "refused by the receiver: not expected here")]
    assert received == []


@pytest.mark.parametrize(
    ("num_tokens", "destination", "words"),
    [
        (9, pages(11, 12, 13), "9 tokens offered, 10 expected"),
        (10, pages(11, 12, 14), "target pages are not those reserved"),
        (10, Pages(pages(11, 12, 13).target, pages(11, 12, 14).draft), "draft pages are not those reserved"),
    ],
)
def test_an_open_that_differs_from_the_reservation_is_refused_and_the_right_one_still_works(
    num_tokens: int, destination: Pages, words: str
) -> None:
    link = Link()
    link.receiver.expect("t", 10, pages(11, 12, 13))
    stranger = SmallWorker.on(link.hub, "stranger", fill_seed=2)
    stranger.endpoint.connect(link.receiver.endpoint.hello())
    stranger.open("t", link.receiver, num_tokens, pages(1, 2, 3), destination)
    link.clock.workers.append(stranger)
    broken = link.clock.run(0.2)
    (broke,) = broken[stranger.epoch]
    assert isinstance(broke, Broke)
    assert words in broke.reason
    link.sender.open("t", link.receiver, 10, pages(1, 2, 3), pages(11, 12, 13))
    link.sender.endpoint.finish(T, handoff(10))
    _, received = link.run(0.2)
    assert [type(event) for event in received] == [Landed]
    assert link.arrived


def test_only_one_worker_may_write_a_transfer() -> None:
    link = Link()
    link.start()
    link.run(0.1)
    second = SmallWorker.on(link.hub, "second", fill_seed=2)
    second.endpoint.connect(link.receiver.endpoint.hello())
    second.open("t", link.receiver, 10, pages(1, 2, 3), pages(11, 12, 13))
    second.endpoint.finish(T, handoff(10))
    link.clock.workers.append(second)
    (broke,) = link.clock.run(0.2)[second.epoch]
    assert isinstance(broke, Broke)
    assert "another worker is writing it" in broke.reason
    link.sender.endpoint.finish(T, handoff(10))
    _, received = link.run(0.2)
    assert [type(event) for event in received] == [Landed]
    assert link.arrived


def test_a_done_with_the_wrong_count_is_a_failure_on_both_sides() -> None:
    link = Link()
    link.start()
    link.sender.endpoint.finish(T, handoff(10))

    def shrink(source: WorkerEpoch, destination: WorkerEpoch, message: bytes) -> bool:
        decoded = wire.decode(message)
        if isinstance(decoded, wire.Done) and decoded.bytes_draft:
            lie = wire.Done(
                transfer=T, handoff=decoded.handoff, bytes_target=decoded.bytes_target, bytes_draft=0
            )
            link.receiver.endpoint._book._hear(link.sender.epoch, wire.encode(lie), link.clock.now_s)
            return True
        return False

    link.hub.drop = shrink
    sent, received = link.run(0.5)
    assert [type(event) for event in (*sent, *received)] == [Broke, Broke]
    assert "were expected" in str(received[0])


def test_a_crashed_sender_breaks_the_receiver_when_it_is_disconnected() -> None:
    link = Link()
    link.start(ttl_s=60)
    link.run(0.1)
    link.hub.crash(link.sender.epoch)
    link.clock.workers.remove(link.sender)
    link.receiver.endpoint.disconnect(link.sender.epoch)
    (broke,) = link.clock.run(0.1)[link.receiver.epoch]
    assert isinstance(broke, Broke)
    assert "worker sender is gone" in broke.reason


def test_a_crashed_receiver_fails_the_write_and_with_it_every_transfer_to_that_peer() -> None:
    link = Link()
    link.start(transfer="t")
    link.start(transfer="u")
    link.run(0.1)
    link.hub.crash(link.receiver.epoch)
    link.clock.workers.remove(link.receiver)
    link.sender.endpoint.push(T, 8)
    broken = link.clock.run(0.1)[link.sender.epoch]
    assert sorted(event.transfer for event in broken) == ["t", "u"]
    with pytest.raises(UnknownPeer):
        link.sender.open("v", link.receiver, 4, pages(1), pages(1))


def test_a_restarted_peer_is_another_peer_and_the_pair_goes_on() -> None:
    link = Link()
    link.hub.crash(link.receiver.epoch)
    link.sender.endpoint.disconnect(link.receiver.epoch)
    reborn = SmallWorker.on(link.hub, "receiver-2")
    link.sender.endpoint.connect(reborn.endpoint.hello())
    reborn.expect("t", 4, pages(5))
    link.sender.open("t", reborn, 4, pages(1), pages(5))
    link.sender.endpoint.finish(T, handoff(4))
    seen = Clock(link.sender, reborn).run(0.2)
    assert [type(event) for event in seen[reborn.epoch]] == [Landed]


def test_a_receiver_that_has_forgotten_its_sender_is_told_again_who_it_is() -> None:
    """Its end of the connection broke, the other did not. The transfer is late, the pair is not lost."""
    link = Link()
    link.start()
    link.sender.endpoint.finish(T, handoff(10))
    link.run(0.5)
    link.receiver.endpoint.disconnect(link.sender.epoch)
    link.start(transfer="t2")
    link.sender.endpoint.finish(TransferId("t2"), handoff(10))
    _, received = link.run(3.0)
    assert [type(event) for event in received] == [Landed]


def test_disconnecting_and_connecting_again_before_the_next_poll_keeps_the_connection() -> None:
    link = Link()
    link.sender.endpoint.disconnect(link.receiver.epoch)
    link.sender.endpoint.connect(link.receiver.endpoint.hello())
    link.start()
    link.sender.endpoint.finish(T, handoff(10))
    sent, _ = link.run(0.3)
    assert [type(event) for event in sent] == [Delivered]


def test_abort_is_idempotent_and_harmless_for_strangers() -> None:
    link = Link()
    link.start()
    for _ in range(3):
        link.sender.endpoint.abort(T, "first reason")
        link.receiver.endpoint.abort(T, "first reason")
        link.sender.endpoint.abort(TransferId("never opened"), "whatever")
    sent, received = link.run(0.5)
    assert len(sent) == len(received) == 1
    link.sender.endpoint.abort(T, "too late")
    assert link.run(0.5) == ([], [])


def test_pushing_after_the_break_is_harmless_and_to_a_stranger_is_an_error() -> None:
    link = Link()
    link.start()
    link.receiver.endpoint.abort(T, "gone")
    link.run(0.3)
    link.sender.endpoint.push(T, 8)
    link.sender.endpoint.finish(T, handoff(10))
    with pytest.raises(UnknownTransfer):
        link.sender.endpoint.push(TransferId("never opened"), 8)


def test_misuse_by_the_engine_is_refused() -> None:
    link = Link()
    link.start(num_tokens=10)
    endpoint = link.sender.endpoint
    endpoint.push(T, 8)
    for position in (7, 11):
        with pytest.raises(PlanError, match="push"):
            endpoint.push(T, position)
    with pytest.raises(PlanError, match="handoff of 9 tokens"):
        endpoint.finish(T, handoff(9))
    endpoint.finish(T, handoff(10))
    with pytest.raises(PlanError, match="finished twice"):
        endpoint.finish(T, handoff(10))
    with pytest.raises(DuplicateTransfer):
        link.start()
    with pytest.raises(PlanError, match="0 tokens"):
        link.receiver.expect("u", 0, pages())
    with pytest.raises(PlanError, match="needs 3"):
        link.receiver.expect("u", 10, pages(1, 2))
    with pytest.raises(PlanError, match="outside the pool of 32"):
        link.sender.open("u", link.receiver, 4, pages(1), pages(32))


def test_a_transfer_id_is_never_used_again() -> None:
    link = Link()
    link.start()
    link.sender.endpoint.finish(T, handoff(10))
    link.run(0.3)
    with pytest.raises(DuplicateTransfer):
        link.receiver.expect("t", 10, pages(11, 12, 13))
    with pytest.raises(DuplicateTransfer):
        link.sender.open("t", link.receiver, 10, pages(1, 2, 3), pages(11, 12, 13))


def test_replayed_messages_of_a_closed_transfer_change_nothing() -> None:
    """S18: the pages belong to somebody else by now."""
    link = Link()
    recorded: list[tuple[WorkerEpoch, WorkerEpoch, bytes]] = []

    def record(source: WorkerEpoch, destination: WorkerEpoch, message: bytes) -> bool:
        recorded.append((source, destination, message))
        return False

    link.hub.drop = record
    link.start()
    link.sender.endpoint.finish(T, handoff(10))
    link.run(0.3)
    link.hub.drop = None
    link.receiver.memory.target[:] = 0
    before = link.receiver.endpoint.stats(), link.sender.endpoint.stats()
    for source, destination, message in recorded:
        link.hub.send(source, destination, message)
    assert link.run(0.5) == ([], [])
    assert (link.receiver.endpoint.stats(), link.sender.endpoint.stats()) == before
    assert not link.receiver.memory.target.any()


def test_forged_and_foreign_messages_change_nothing_and_grow_nothing() -> None:
    link = Link(timing=Timing(closed_memory=8))
    link.start()
    link.run(0.1)
    forger = SmallWorker.on(link.hub, "forger")
    forger.endpoint.connect(link.receiver.endpoint.hello())
    forger.endpoint.connect(link.sender.endpoint.hello())
    before = link.receiver.endpoint.stats(), link.sender.endpoint.stats()
    fail = TerminalState.FAILED
    for serial in range(MANY):
        for transfer in (T, TransferId(f"made up {serial}")):
            for message in (
                wire.Grant(transfer, 0, float("inf")),
                wire.Grant(transfer, 10**9, 1.0),
                wire.Ack(transfer),
                wire.Refuse(transfer, "forged"),
                wire.Abort(transfer, fail, "forged"),
                wire.Closed(transfer, fail, "forged", quiet=True),
                wire.Done(transfer=transfer, handoff=handoff(10), bytes_target=0, bytes_draft=0),
            ):
                for victim in (link.sender, link.receiver):
                    link.hub.send(forger.epoch, victim.epoch, wire.encode(message))
        for junk in (b"", b"junk", wire.MAGIC + b"\xff\xff", wire.encode(wire.Introduce(b"junk"))):
            link.hub.send(forger.epoch, link.receiver.epoch, junk)
            link.hub.send(WorkerEpoch("nobody"), link.receiver.epoch, junk)
    assert link.run(0.1) == ([], [])
    assert (link.receiver.endpoint.stats(), link.sender.endpoint.stats()) == before
    link.sender.endpoint.finish(T, handoff(10))
    _, received = link.run(0.3)
    assert [type(event) for event in received] == [Landed]
    assert link.arrived


def test_workers_that_introduce_themselves_are_limited_in_number() -> None:
    link = Link(timing=Timing(max_introduced=3))
    for number in range(6):
        guest = SmallWorker.on(link.hub, f"guest-{number}", fill_seed=number)
        guest.endpoint.connect(link.receiver.endpoint.hello())
        link.receiver.expect(f"t{number}", 4, pages(11 + number), ttl_s=0.5)
        guest.open(f"t{number}", link.receiver, 4, pages(1), pages(11 + number), ttl_s=0.5)
        guest.endpoint.finish(TransferId(f"t{number}"), handoff(4))
        link.clock.workers.append(guest)
    seen = link.clock.run(1.0)
    landed = sum(isinstance(event, Landed) for event in seen[link.receiver.epoch])
    assert landed == 2, "the link's own sender was the first of three"


def test_many_transfers_leave_nothing_behind_but_a_bounded_memory() -> None:
    timing = Timing(closed_memory=16, linger_s=0.1)
    link = Link(timing=timing)
    for serial in range(MANY):
        name = f"t{serial}"
        link.start(transfer=name)
        if serial % 3 == 0:
            link.receiver.endpoint.abort(TransferId(name), "odd one out")
        else:
            link.sender.endpoint.finish(TransferId(name), handoff(10))
        sent, received = link.run(0.05)
        assert len(received) == 1
        assert len(sent) == 1
    link.run(0.5)
    for worker in (link.sender, link.receiver):
        records = worker.endpoint._book._records
        assert len(records.closed) == 16
        assert not records.outbox
        assert worker.endpoint.urgency == 0
        assert worker.endpoint.stats().done == MANY - len(range(0, MANY, 3))
