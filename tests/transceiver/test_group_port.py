"""Between groups of any sizes every head arrives where it belongs; what cannot is refused with both shapes."""

from __future__ import annotations

import itertools

import pytest

from kvmanager.ids import TransferId
from tests.transceiver.small_group import Heads, SmallGroup
from tests.transceiver.small_worker import Clock, handoff, pages
from transceiver import wire
from transceiver.errors import DuplicateTransfer, HandshakeRefused, UnknownPeer, UnknownTransfer
from transceiver.loopback import Faults, LoopbackHub
from transceiver.port import Broke, Delivered, Landed, Pages, ReceiveSpec, Released, TransferEvent
from transceiver.records import Timing
from transceiver.wire import DraftMode, TerminalState

SIZES = (1, 2, 4)
NUM_TOKENS = 18
SOURCE, DESTINATION = pages(3, 4, 9, 2, 7), pages(8, 1, 2, 5, 11)
TRANSFER = TransferId("t")


def pair(sizes: tuple[int, int], heads: Heads = Heads(), **more: object) -> tuple[SmallGroup, SmallGroup]:  # noqa: B008
    hub = LoopbackHub(faults=Faults(max_write_delay_s=0.01))
    sender = SmallGroup.of(hub, "sender", sizes[0], heads, **more)
    receiver = SmallGroup.of(hub, "receiver", sizes[1], heads, **more)
    sender.fill(1)
    return sender, receiver


def ship(sender: SmallGroup, receiver: SmallGroup, clock: Clock, mode: DraftMode = "mirrored") -> None:
    source, destination = (
        Pages(pages.target) if mode == "unified" else pages for pages in (SOURCE, DESTINATION)
    )
    receiver.expect("t", NUM_TOKENS, destination)
    sender.open("t", receiver, NUM_TOKENS, source, destination)
    for end in (5, 16):
        sender.port.push(TRANSFER, end)
        clock.run(0.02)
    sender.port.finish(TRANSFER, handoff(NUM_TOKENS))


@pytest.mark.parametrize("heads", [Heads(2, 4), Heads(4, 1), Heads(1, 2)])
@pytest.mark.parametrize("sizes", list(itertools.product(SIZES, SIZES)))
@pytest.mark.parametrize("mode", ["mirrored", "unified"])
def test_every_head_arrives_on_every_rank_that_holds_it(
    sizes: tuple[int, int], heads: Heads, mode: DraftMode
) -> None:
    sender, receiver = pair(sizes, heads, draft_mode=mode)
    assert sender.port.connect(receiver.port.hello()) == receiver.epoch
    clock = Clock(sender, receiver)
    ship(sender, receiver, clock, mode)
    seen = clock.run(0.3)
    ((sent,), (landed,)) = seen[sender.epoch], seen[receiver.epoch]
    assert isinstance(sent, Delivered)
    assert isinstance(landed, Landed)
    assert landed.handoff.draft_shipped
    assert receiver.holds(DESTINATION, 1, SOURCE, NUM_TOKENS)
    print_ = receiver.ranks[0].endpoint._book.ours.fingerprint
    assert print_.draft is not None
    shipped = [5 * sizes[1] * geometry.page_bytes for geometry in (print_.target, print_.draft)]
    assert [landed.bytes_target, landed.bytes_draft] == [sent.bytes_target, sent.bytes_draft] == shipped
    for rank in (*sender.ranks, *receiver.ranks):
        stats = rank.endpoint.stats()
        assert (stats.sending, stats.receiving, stats.quarantined) == (0, 0, 0)
    for rank in receiver.ranks:  # each got its own pages, once
        stats = rank.endpoint.stats()
        assert [sizes[1] * stats.bytes_target, sizes[1] * stats.bytes_draft] == shipped


@pytest.mark.parametrize("sizes", [(1, 2), (2, 4), (4, 1)])
def test_draft_context_that_stays_at_home_is_shipped_by_no_leg(sizes: tuple[int, int]) -> None:
    sender, receiver = pair(sizes)
    sender.port.connect(receiver.port.hello())
    receiver.expect("t", NUM_TOKENS, DESTINATION)
    sender.open("t", receiver, NUM_TOKENS, SOURCE, DESTINATION, ship_draft=False)
    sender.port.finish(TRANSFER, handoff(NUM_TOKENS))
    (landed,) = Clock(sender, receiver).run(0.3)[receiver.epoch]
    assert isinstance(landed, Landed)
    assert not landed.handoff.draft_shipped
    assert landed.bytes_draft == 0 < landed.bytes_target
    assert not any(rank.memory.draft.any() for rank in receiver.ranks)


def test_who_ships_to_whom_is_said_when_workers_meet(caplog: pytest.LogCaptureFixture) -> None:
    sender, receiver = pair((2, 4))
    with caplog.at_level("INFO"):
        sender.port.connect(receiver.port.hello())
    assert "worker receiver: our ranks ship to its ranks as 0 to 0, 0 to 1, 1 to 2, 1 to 3" in caplog.text


def test_a_prompt_that_waits_is_held_on_every_leg() -> None:
    timing = Timing(lease_s=0.5, heartbeat_s=0.1)
    hub = LoopbackHub()
    sender, receiver = (SmallGroup.of(hub, name, 2, Heads(), timing=timing) for name in ("here", "there"))
    sender.fill(1)
    sender.port.connect(receiver.port.hello())
    receiver.expect("t", NUM_TOKENS, DESTINATION)
    sender.port.hold(TRANSFER, receiver.epoch, 5.0)
    with pytest.raises(DuplicateTransfer):
        sender.port.hold(TRANSFER, receiver.epoch, 5.0)
    clock = Clock(sender, receiver)
    assert clock.run(1.5) == {sender.epoch: [], receiver.epoch: []}
    sender.open("t", receiver, NUM_TOKENS, SOURCE, DESTINATION)
    sender.port.finish(TRANSFER, handoff(NUM_TOKENS))
    clock.run(0.3)
    assert receiver.holds(DESTINATION, 1, SOURCE, NUM_TOKENS)


def test_a_rank_that_hears_of_a_transfer_late_does_not_refuse_it() -> None:
    sender, receiver = pair((2, 2))
    sender.port.connect(receiver.port.hello())
    late: list[ReceiveSpec] = []
    expect = receiver.ranks[1].endpoint.expect
    receiver.ranks[1].endpoint.expect = late.append  # type: ignore[method-assign]
    clock = Clock(sender, receiver)
    ship(sender, receiver, clock)
    assert clock.run(0.1) == {sender.epoch: [], receiver.epoch: []}
    expect(late[0])
    seen = clock.run(1.0)
    assert [type(event) for event in seen[receiver.epoch]] == [Landed]
    assert receiver.holds(DESTINATION, 1, SOURCE, NUM_TOKENS)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 4)])
def test_either_side_may_give_up_and_both_hear_of_it_once(sizes: tuple[int, int]) -> None:
    for gives_up in ("sender", "receiver"):
        sender, receiver = pair(sizes)
        sender.port.connect(receiver.port.hello())
        clock = Clock(sender, receiver)
        receiver.expect("t", NUM_TOKENS, DESTINATION)
        sender.open("t", receiver, NUM_TOKENS, SOURCE, DESTINATION)
        sender.port.push(TRANSFER, 9)
        clock.run(0.05)
        (sender if gives_up == "sender" else receiver).port.abort(TRANSFER, "no longer wanted")
        seen = clock.run(0.5)
        for worker in (sender, receiver):
            (broke,) = [event for event in seen[worker.epoch] if not isinstance(event, Released)]
            assert isinstance(broke, Broke)
            assert (broke.transfer, broke.state) == (TRANSFER, TerminalState.CANCELLED)
            assert "no longer wanted" in broke.reason
            stats = worker.port.stats()
            assert (stats.sending, stats.receiving, stats.quarantined, stats.cancelled) == (0, 0, 0, 1)
        sender.port.push(TRANSFER, 10)  # what an engine says that has not heard yet is harmless
        with pytest.raises(UnknownTransfer):
            sender.port.push(TransferId("stranger"), 1)


def test_a_leg_that_breaks_takes_the_others_along() -> None:
    sender, receiver = pair((2, 2))
    sender.port.connect(receiver.port.hello())
    clock = Clock(sender, receiver)
    receiver.expect("t", NUM_TOKENS, DESTINATION)
    sender.open("t", receiver, NUM_TOKENS, SOURCE, DESTINATION)
    sender.port.push(TRANSFER, 9)
    clock.run(0.05)
    receiver.ranks[1].endpoint.abort(TRANSFER, "one rank's own trouble")
    seen = clock.run(0.5)
    for worker in (sender, receiver):
        (broke,) = [event for event in seen[worker.epoch] if not isinstance(event, Released)]
        assert isinstance(broke, Broke)
    assert all(rank.endpoint.stats().receiving == 0 for rank in receiver.ranks)
    assert all(rank.endpoint.stats().sending == 0 for rank in sender.ranks)


def test_a_worker_that_is_gone_is_gone_with_all_its_ranks() -> None:
    sender, receiver = pair((2, 2))
    sender.port.connect(receiver.port.hello())
    clock = Clock(sender, receiver)
    receiver.expect("t", NUM_TOKENS, DESTINATION)
    sender.open("t", receiver, NUM_TOKENS, SOURCE, DESTINATION)
    clock.run(0.05)
    receiver.port.disconnect(sender.epoch)  # it learned of both ranks by their own words
    seen: list[TransferEvent] = receiver.port.poll(clock.now_s)
    assert [type(event) for event in seen] == [Broke]
    assert isinstance(seen[0], Broke)
    assert seen[0].pages_safe
    sender.port.disconnect(receiver.epoch)
    with pytest.raises(UnknownPeer):
        sender.open("u", receiver, NUM_TOKENS, SOURCE, DESTINATION)


def test_a_peer_that_another_rank_may_have_lost_is_introduced_once_more() -> None:
    sender, receiver = pair((2, 2))
    sender.port.connect(receiver.port.hello())
    clock = Clock(sender, receiver)
    receiver.expect("t", NUM_TOKENS, DESTINATION)
    sender.open("t", receiver, NUM_TOKENS, SOURCE, DESTINATION)
    clock.run(0.05)
    sender.ranks[1].endpoint._dismiss(receiver.ranks[1].epoch, "its connection broke")
    clock.run(0.5)
    assert sender.port.stats().failed == 1
    receiver.expect("u", NUM_TOKENS, DESTINATION)
    with pytest.raises(UnknownPeer):
        sender.open("u", receiver, NUM_TOKENS, SOURCE, DESTINATION)
    assert sender.port.connect(receiver.port.hello()) == receiver.epoch
    sender.open("u", receiver, NUM_TOKENS, SOURCE, DESTINATION)
    sender.port.finish(TransferId("u"), handoff(NUM_TOKENS))
    assert [type(event) for event in clock.run(0.5)[receiver.epoch]] == [Landed]


def test_groups_that_cannot_exchange_are_refused_with_both_shapes() -> None:
    hub = LoopbackHub()
    here = SmallGroup.of(hub, "here", 2, Heads())
    for name, size, heads, more, words in (
        (
            "heads",
            4,
            Heads(4, 4),
            {},
            "target kv heads differs: 2 here, 4 at the peer; 2 ranks here, 4 ranks",
        ),
        (
            "model",
            1,
            Heads(),
            {"target_model": "b"},
            "'target-a' here, 'b' at the peer; 2 ranks here, 1 rank",
        ),
    ):
        peer = SmallGroup.of(hub, name, size, heads, **more)
        with pytest.raises(HandshakeRefused, match=words):
            here.port.connect(peer.port.hello())
    strict, alone = (
        SmallGroup.of(hub, f"strict {size}", size, Heads(), verify="checksum") for size in (2, 1)
    )
    with pytest.raises(HandshakeRefused, match="a checksum needs one writer of each: use verify = tag"):
        strict.port.connect(alone.port.hello())
    some = wire.decode_group(SmallGroup.of(hub, "four", 4, Heads()).port.hello())
    with pytest.raises(HandshakeRefused, match="not all ranks of one worker, in their order"):
        here.port.connect(wire.encode_group(some[:3]))
    with pytest.raises(HandshakeRefused, match="not all ranks of one worker"):
        here.port.connect(some[1])  # one rank of several, without the others


def test_a_group_s_hello_of_another_version_or_of_nonsense_is_refused() -> None:
    here = SmallGroup.of(LoopbackHub(), "here", 1, Heads())
    packed = SmallGroup.of(LoopbackHub(), "peer", 2, Heads()).port.hello()
    other = wire.GROUP_MAGIC + (wire.PROTOCOL_VERSION + 1).to_bytes(2, "big") + packed[6:]
    with pytest.raises(HandshakeRefused, match="protocol version differs"):
        here.port.connect(other)
    with pytest.raises(wire.WireError, match="hello of a group"):
        here.port.connect(packed[:6] + b"\xc1")
