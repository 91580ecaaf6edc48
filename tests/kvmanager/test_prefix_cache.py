"""The joint prefix cache, one sentence each: what is a hit, what is kept, what leaves, and what it is no leak of."""

from __future__ import annotations

import pytest

from kvmanager.errors import LayoutRefused, LedgerCorrupt, PoolExhausted
from kvmanager.ids import PageKey, RequestId, TransferId
from kvmanager.layout import DraftKv, KvGeometry
from kvmanager.ledger import KvLedger
from kvmanager.ledgers import Ledger
from kvmanager.prefix import page_keys, shareable

PAGE = 4
TARGET = KvGeometry(num_layers=2, num_kv_heads=1, head_dim=8, page_size=PAGE, element_bytes=4)
DRAFT = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=8, page_size=PAGE, element_bytes=4)
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
T = TransferId("t")
PROMPT = list(range(100, 120))


def ledger_of(
    *,
    pages: int = 41,
    draft_pages: int | None = None,
    draft_kv: DraftKv = "mirrored",
    draft: KvGeometry = DRAFT,
) -> KvLedger:
    own = pages if draft_pages is None else draft_pages
    return KvLedger(
        target=TARGET,
        draft=draft,
        num_target_pages=pages,
        num_draft_pages=own if draft_kv == "mirrored" else 0,
        max_batch=4,
        max_seq_len=64,
        lookahead=0,
        draft_kv=draft_kv,
        prefix_cache=True,
    )


def keys_of(tokens: list[int], salt: str = "") -> tuple[PageKey, ...]:
    return page_keys(tokens, PAGE, model_pair="pair", salt=salt)


def run(ledger: Ledger, request: RequestId, tokens: list[int]) -> int:
    """A request from reservation to the end; returns how many of its pages were hits."""
    keys = keys_of(tokens)
    ledger.reserve(request, len(tokens), shareable(keys, len(tokens), PAGE))
    hits = ledger.length(request) // PAGE
    ledger.commit(request, len(tokens))
    ledger.remember(request, keys)
    ledger.free(request)
    ledger.check()
    return hits


# Keys


def test_a_key_stands_for_its_tokens_and_all_before_them() -> None:
    keys = keys_of(PROMPT)
    assert len(keys) == 5
    assert len(set(keys)) == 5
    assert keys_of(PROMPT[:11]) == keys[:2]
    other = [1, *PROMPT[1:]]
    assert not set(keys_of(other)) & set(keys), "a difference in the first page changes every key behind it"
    assert keys_of([*PROMPT[:-1], 1])[:4] == keys[:4]


def test_another_model_pair_or_another_tenant_has_other_keys() -> None:
    plain = page_keys(PROMPT, PAGE, model_pair="pair")
    assert not set(plain) & set(page_keys(PROMPT, PAGE, model_pair="other"))
    assert not set(plain) & set(page_keys(PROMPT, PAGE, model_pair="pair", salt="tenant"))
    assert not set(page_keys(PROMPT, PAGE, model_pair="ab", salt="c")) & set(
        page_keys(PROMPT, PAGE, model_pair="a", salt="bc")
    )


@pytest.mark.parametrize(("length", "pages"), [(1, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (20, 4)])
def test_the_page_of_the_last_token_is_never_shared(length: int, pages: int) -> None:
    assert len(shareable(keys_of(PROMPT[:length]), length, PAGE)) == pages


# Hits


@pytest.mark.parametrize("draft_kv", ["mirrored", "unified"])
@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1])
def test_the_same_prompt_again_hits_all_but_the_page_of_its_last_token(
    draft_kv: DraftKv, length: int
) -> None:
    ledger = ledger_of(draft_kv=draft_kv)
    assert run(ledger, A, PROMPT[:length]) == 0
    assert run(ledger, B, PROMPT[:length]) == (length - 1) // PAGE


@pytest.mark.parametrize("common", [0, 1, 3, 4, 5, 8, 15, 16, 17, 19])
def test_a_prompt_that_begins_alike_hits_the_full_pages_in_common(common: int) -> None:
    ledger = ledger_of()
    run(ledger, A, PROMPT)
    assert run(ledger, B, PROMPT[:common] + [7] * (20 - common)) == common // PAGE


def test_target_and_draft_pages_are_hit_together() -> None:
    ledger = ledger_of()
    keys = keys_of(PROMPT)
    ledger.reserve(A, 20)
    ledger.commit(A, 20)
    ledger.remember(A, keys)
    first = ledger.pages(A)
    ledger.reserve(B, 20, shareable(keys, 20, PAGE))
    second = ledger.pages(B)
    assert second.target[:4] == first.target[:4]
    assert second.draft[:4] == first.draft[:4]
    assert not set(second.target[4:]) & set(first.target)
    assert ledger.length(B) == 16
    ledger.check()


def test_pages_are_cached_only_as_far_as_they_are_written() -> None:
    ledger = ledger_of()
    ledger.reserve(A, 20)
    ledger.commit(A, 11)
    assert ledger.remember(A, keys_of(PROMPT)) == 2


def test_two_requests_that_computed_the_same_prompt_leave_one_copy() -> None:
    ledger = ledger_of()
    keys = keys_of(PROMPT)
    for request in (A, B):
        ledger.reserve(request, 20)
        ledger.commit(request, 20)
    assert ledger.remember(A, keys) == 5
    assert ledger.remember(B, keys) == 0
    ledger.free(A)
    ledger.free(B)
    assert ledger.usage().cached_pages == 5
    ledger.check()


# What is kept and what leaves


@pytest.mark.parametrize("draft_kv", ["mirrored", "unified"])
def test_pages_held_by_the_cache_alone_are_no_leak(draft_kv: DraftKv) -> None:
    ledger = ledger_of(draft_kv=draft_kv)
    baseline = ledger.usage()
    run(ledger, A, PROMPT)
    usage = ledger.usage()
    assert usage == baseline
    assert usage.target_pages_in_use == usage.draft_pages_in_use == 0
    assert usage.cached_pages == 5
    assert usage.target_pages == baseline.target_pages


def test_the_cache_makes_room_before_a_reservation_is_refused() -> None:
    ledger = ledger_of(pages=9)
    run(ledger, A, PROMPT)
    ledger.reserve(B, 8 * PAGE)
    assert ledger.usage().cached_pages == 0
    ledger.check()
    with pytest.raises(PoolExhausted):
        ledger.reserve(C, 1)


def test_the_smaller_draft_pool_evicts_from_both() -> None:
    ledger = ledger_of(pages=41, draft_pages=9)
    run(ledger, A, PROMPT)
    ledger.reserve(B, 5 * PAGE)
    assert ledger.usage().cached_pages == 3, "the draft pool was two pages short"
    ledger.check()


def test_least_recently_used_prompts_leave_first_and_from_their_ends() -> None:
    ledger = ledger_of(pages=12)
    old, new = PROMPT[:12], [t + 50 for t in PROMPT[:12]]
    run(ledger, A, old)
    run(ledger, A, new)
    run(ledger, A, old)  # now the younger one
    ledger.reserve(B, 7 * PAGE)
    assert ledger.num_cached(keys_of(new)) == 1
    assert ledger.num_cached(keys_of(old)) == 3
    ledger.free(B)
    ledger.reserve(B, 9 * PAGE)
    assert ledger.num_cached(keys_of(new)) == 0
    assert ledger.num_cached(keys_of(old)) == 2
    ledger.check()


def test_s34_a_page_is_pinned_while_leased_or_used() -> None:
    ledger = ledger_of(pages=9)
    keys = keys_of(PROMPT)
    ledger.reserve(A, 20)
    ledger.commit(A, 20)
    ledger.remember(A, keys)
    ledger.lease(A, T)
    ledger.free(A)
    assert ledger.usage().target_pages_in_use == 5
    assert ledger.usage().cached_pages == 0
    with pytest.raises(PoolExhausted):
        ledger.reserve(B, 4 * PAGE)
    ledger.reserve(C, 20, shareable(keys, 20, PAGE))
    ledger.end_lease(T)
    assert ledger.usage().cached_pages == 1, "what C shares stays in use"
    ledger.free(C)
    assert ledger.usage().cached_pages == 5
    ledger.check()


def test_a_hit_does_not_count_its_own_pages_as_room() -> None:
    """Eight pages: three in use, five cached. A hit on four leaves one to evict, and three are wanted."""
    ledger = ledger_of(pages=9)
    ledger.reserve(C, 3 * PAGE)
    run(ledger, A, PROMPT)
    prefix = shareable(keys_of(PROMPT), 20, PAGE)
    before = ledger.usage()
    with pytest.raises(PoolExhausted) as caught:
        ledger.reserve(B, 7 * PAGE, prefix)
    assert (caught.value.need, caught.value.free) == (3, 1)
    assert ledger.usage() == before
    assert ledger.num_cached(keys_of(PROMPT)) == 5, "a refused reservation evicts nothing"
    ledger.reserve(B, 5 * PAGE, prefix)
    assert ledger.length(B) == 16
    ledger.check()


def test_forgetting_leaves_pages_in_use_to_their_owners() -> None:
    ledger = ledger_of()
    keys = keys_of(PROMPT)
    ledger.reserve(A, 20)
    ledger.commit(A, 20)
    ledger.remember(A, keys)
    ledger.forget_prefixes()
    assert ledger.num_cached(keys) == 0
    ledger.check()
    assert ledger.remember(A, keys) == 5
    ledger.free(A)
    ledger.forget_prefixes()
    assert ledger.usage().cached_pages == 0
    ledger.check()


def test_pools_of_different_page_sizes_cannot_be_cached_together() -> None:
    other = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=8, page_size=8, element_bytes=4)
    with pytest.raises(LayoutRefused, match="4 and 8"):
        ledger_of(draft=other)


def test_check_finds_a_draft_page_that_left_without_its_target_page() -> None:
    ledger = ledger_of()
    run(ledger, A, PROMPT)
    assert ledger._mirror is not None
    owner = next(iter(ledger._mirror.pool.owners()))
    ledger._mirror.pool.release(owner)
    with pytest.raises(LedgerCorrupt, match="draft pool and the prefix cache disagree"):
        ledger.check()


def test_nothing_is_cached_behind_a_page_that_another_request_was_first_to_compute() -> None:
    """Its pages would hang on a page that it does not own, and that may leave while they are in use."""
    ledger = ledger_of()
    for request, length in ((A, 8), (B, 20)):
        ledger.reserve(request, length)
        ledger.commit(request, length)
    assert ledger.remember(A, keys_of(PROMPT[:8])) == 2
    assert ledger.remember(B, keys_of(PROMPT)) == 0
    ledger.free(A)
    ledger.check()
