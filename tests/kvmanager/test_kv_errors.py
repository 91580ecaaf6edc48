"""Errors cross process borders with their numbers and their message."""

from __future__ import annotations

import pickle

import pytest

from kvmanager import errors
from kvmanager.ids import PageId, RequestId, SlotId, TransferId

R, T = RequestId("r"), TransferId("t")


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidCount("num_tokens", 0, 1),
        errors.PoolExhausted(need=3, free=2, pool="draft"),
        errors.SlotsExhausted(max_batch=4),
        errors.TooLong(100, 7, 5, "the size of the draft pool", "pages"),
        errors.UnknownRequest(R),
        errors.SlotReleased(R),
        errors.RequestExists(R),
        errors.DummySlotError(R),
        errors.SlotTaken(SlotId(1), R, RequestId("s")),
        errors.CommitRefused(R, length=3, low=4, high=9),
        errors.RowTooShort(R, need=3, width=2),
        errors.PageNotInUse(PageId(3)),
        errors.PageAlreadyHeld(PageId(3), "r"),
        errors.LeaseExists(T),
        errors.UnknownLease(T),
        errors.LeaseExpired(T),
        errors.BudgetInfeasible("too small"),
        errors.LedgerCorrupt("lost a page"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_pickling_with_its_message_and_fields(error: errors.KvError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert isinstance(copy, errors.KvError)


def test_a_request_that_released_its_slot_is_also_caught_as_unknown() -> None:
    assert issubclass(errors.SlotReleased, errors.UnknownRequest)
