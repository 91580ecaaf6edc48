"""What a decode step asks about all its requests at once is what it would hear about each."""

from __future__ import annotations

import pytest

from kvmanager.errors import CommitRefused, SlotReleased, UnknownRequest
from kvmanager.ids import RequestId
from kvmanager.layout import DraftKv, KvGeometry
from kvmanager.ledger import KvLedger

GEOMETRY = KvGeometry(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, element_bytes=2)
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


@pytest.fixture(params=["mirrored", "unified"])
def ledger(request: pytest.FixtureRequest) -> KvLedger:
    draft_kv: DraftKv = request.param
    made = KvLedger(
        target=GEOMETRY,
        draft=GEOMETRY,
        num_target_pages=40,
        num_draft_pages=40 if draft_kv == "mirrored" else 0,
        max_batch=4,
        max_seq_len=32,
        lookahead=4,
        draft_kv=draft_kv,
    )
    for name in (A, B, C):
        made.reserve(name, 12)
    return made


def test_slots_and_lengths_are_those_of_the_single_calls(ledger: KvLedger) -> None:
    ledger.commit(B, 5)
    order = [C, A, B]
    assert ledger.draft is not None
    assert ledger.slots_of(order) == ledger.draft.slots_of(order) == [ledger.slot(name) for name in order]
    assert ledger.lengths_of(order) == [0, 0, 5]


def test_a_batch_is_committed_in_both_managers(ledger: KvLedger) -> None:
    ledger.commit_all([A, B], [3, 7])
    assert ledger.draft is not None
    assert [ledger.length(name) for name in (A, B, C)] == [3, 7, 0]
    assert [ledger.draft.length(name) for name in (A, B, C)] == [3, 7, 0]
    ledger.check()


def test_one_request_that_cannot_be_committed_holds_back_the_whole_batch(ledger: KvLedger) -> None:
    with pytest.raises(CommitRefused):
        ledger.commit_all([A, B], [3, 99])
    with pytest.raises(UnknownRequest):
        ledger.commit_all([A, RequestId("stranger")], [3, 1])
    ledger.release_index_slot(B)
    with pytest.raises(SlotReleased):
        ledger.commit_all([A, B], [3, 3])
    assert ledger.lengths_of([A, B, C]) == [0, 0, 0]
    with pytest.raises(SlotReleased):
        ledger.slots_of([A, B])
