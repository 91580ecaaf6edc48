"""The drafter's layers in the target's pages: one pool, one table, and no second set of books to disagree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmanager.budget import KvDemand, plan_from_memory, plan_from_pages
from kvmanager.errors import BudgetInfeasible, LayoutRefused
from kvmanager.ids import RequestId, TransferId
from kvmanager.layout import KvGeometry, entries_per_page
from kvmanager.ledger import KvLedger
from kvmanager.manager import BatchLimits

TARGET = KvGeometry(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, element_bytes=4)
DRAFT = KvGeometry(num_layers=1, num_kv_heads=2, head_dim=8, page_size=4, element_bytes=4)
LIMITS = BatchLimits(max_batch=4, max_seq_len=64, lookahead=4)
A = RequestId("a")


def ledger_of(*, draft: KvGeometry = DRAFT, draft_pages: int = 0) -> KvLedger:
    return KvLedger(
        target=TARGET,
        draft=draft,
        num_target_pages=41,
        num_draft_pages=draft_pages,
        max_batch=4,
        max_seq_len=64,
        lookahead=4,
        draft_kv="unified",
    )


def test_the_drafter_sees_the_targets_slot_row_and_length_and_has_no_pages_of_its_own() -> None:
    ledger = ledger_of()
    assert ledger.draft is not None
    slot = ledger.reserve(A, 10)
    ledger.commit(A, 7)
    assert ledger.draft.slot(A) == slot
    assert ledger.draft.length(A) == 7
    assert ledger.draft.page_table is ledger.target.page_table
    assert ledger.pages(A).draft == ()
    usage = ledger.usage()
    assert usage.draft_slots_in_use == usage.slots_in_use == 1
    assert usage.draft_pages == 0
    assert ledger.draft_kv == "unified"
    ledger.check()


def test_everything_returns_after_lease_release_and_free() -> None:
    ledger = ledger_of()
    before = ledger.usage()
    ledger.reserve(A, 10)
    ledger.lease(A, TransferId("t"))
    ledger.release_index_slot(A)
    ledger.free(A)
    assert ledger.usage().target_pages_in_use == 4
    ledger.end_lease(TransferId("t"))
    assert ledger.usage() == before
    ledger.check()


def test_draft_pages_for_a_unified_drafter_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no draft pool"):
        ledger_of(draft_pages=5)


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (replace(DRAFT, page_size=8), "one page size: the target's is 4, the drafter's 8"),
        (replace(DRAFT, element_bytes=2), "one element size: the target's is 4, the drafter's 2"),
    ],
)
def test_models_that_cannot_share_pages_are_refused_with_both_values(draft: KvGeometry, says: str) -> None:
    with pytest.raises(LayoutRefused, match=says):
        ledger_of(draft=draft)


def test_s44_a_unified_budget_counts_draft_layers_once() -> None:
    """Both forms hold the same tokens in the same memory, but for one page table and rounding to pages."""
    budget = 1 << 20
    mirrored = KvDemand(target=TARGET, draft=DRAFT, limits=LIMITS)
    unified = replace(mirrored, draft_kv="unified")
    assert unified.bytes_per_token == mirrored.bytes_per_token == 4 * 2 * 2 * 8 * 4
    one, two = plan_from_memory(mirrored, budget), plan_from_memory(unified, budget)
    assert two.num_draft_pages == 0
    assert two.total_bytes <= budget
    assert two.target_bytes + two.draft_bytes == two.num_target_pages * (TARGET.page_bytes + DRAFT.page_bytes)
    assert abs(two.num_tokens - one.num_tokens) <= TARGET.page_size
    assert two.table_bytes * 2 == one.table_bytes


def test_draft_pages_in_a_unified_plan_are_refused() -> None:
    demand = KvDemand(target=TARGET, draft=DRAFT, limits=LIMITS, draft_kv="unified")
    with pytest.raises(BudgetInfeasible, match="lie in the target's pages"):
        plan_from_pages(demand, num_target_pages=40, num_draft_pages=40)


# The factor from page id to table entry


def test_a_strided_slice_counts_pages_and_a_dense_view_counts_layers() -> None:
    page, layer = TARGET.page_elements, TARGET.layer_elements
    assert entries_per_page(page, page_elements=page, layer_elements=layer) == 1
    assert entries_per_page(layer, page_elements=page, layer_elements=layer) == TARGET.num_layers


def test_in_unified_pages_the_dense_factor_counts_both_models_layers() -> None:
    page = TARGET.page_elements + DRAFT.page_elements
    layer = DRAFT.layer_elements
    assert entries_per_page(layer, page_elements=page, layer_elements=layer) == 4


@pytest.mark.parametrize("stride", [0, 1, 63, 64 * 3, 128 * 2, 128 * 4])
def test_a_stride_that_fits_neither_view_is_refused(stride: int) -> None:
    page, layer = TARGET.page_elements, TARGET.layer_elements
    assert stride not in (page, layer)
    with pytest.raises(LayoutRefused, match=rf"stride\(0\) {stride}"):
        entries_per_page(stride, page_elements=page, layer_elements=layer)


def test_a_dense_view_of_layers_that_do_not_tile_the_page_is_refused() -> None:
    with pytest.raises(LayoutRefused, match="tile"):
        entries_per_page(128, page_elements=3 * 128 + 64, layer_elements=128)
