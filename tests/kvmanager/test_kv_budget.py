"""One memory budget for target and drafter."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.budget import KvDemand, plan_from_memory, plan_from_pages
from kvmanager.errors import BudgetInfeasible, InvalidCount
from kvmanager.ids import RequestId
from kvmanager.layout import KvGeometry
from kvmanager.ledger import KvLedger
from kvmanager.manager import BatchLimits

TARGET = KvGeometry(num_layers=30, num_kv_heads=3, head_dim=64, page_size=16, element_bytes=4)
DRAFT = KvGeometry(num_layers=4, num_kv_heads=3, head_dim=64, page_size=16, element_bytes=4)
LIMITS = BatchLimits(max_batch=8, max_seq_len=2048, lookahead=8)
DEMAND = KvDemand(target=TARGET, draft=DRAFT, limits=LIMITS, staging_bytes=1 << 20)


def test_target_and_draft_and_tables_and_staging_stay_inside_the_budget_and_use_it_up() -> None:
    budget_bytes = 1 << 30
    plan = plan_from_memory(DEMAND, budget_bytes)
    spent = (
        plan.num_target_pages * TARGET.page_bytes
        + plan.num_draft_pages * DRAFT.page_bytes
        + 2 * 9 * 129 * 4  # two tables, 8 slots and the dummy, 2,056 positions in pages of 16
        + (1 << 20)
    )
    assert plan.total_bytes == spent
    assert budget_bytes - TARGET.page_bytes - DRAFT.page_bytes < spent <= budget_bytes


def test_both_pools_hold_the_same_number_of_tokens() -> None:
    plan = plan_from_memory(DEMAND, 1 << 30)
    assert plan.num_target_pages == plan.num_draft_pages
    assert plan.num_tokens == (plan.num_target_pages - 1) * 16


def test_without_a_drafter_the_target_gets_everything() -> None:
    alone = plan_from_memory(replace(DEMAND, draft=None), 1 << 30)
    assert alone.num_draft_pages == 0
    assert alone.draft_bytes == 0
    assert alone.num_target_pages > plan_from_memory(DEMAND, 1 << 30).num_target_pages


def test_the_least_budget_starts_and_one_byte_less_does_not() -> None:
    plan = plan_from_memory(DEMAND, DEMAND.least_bytes)
    assert plan.total_bytes == DEMAND.least_bytes
    with pytest.raises(BudgetInfeasible):
        plan_from_memory(DEMAND, DEMAND.least_bytes - 1)


def test_an_infeasible_budget_is_refused_with_the_numbers_and_a_length_that_would_start() -> None:
    budget_bytes = DEMAND.least_bytes // 2
    with pytest.raises(BudgetInfeasible) as refused:
        plan_from_memory(DEMAND, budget_bytes)
    message = str(refused.value)
    for number in (budget_bytes, DEMAND.least_bytes, TARGET.bytes_per_token, DRAFT.bytes_per_token, 2048):
        assert str(number) in message
    match = re.search(r"max_seq_len (\d+) would fit", message)
    assert match
    fits = int(match[1])
    plan_from_memory(replace(DEMAND, limits=replace(LIMITS, max_seq_len=fits)), budget_bytes)
    with pytest.raises(BudgetInfeasible):
        plan_from_memory(replace(DEMAND, limits=replace(LIMITS, max_seq_len=fits + 1)), budget_bytes)


def test_a_budget_below_the_fixed_costs_says_that_nothing_fits() -> None:
    with pytest.raises(BudgetInfeasible, match="not even max_seq_len 1 would fit"):
        plan_from_memory(DEMAND, 1 << 20)


def test_a_drafter_of_a_million_positions_starts_because_nothing_is_dense() -> None:
    """A dense arena of 997,696 positions for 8 requests and a dummy would take 21.4 GiB for the drafter."""
    draft = KvGeometry(num_layers=5, num_kv_heads=2, head_dim=64, page_size=64, element_bytes=2)
    target = KvGeometry(num_layers=36, num_kv_heads=1, head_dim=128, page_size=64, element_bytes=2)
    limits = BatchLimits(max_batch=8, max_seq_len=997_696, lookahead=8)
    dense_arena_bytes = draft.bytes_per_token * limits.max_seq_len * (limits.max_batch + 1)
    assert dense_arena_bytes / (1 << 30) == pytest.approx(21.4, abs=0.05)
    plan = plan_from_memory(KvDemand(target=target, draft=draft, limits=limits), 21 << 30)
    assert plan.total_bytes <= 21 << 30
    assert plan.num_tokens >= 997_696


def test_explicit_page_counts_are_priced() -> None:
    plan = plan_from_pages(DEMAND, num_target_pages=300, num_draft_pages=200)
    assert plan.target_bytes == 300 * TARGET.page_bytes
    assert plan.draft_bytes == 200 * DRAFT.page_bytes
    assert plan.num_tokens == 199 * 16


@pytest.mark.parametrize(("target", "draft", "short"), [(129, 130, "target"), (130, 129, "draft")])
def test_explicit_page_counts_below_one_full_request_are_refused(target: int, draft: int, short: str) -> None:
    with pytest.raises(BudgetInfeasible, match=f"129 {short} pages .* needs 130"):
        plan_from_pages(DEMAND, num_target_pages=target, num_draft_pages=draft)


def test_draft_pages_without_a_drafter_are_refused() -> None:
    with pytest.raises(BudgetInfeasible, match="no drafter"):
        plan_from_pages(replace(DEMAND, draft=None), num_target_pages=300, num_draft_pages=1)


def test_negative_staging_is_refused() -> None:
    with pytest.raises(InvalidCount, match="staging_bytes"):
        replace(DEMAND, staging_bytes=-1)


@given(
    target_page_size=st.sampled_from([1, 7, 16, 64]),
    draft_page_size=st.sampled_from([1, 5, 16, 128]),
    max_seq_len=st.integers(1, 300),
    lookahead=st.integers(0, 16),
    extra_bytes=st.integers(0, 2_000_000),
)
@settings(max_examples=60, deadline=None)
def test_a_plan_never_overspends_and_always_holds_one_full_request(
    target_page_size: int, draft_page_size: int, max_seq_len: int, lookahead: int, extra_bytes: int
) -> None:
    target = replace(TARGET, page_size=target_page_size)
    draft = replace(DRAFT, page_size=draft_page_size)
    limits = BatchLimits(max_batch=2, max_seq_len=max_seq_len, lookahead=lookahead)
    demand = KvDemand(target=target, draft=draft, limits=limits)
    budget_bytes = demand.least_bytes + extra_bytes
    plan = plan_from_memory(demand, budget_bytes)
    assert plan.total_bytes <= budget_bytes
    # Less than one page of each is left over.
    assert budget_bytes - plan.total_bytes < target.page_bytes + draft.page_bytes
    ledger = KvLedger(
        target=target,
        draft=draft,
        num_target_pages=plan.num_target_pages,
        num_draft_pages=plan.num_draft_pages,
        max_batch=2,
        max_seq_len=max_seq_len,
        lookahead=lookahead,
    )
    ledger.reserve(RequestId("full"), max_seq_len)
    ledger.check()


def test_the_windows_of_all_slots_are_part_of_the_intercept_and_the_rest_is_the_targets() -> None:
    windowed = replace(DEMAND, draft=replace(DRAFT, window=128))
    # 128 positions of context and 8 of look-ahead, beginning anywhere in a page of 16, touch 10 pages at most.
    assert windowed.window_pages == 8 * 10
    plan = plan_from_memory(windowed, 1 << 30)
    assert plan.num_draft_pages == 8 * 10 + 1
    assert plan.draft_bytes == 81 * DRAFT.page_bytes
    assert plan.table_bytes == 9 * (129 + 10) * 4
    assert (1 << 30) - TARGET.page_bytes < plan.total_bytes <= 1 << 30
    assert plan.num_tokens == (plan.num_target_pages - 1) * 16 > plan_from_memory(DEMAND, 1 << 30).num_tokens


def test_a_small_budget_has_fewer_windows_and_still_one_full_request() -> None:
    windowed = replace(DEMAND, draft=replace(DRAFT, window=128))
    least = plan_from_memory(windowed, windowed.least_bytes)
    assert (least.num_target_pages, least.num_draft_pages) == (129 + 1, 10 + 1)
    some = plan_from_memory(windowed, windowed.least_bytes + 5 * DRAFT.page_bytes)
    assert (some.num_target_pages, some.num_draft_pages) == (129 + 1, 15 + 1)
    with pytest.raises(BudgetInfeasible, match=r"10 pages of a window of 128"):
        plan_from_memory(windowed, windowed.least_bytes - 1)


def test_a_prompt_shorter_than_the_window_needs_no_more_pages_than_it_has_positions() -> None:
    short = replace(DEMAND, draft=replace(DRAFT, window=4096))
    assert short.window_pages == 8 * 129
