"""Between groups of any sizes every head of every destination is written once, and a transfer ends as one."""

from __future__ import annotations

import itertools

import pytest

from kvmanager.errors import LayoutRefused
from kvmanager.ids import TransferId
from kvmanager.layout import kv_head_range
from transceiver.consensus import Consensus, LegConfused
from transceiver.pairing import legs
from transceiver.port import Broke, Landed, Released, TransferEvent
from transceiver.wire import Handoff, TerminalState

SIZES = (1, 2, 4)
WHOLE = TransferId("whole")
LEGS = tuple(TransferId(name) for name in "abc")


@pytest.mark.parametrize("target_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("draft_heads", [0, 1, 2, 8])
def test_every_head_of_every_destination_comes_from_one_source_that_has_it(
    target_heads: int, draft_heads: int
) -> None:
    for sources, destinations in itertools.product(SIZES, SIZES):
        found = legs(sources, destinations, num_target_heads=target_heads, num_draft_heads=draft_heads)
        assert len({(leg.source, leg.destination) for leg in found}) == len(found)
        for heads, name in ((target_heads, "target_heads"), (draft_heads, "draft_heads")):
            if not heads:
                assert all(not getattr(leg, name) for leg in found)
                continue
            for destination in range(destinations):
                into = [leg for leg in found if leg.destination == destination]
                written = sorted(head for leg in into for head in getattr(leg, name))
                assert written == list(kv_head_range(heads, destination, destinations))
                for leg in into:
                    assert set(getattr(leg, name)) <= set(kv_head_range(heads, leg.source, sources))


def test_equal_groups_ship_rank_to_rank_and_heads_that_all_hold_are_shipped_by_turns() -> None:
    equal = legs(4, 4, num_target_heads=8, num_draft_heads=2)
    assert [(leg.source, leg.destination) for leg in equal] == [(rank, rank) for rank in range(4)]
    shared = legs(4, 2, num_target_heads=1, num_draft_heads=1)
    assert [(leg.source, leg.destination) for leg in shared] == [(0, 0), (2, 1)]


@pytest.mark.parametrize(("target_heads", "draft_heads"), [(4, 1), (1, 4), (8, 2), (2, 8)])
def test_a_model_with_few_heads_adds_no_leg_to_those_of_the_other(
    target_heads: int, draft_heads: int
) -> None:
    for sources, destinations in itertools.product((*SIZES, 8), (*SIZES, 8)):
        both = legs(sources, destinations, num_target_heads=target_heads, num_draft_heads=draft_heads)
        most = max(target_heads, draft_heads)
        alone = legs(sources, destinations, num_target_heads=most, num_draft_heads=0)
        assert len(both) == len(alone)


def test_heads_that_no_group_can_divide_are_refused() -> None:
    with pytest.raises(LayoutRefused, match="3 KV heads cannot be divided among 2 ranks"):
        legs(1, 2, num_target_heads=3, num_draft_heads=0)


def landed(leg: TransferId, *, draft: bool = True) -> Landed:
    return Landed(leg, Handoff(num_tokens=5, first_token=7, draft_shipped=draft), 100, 10 if draft else 0)


def heard(events: list[TransferEvent]) -> tuple[Consensus, list[TransferEvent], list[TransferId]]:
    consensus = Consensus(WHOLE, frozenset(LEGS), draft_legs=frozenset({LEGS[0], LEGS[2]}))
    told: list[TransferEvent] = []
    aborted: list[TransferId] = []
    for event in events:
        verdict = consensus.hear(event)
        told += verdict.events
        aborted += verdict.abort
    return consensus, told, aborted


def test_a_transfer_lands_with_its_last_leg_and_not_before() -> None:
    for order in itertools.permutations((landed(LEGS[0]), landed(LEGS[1], draft=False), landed(LEGS[2]))):
        _, told, _ = heard(list(order[:2]))
        assert not told
        consensus, told, aborted = heard(list(order))
        (whole,) = told
        assert isinstance(whole, Landed)
        assert (whole.transfer, whole.bytes_target, whole.bytes_draft) == (WHOLE, 300, 20)
        assert whole.handoff.draft_shipped
        assert consensus.over
        assert not aborted


def test_a_leg_that_should_have_shipped_draft_context_and_did_not_is_not_overlooked() -> None:
    _, told, _ = heard([landed(LEGS[0]), landed(LEGS[1], draft=False), landed(LEGS[2], draft=False)])
    (whole,) = told
    assert isinstance(whole, Landed)
    assert not whole.handoff.draft_shipped


def test_one_broken_leg_aborts_the_others_and_its_reason_is_the_whole_s() -> None:
    broke = Broke(LEGS[1], TerminalState.FAILED, "the peer died")
    stopped = Broke(LEGS[2], TerminalState.CANCELLED, "another leg broke")
    for order in itertools.permutations((landed(LEGS[0]), broke, stopped)):
        _, told, aborted = heard(list(order))
        assert told == [Broke(WHOLE, TerminalState.FAILED, "the peer died")]
        ended = [event.transfer for event in order]
        first = min(ended.index(LEGS[1]), ended.index(LEGS[2]))
        assert aborted == sorted(ended[first + 1 :])


def test_pages_are_safe_when_those_of_all_legs_are() -> None:
    unsafe = [Broke(leg, TerminalState.FAILED, "silent", pages_safe=False) for leg in LEGS[:2]]
    consensus, told, _ = heard([*unsafe, landed(LEGS[2])])
    assert told == [Broke(WHOLE, TerminalState.FAILED, "silent", pages_safe=False)]
    assert not consensus.over
    assert consensus.hear(Released(LEGS[0])).events == ()
    assert consensus.hear(Released(LEGS[1])).events == (Released(WHOLE),)
    assert consensus.over
    # Released before the last leg has ended: the whole is told safe, and nothing follows.
    _, told, _ = heard([unsafe[0], Released(LEGS[0]), landed(LEGS[1]), landed(LEGS[2])])
    assert told == [Broke(WHOLE, TerminalState.FAILED, "silent")]


def test_a_leg_that_ends_twice_or_is_a_stranger_is_a_bug() -> None:
    for events in ([landed(LEGS[0])] * 2, [landed(TransferId("x"))], [Released(LEGS[0])]):
        with pytest.raises(LegConfused):
            heard(list(events))
