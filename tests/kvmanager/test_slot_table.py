"""Rows of the persistent page table."""

from __future__ import annotations

import numpy as np
import pytest

from kvmanager.errors import (
    DummySlotError,
    InvalidCount,
    LedgerCorrupt,
    RequestExists,
    RowTooShort,
    SlotsExhausted,
    SlotTaken,
    UnknownRequest,
)
from kvmanager.ids import DUMMY_PAGE, PageId, RequestId, SlotId
from kvmanager.slots import SlotTable

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def pages(*ids: int) -> list[PageId]:
    return [PageId(page) for page in ids]


def test_a_new_table_shows_the_dummy_page_everywhere() -> None:
    slots = SlotTable(max_batch=3, max_pages=5)
    assert slots.table.shape == (4, 5)
    assert slots.table.dtype == np.int32
    assert slots.dummy_slot == 3
    assert not slots.table.any()


def test_a_row_shows_its_pages_in_position_order_and_the_dummy_page_behind_them() -> None:
    slots = SlotTable(max_batch=3, max_pages=5)
    slot = slots.assign(A, pages(9, 4, 7))
    assert slots.table[slot].tolist() == [9, 4, 7, 0, 0]


def test_the_table_stays_the_same_array_for_its_whole_life() -> None:
    slots = SlotTable(max_batch=2, max_pages=3)
    table = slots.table
    slots.assign(A, pages(1))
    slots.set_pages(A, pages(1, 2))
    slots.release_index_slot(A)
    assert slots.table is table


def test_setting_fewer_pages_wipes_the_old_ones() -> None:
    slots = SlotTable(max_batch=2, max_pages=3)
    slot = slots.assign(A, pages(1, 2, 3))
    slots.set_pages(A, pages(5))
    assert slots.table[slot].tolist() == [5, 0, 0]
    slots.check()


def test_a_released_row_shows_the_dummy_page_before_its_slot_is_given_to_another() -> None:
    slots = SlotTable(max_batch=1, max_pages=4)
    slot = slots.assign(A, pages(1, 2, 3, 4))
    assert slots.release_index_slot(A)
    assert not slots.table.any()
    assert slots.assign(B, pages(7)) == slot
    assert slots.table[slot].tolist() == [7, 0, 0, 0]


def test_releasing_twice_and_releasing_a_stranger_change_nothing() -> None:
    slots = SlotTable(max_batch=2, max_pages=4)
    slots.assign(A, pages(1))
    slots.release_index_slot(A)
    slot_of_b = slots.assign(B, pages(2))  # in the slot that A had
    assert not slots.release_index_slot(A)
    assert not slots.release_index_slot(C)
    assert slots.slot(B) == slot_of_b
    assert slots.num_free == 1
    slots.check()


def test_a_full_table_refuses_and_changes_nothing() -> None:
    slots = SlotTable(max_batch=2, max_pages=4)
    slots.assign(A, pages(1))
    slots.assign(B, pages(2))
    with pytest.raises(SlotsExhausted, match="all 2 slots"):
        slots.assign(C, pages(3))
    with pytest.raises(UnknownRequest):
        slots.slot(C)
    slots.check()


def test_a_live_request_cannot_be_given_the_dummy_slot() -> None:
    slots = SlotTable(max_batch=2, max_pages=4)
    with pytest.raises(DummySlotError):
        slots.assign_slot(A, slots.dummy_slot, pages(1))
    with pytest.raises(UnknownRequest):
        slots.slot(A)
    assert not slots.table.any()


def test_a_live_request_cannot_be_given_the_dummy_page() -> None:
    slots = SlotTable(max_batch=2, max_pages=4)
    with pytest.raises(DummySlotError):
        slots.assign(A, [PageId(1), DUMMY_PAGE])
    slots.assign(A, pages(1))
    with pytest.raises(DummySlotError):
        slots.set_pages(A, [DUMMY_PAGE])
    assert slots.table[slots.slot(A)].tolist() == [1, 0, 0, 0]
    slots.check()


def test_a_request_found_on_the_dummy_slot_raises_instead_of_running() -> None:
    slots = SlotTable(max_batch=2, max_pages=4)
    slots.assign(A, pages(1))
    slots._slot[A] = slots.dummy_slot
    with pytest.raises(DummySlotError, match="'a'"):
        slots.slot(A)
    with pytest.raises(LedgerCorrupt, match="dummy slot"):
        slots.check()


def test_a_request_has_one_slot_and_a_slot_one_request() -> None:
    slots = SlotTable(max_batch=2, max_pages=4)
    slot = slots.assign(A, pages(1))
    with pytest.raises(RequestExists):
        slots.assign(A, pages(2))
    with pytest.raises(SlotTaken, match="'a' holds it"):
        slots.assign_slot(B, slot, pages(2))
    with pytest.raises(InvalidCount):
        slots.assign_slot(B, SlotId(-1), pages(2))
    assert slots.assign(B, pages(2)) != slot
    slots.check()


def test_more_pages_than_a_row_holds_are_refused_with_both_numbers() -> None:
    slots = SlotTable(max_batch=2, max_pages=2)
    with pytest.raises(RowTooShort, match=r"has 3 pages, a row of the page table holds 2"):
        slots.assign(A, pages(1, 2, 3))
    assert slots.num_in_use == 0
    assert slots.assign(A, pages(1, 2)) == 0
    slots.check()


def test_check_finds_a_row_that_somebody_else_wrote_to() -> None:
    slots = SlotTable(max_batch=2, max_pages=2)
    slot = slots.assign(A, pages(1))
    slots.table[slot, 1] = 5
    with pytest.raises(LedgerCorrupt, match=f"row {slot}, held by a"):
        slots.check()


def test_check_finds_pages_in_the_dummy_row() -> None:
    slots = SlotTable(max_batch=2, max_pages=2)
    slots.table[slots.dummy_slot, 0] = 5
    with pytest.raises(LedgerCorrupt, match="row 2, held by no one"):
        slots.check()
