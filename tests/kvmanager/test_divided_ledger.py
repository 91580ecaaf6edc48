"""The ledger of ranks that keep requests apart: where a request goes, and that it stays there with all it owns."""

from __future__ import annotations

import random

import pytest

from kvmanager.errors import LedgerCorrupt, PoolExhausted, RequestExists, SlotsExhausted, UnknownRequest
from kvmanager.ids import PageKey, RequestId, TransferId
from kvmanager.ledgers import DividedLedger
from kvmanager.prefix import shareable
from tests.kvmanager.test_prefix_cache import PAGE, PROMPT, keys_of, ledger_of, run

A, B, C, D = (RequestId(name) for name in "abcd")
T = TransferId("t")


def divided(num_ranks: int = 2, pages: int = 41) -> DividedLedger:
    return DividedLedger([ledger_of(pages=pages) for _ in range(num_ranks)])


def prefix(tokens: list[int]) -> tuple[PageKey, ...]:
    return shareable(keys_of(tokens), len(tokens), PAGE)


def test_a_request_goes_where_most_pages_are_free_and_stays_there() -> None:
    ledger = divided()
    for request, num_tokens in ((A, 24), (B, 8), (C, 8), (D, 4)):
        ledger.reserve(request, num_tokens)
    assert [ledger.rank_of(request) for request in (A, B, C, D)] == [0, 1, 1, 1]
    ledger.commit_all((B, A, C), (3, 5, 7))
    assert ledger.lengths_of((A, B, C, D)) == [5, 3, 7, 0]
    assert ledger.ledgers[0].lengths_of((A,)) == [5]
    usage = ledger.usage()
    assert (usage.requests, usage.slots_in_use, usage.target_pages_in_use) == (4, 4, 11)
    assert usage.draft_pages_free == ledger.num_draft_pages - 2 - 11
    ledger.check()


def test_a_batch_that_one_rank_refuses_is_committed_nowhere() -> None:
    ledger = divided()
    for request in (A, B):
        ledger.reserve(request, 8)
    with pytest.raises(Exception, match="length 9"):
        ledger.commit_all((A, B), (8, 9))
    assert ledger.lengths_of((A, B)) == [0, 0]


def test_a_request_that_no_rank_has_room_for_is_refused_and_leaves_nothing() -> None:
    ledger = divided(pages=17)
    for request in (A, B):
        ledger.reserve(request, 40)
    with pytest.raises(PoolExhausted) as refused:
        ledger.reserve(C, 28)
    assert (refused.value.need, refused.value.free) == (7, 6)
    with pytest.raises(UnknownRequest):
        ledger.rank_of(C)
    with pytest.raises(RequestExists):
        ledger.reserve(A, 4)
    ledger.check()


def test_slots_of_all_ranks_are_used_before_one_is_missing() -> None:
    ledger = divided()
    for index in range(8):
        ledger.reserve(RequestId(str(index)), 4 + index)
    with pytest.raises(SlotsExhausted):
        ledger.reserve(A, 4)


def test_a_prompt_follows_its_prefix_until_that_rank_is_fuller_by_as_much() -> None:
    ledger = divided(3)
    ledger.reserve(D, 4)  # so that the ranks differ
    assert run(ledger, A, PROMPT) == 0
    assert ledger.num_cached(keys_of(PROMPT)) == 5
    ranks = []
    for index in range(7):
        request = RequestId(str(index))
        ledger.reserve(request, len(PROMPT) + 4, prefix(PROMPT))
        hits = ledger.length(request) // PAGE
        ranks.append((ledger.rank_of(request), hits))
        ledger.commit(request, len(PROMPT))
        ledger.remember(request, keys_of(PROMPT))
        ledger.check()
    # Six pages each, four of them shared: behind two of them a rank is as full as one that has to begin with six.
    assert ranks == [(1, 4), (1, 4), (2, 0), (2, 4), (1, 4), (2, 4), (0, 0)]


def test_what_a_transfer_holds_stays_on_the_rank_of_a_request_that_is_gone() -> None:
    ledger = divided()
    ledger.reserve(B, 4)
    ledger.reserve(A, 8)
    ledger.lease(A, T)
    ledger.release_index_slot(A)
    ledger.free(A)
    ledger.free(A)
    assert ledger.ledgers[1].usage().target_pages_in_use == 2
    assert ledger.usage().leases == 1
    ledger.check()
    ledger.end_lease(T)
    ledger.end_lease(T)
    assert ledger.usage().target_pages_in_use == 1
    ledger.check()


def test_a_rank_with_a_request_that_it_was_not_given_is_corrupt() -> None:
    ledger = divided()
    ledger.ledgers[1].reserve(A, 8)
    with pytest.raises(LedgerCorrupt, match="other requests"):
        ledger.check()


def test_no_history_of_requests_leaves_anything_behind() -> None:
    dice = random.Random(5)
    ledger = divided(3, pages=17)
    baseline = ledger.usage()
    live: list[tuple[RequestId, list[int]]] = []
    for index in range(300):
        if live and dice.random() < 0.5:
            request, tokens = live.pop(dice.randrange(len(live)))
            ledger.remember(request, keys_of(tokens))
            ledger.free(request)
        else:
            request, tokens = RequestId(str(index)), [dice.randrange(2)] * dice.randrange(1, 60)
            try:
                ledger.reserve(request, len(tokens), prefix(tokens))
            except (PoolExhausted, SlotsExhausted):
                continue
            ledger.commit(request, len(tokens))
            live.append((request, tokens))
        ledger.check()
    for request, _ in live:
        ledger.free(request)
    assert ledger.usage() == baseline


def test_spare_pages_are_kept_by_the_ranks_whose_requests_may_grow() -> None:
    ledger = divided(pages=17)
    ledger.reserve(A, 32)
    ledger.reserve(B, 4)
    ledger.reserve(C, 4)
    assert [ledger.rank_of(request) for request in (A, B, C)] == [0, 1, 1]
    ledger.reserve(D, 36, spare_pages=6)  # four of them here, where 14 are free
    assert ledger.rank_of(D) == 1
    with pytest.raises(PoolExhausted):
        ledger.reserve(RequestId("e"), 28, spare_pages=8)


def test_a_hit_ends_at_a_multiple_on_whichever_rank_it_is() -> None:
    ledger = divided()
    run(ledger, A, PROMPT)
    ledger.reserve(B, 24, prefix(PROMPT), position_multiple=3 * PAGE)
    assert (ledger.rank_of(B), ledger.length(B)) == (0, 3 * PAGE)
    assert ledger.pages(B).rank == 0
