"""The ledger's promises, one sentence each, and the cases that broke other systems."""

from __future__ import annotations

import pytest

from kvmanager.errors import (
    CommitRefused,
    InvalidCount,
    KvError,
    LeaseExists,
    LedgerCorrupt,
    PoolExhausted,
    RequestExists,
    SlotReleased,
    SlotsExhausted,
    TooLong,
    UnknownRequest,
)
from kvmanager.ids import PageId, RequestId, TransferId, TransferOwner
from kvmanager.layout import KvGeometry
from kvmanager.ledger import KvLedger, RequestPages
from kvmanager.manager import DraftKvManager

TARGET = KvGeometry(num_layers=3, num_kv_heads=2, head_dim=8, page_size=4, element_bytes=4)
DRAFT = KvGeometry(num_layers=1, num_kv_heads=2, head_dim=8, page_size=4, element_bytes=4)
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
T, U = TransferId("t"), TransferId("u")


def ledger_of(
    *,
    target_pages: int = 41,
    draft_pages: int = 41,
    max_batch: int = 4,
    max_seq_len: int = 64,
    lookahead: int = 0,
    draft: KvGeometry | None = DRAFT,
) -> KvLedger:
    return KvLedger(
        target=TARGET,
        draft=draft,
        num_target_pages=target_pages,
        num_draft_pages=draft_pages if draft is not None else 0,
        max_batch=max_batch,
        max_seq_len=max_seq_len,
        lookahead=lookahead,
    )


def drafter_of(ledger: KvLedger) -> DraftKvManager:
    assert isinstance(ledger.draft, DraftKvManager)
    return ledger.draft


# Reserving


def test_a_reservation_binds_one_slot_in_both_managers_and_fills_both_rows() -> None:
    ledger = ledger_of()
    ledger.reserve(A, 4)
    slot = ledger.reserve(B, 10)
    pages = ledger.pages(B)
    assert drafter_of(ledger).slot(B) == ledger.target.slot(B) == slot
    assert ledger.target.page_table[slot, :4].tolist() == [*pages.target, 0]
    assert drafter_of(ledger).page_table[slot, :4].tolist() == [*pages.draft, 0]
    ledger.check()


@pytest.mark.parametrize(
    ("num_tokens", "lookahead", "num_pages"), [(4, 0, 1), (4, 1, 2), (5, 3, 2), (5, 4, 3)]
)
def test_a_reservation_takes_the_look_ahead_pages_too(
    num_tokens: int, lookahead: int, num_pages: int
) -> None:
    ledger = ledger_of(lookahead=lookahead)
    ledger.reserve(A, num_tokens)
    assert len(ledger.pages(A).target) == len(ledger.pages(A).draft) == num_pages


def test_a_full_length_request_with_look_ahead_fits_its_row() -> None:
    ledger = ledger_of(max_seq_len=61, lookahead=7)
    slot = ledger.reserve(A, 61)
    assert ledger.target.page_table[slot].all()
    assert ledger.target.page_table.shape == (5, 17)


def test_a_target_without_a_drafter_keeps_books_alone() -> None:
    ledger = ledger_of(draft=None)
    ledger.reserve(A, 10)
    assert ledger.pages(A) == RequestPages(target=(PageId(1), PageId(2), PageId(3)), draft=())
    ledger.lease(A, T)
    ledger.free(A)
    ledger.end_lease(T)
    assert ledger.usage().target_pages_in_use == 0
    ledger.check()


def test_draft_pages_without_a_drafter_are_refused() -> None:
    with pytest.raises(ValueError, match="5 draft pages were asked for, but there is no draft pool"):
        KvLedger(
            target=TARGET,
            draft=None,
            num_target_pages=9,
            num_draft_pages=5,
            max_batch=1,
            max_seq_len=8,
            lookahead=0,
        )


def test_reserving_the_same_request_twice_is_refused_and_keeps_the_first() -> None:
    ledger = ledger_of()
    slot = ledger.reserve(A, 10)
    pages = ledger.pages(A)
    with pytest.raises(RequestExists):
        ledger.reserve(A, 4)
    ledger.release_index_slot(A)
    with pytest.raises(RequestExists):  # its pages are still here
        ledger.reserve(A, 4)
    assert ledger.pages(A) == pages
    assert slot == 0
    ledger.check()


@pytest.mark.parametrize(
    ("target_pages", "draft_pages", "pool"), [(8, 41, "target"), (41, 8, "draft")], ids=["target", "draft"]
)
def test_a_pool_that_is_short_refuses_and_leaves_nothing_behind(
    target_pages: int, draft_pages: int, pool: str
) -> None:
    ledger = ledger_of(target_pages=target_pages, draft_pages=draft_pages, max_seq_len=24)
    ledger.reserve(A, 16)
    before = ledger.usage()
    with pytest.raises(PoolExhausted, match=f"the {pool} pool has 3 free pages, 4 are needed"):
        ledger.reserve(B, 16)
    assert ledger.usage() == before
    with pytest.raises(UnknownRequest):
        ledger.pages(B)
    ledger.check()
    ledger.reserve(B, 12)  # what is left can still be had


def test_no_free_slot_refuses_and_leaves_nothing_behind() -> None:
    ledger = ledger_of(max_batch=2)
    ledger.reserve(A, 4)
    ledger.reserve(B, 4)
    before = ledger.usage()
    with pytest.raises(SlotsExhausted):
        ledger.reserve(C, 4)
    assert ledger.usage() == before
    ledger.check()


def test_an_interrupt_between_the_two_managers_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = ledger_of()
    before = ledger.usage()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ledger.draft, "bind", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.reserve(A, 10)
    assert ledger.usage() == before
    ledger.check()


def test_a_failing_block_gives_its_reservation_back() -> None:
    ledger = ledger_of()
    before = ledger.usage()
    with pytest.raises(RuntimeError), ledger.reserving(A, 10):
        raise RuntimeError("prefill failed")
    assert ledger.usage() == before
    with ledger.reserving(A, 10) as slot:
        pass
    assert ledger.slot(A) == slot
    ledger.check()


def test_asking_for_no_tokens_is_refused() -> None:
    with pytest.raises(InvalidCount, match="num_tokens is 0"):
        ledger_of().reserve(A, 0)


# Lengths


def test_draft_context_length_equals_target_length_after_every_commit() -> None:
    ledger = ledger_of(lookahead=4)
    ledger.reserve(A, 12)
    for length in (0, 5, 5, 9, 12):
        ledger.commit(A, length)
        assert ledger.length(A) == ledger.target.length(A) == drafter_of(ledger).length(A) == length
        ledger.check()


@pytest.mark.parametrize("length", [4, 17, -1])
def test_a_length_that_shrinks_or_passes_the_reservation_is_refused_and_changes_neither_side(
    length: int,
) -> None:
    ledger = ledger_of(lookahead=4)
    ledger.reserve(A, 12)
    ledger.commit(A, 5)
    with pytest.raises(CommitRefused, match=f"cannot commit length {length}: it has 5 and reserved 16"):
        ledger.commit(A, length)
    assert ledger.length(A) == drafter_of(ledger).length(A) == 5
    ledger.check()


def test_a_request_without_a_slot_cannot_commit_for_no_step_may_run_it() -> None:
    ledger = ledger_of()
    ledger.reserve(A, 12)
    ledger.commit(A, 12)
    ledger.release_index_slot(A)
    with pytest.raises(SlotReleased, match="'a' has released its slot"):
        ledger.commit(A, 12)
    assert ledger.length(A) == 12


def test_a_stranger_has_no_slot_no_pages_and_no_length() -> None:
    ledger = ledger_of()
    for ask in (ledger.slot, ledger.pages, ledger.length):
        with pytest.raises(UnknownRequest):
            ask(C)
    with pytest.raises(UnknownRequest):
        ledger.commit(C, 1)
    with pytest.raises(UnknownRequest):
        ledger.lease(C, T)
    assert ledger.usage().leases == 0
    ledger.check()


# Letting go


def test_releasing_the_slot_keeps_the_pages_and_detaches_both_rows() -> None:
    ledger = ledger_of()
    slot = ledger.reserve(A, 10)
    pages = ledger.pages(A)
    ledger.release_index_slot(A)
    assert ledger.pages(A) == pages
    assert not ledger.target.page_table[slot].any()
    assert not drafter_of(ledger).page_table[slot].any()
    assert ledger.usage().slots_in_use == ledger.usage().draft_slots_in_use == 0
    assert ledger.usage().target_pages_in_use == 3
    with pytest.raises(SlotReleased):
        ledger.slot(A)
    ledger.check()


def test_releasing_a_slot_twice_does_not_take_it_from_its_next_holder() -> None:
    ledger = ledger_of(max_batch=1)
    ledger.reserve(A, 10)
    ledger.release_index_slot(A)
    ledger.reserve(B, 10)
    ledger.release_index_slot(A)
    assert ledger.slot(B) == 0
    assert drafter_of(ledger).slot(B) == 0
    ledger.check()


def test_freeing_twice_frees_the_pages_once() -> None:
    ledger = ledger_of()
    ledger.reserve(A, 10)
    ledger.free(A)
    ledger.reserve(B, 10)  # in the pages that A had
    ledger.free(A)
    assert ledger.usage().target_pages_in_use == ledger.usage().draft_pages_in_use == 3
    ledger.check()


def test_letting_go_of_strangers_changes_nothing() -> None:
    ledger = ledger_of()
    ledger.reserve(A, 10)
    ledger.lease(A, T)
    before = ledger.usage()
    ledger.release_index_slot(C)
    ledger.free(C)
    ledger.end_lease(U)
    assert ledger.usage() == before
    ledger.check()


def test_a_transfer_takes_one_lease_and_a_second_one_leaves_the_first_as_it_is() -> None:
    ledger = ledger_of()
    ledger.reserve(A, 10)
    ledger.reserve(B, 10)
    ledger.lease(A, T)
    with pytest.raises(LeaseExists):
        ledger.lease(B, T)
    ledger.free(A)
    ledger.free(B)
    assert ledger.usage().target_pages_in_use == 3
    ledger.end_lease(T)
    assert ledger.usage().target_pages_in_use == 0
    ledger.check()


def test_an_interrupt_while_leasing_leaves_no_half_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = ledger_of()
    ledger.reserve(A, 10)
    before = ledger.usage()

    def interrupted(request: RequestId, transfer: TransferId) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ledger.draft, "lease", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.lease(A, T)
    assert ledger.usage() == before
    ledger.check()
    ledger.lease(A, T)
    ledger.check()


def test_a_freed_id_can_be_reserved_again_while_its_old_transfer_still_reads() -> None:
    ledger = ledger_of()
    ledger.reserve(A, 10)
    old = ledger.pages(A)
    ledger.lease(A, T)
    ledger.free(A)
    ledger.reserve(A, 10)
    assert not set(ledger.pages(A).target) & set(old.target)
    assert not set(ledger.pages(A).draft) & set(old.draft)
    ledger.end_lease(T)
    assert ledger.usage().target_pages_in_use == 3
    ledger.check()


# Cases that broke other systems


def test_s34_pages_of_a_finished_request_are_pinned_until_they_are_sent() -> None:
    """S34: a small context pool, many distinct prompts, a slow sender. No page is reused unsent."""
    ledger = ledger_of(target_pages=7, draft_pages=7, max_batch=2, max_seq_len=24)
    unsent: dict[TransferId, RequestPages] = {}
    waiting = [(RequestId(f"prompt {n}"), TransferId(f"send {n}")) for n in range(12)]
    refusals = 0
    while waiting:
        request, transfer = waiting[0]
        try:
            ledger.reserve(request, 12)
        except PoolExhausted:
            refusals += 1
            oldest = next(iter(unsent))  # the slow sender gets one done
            del unsent[oldest]
            ledger.end_lease(oldest)
            ledger.check()
            continue
        waiting.pop(0)
        pages = ledger.pages(request)
        for sent_later in unsent.values():
            assert not set(pages.target) & set(sent_later.target)
            assert not set(pages.draft) & set(sent_later.draft)
        ledger.commit(request, 12)
        ledger.lease(request, transfer)
        ledger.release_index_slot(request)
        ledger.free(request)
        unsent[transfer] = pages
        ledger.check()
    assert refusals == 10  # the pool holds two prompts, so each of the others had to wait for one send
    for transfer in unsent:
        ledger.end_lease(transfer)
    assert ledger.usage() == ledger_of(target_pages=7, draft_pages=7, max_batch=2, max_seq_len=24).usage()


def test_s35_a_request_freed_while_its_transfer_still_reads_keeps_its_pages_until_the_transfer_ends() -> None:
    """S35: the end of the request is not the end of the transfer."""
    ledger = ledger_of(target_pages=7, draft_pages=7)
    ledger.reserve(A, 12)
    pages = ledger.pages(A)
    ledger.commit(A, 12)
    ledger.lease(A, T, deadline_s=30.0)
    ledger.free(A)
    ledger.check()
    assert ledger.target.pool.pages_of(TransferOwner(T)) == pages.target
    assert drafter_of(ledger).pool.pages_of(TransferOwner(T)) == pages.draft
    with pytest.raises(PoolExhausted):
        ledger.reserve(B, 16)
    assert ledger.expire_leases(31.0) == [T]  # to be aborted by the sender, who may still have a write posted
    assert ledger.usage().target_pages_in_use == 3
    ledger.end_lease(T)
    ledger.end_lease(T)
    ledger.reserve(B, 16)
    ledger.check()


@pytest.mark.parametrize(
    ("target_pages", "draft_pages", "limit"),
    [
        (6, 41, "the size of the target pool is 5"),
        (41, 6, "the size of the draft pool is 5"),
        (41, 41, "max_seq_len is 24"),
    ],
)
def test_s41_a_request_that_can_never_fit_is_refused_at_once_naming_the_limit_while_others_go_on(
    target_pages: int, draft_pages: int, limit: str
) -> None:
    """S41: larger than the pool but shorter than max_seq_len must not queue for ever."""
    ledger = ledger_of(target_pages=target_pages, draft_pages=draft_pages, max_seq_len=24, lookahead=2)
    ledger.can_ever_fit(18)  # 18 + 2 positions are 5 pages
    too_long = 19 if "pool" in limit else 25
    before = ledger.usage()
    for ask in (lambda: ledger.can_ever_fit(too_long), lambda: ledger.reserve(A, too_long)):
        with pytest.raises(TooLong, match=limit) as refused:
            ask()
        assert refused.value.num_tokens == too_long
    assert ledger.usage() == before
    ledger.reserve(B, 18)
    # Full now is not "never": the answer does not depend on what is in use.
    ledger.can_ever_fit(18)
    ledger.check()


def test_s59_eight_concurrent_requests_have_eight_distinct_slots_the_same_in_both_managers() -> None:
    """S59: a draft manager that assigned no slots put all requests on the dummy slot, and only AL fell."""
    ledger = ledger_of(max_batch=8, lookahead=4)
    requests = [RequestId(f"request {n}") for n in range(8)]
    slots = [ledger.reserve(request, 8) for request in requests]
    assert sorted(slots) == list(range(8))
    assert ledger.dummy_slot == 8
    for request, slot in zip(requests, slots, strict=True):
        assert ledger.slot(request) == ledger.target.slot(request) == drafter_of(ledger).slot(request) == slot
        row = drafter_of(ledger).page_table[slot]
        assert row[:3].tolist() == list(ledger.pages(request).draft)
        assert row[:3].all()
    rows = drafter_of(ledger).page_table[:8, :3]
    assert len(set(rows.ravel().tolist())) == 24
    assert not drafter_of(ledger).page_table[ledger.dummy_slot].any()
    ledger.check()


def test_s59_ten_times_max_batch_requests_through_a_context_worker_leave_all_counts_at_their_baseline() -> (
    None
):
    """S59: a context worker that never released slots saturated after max_batch requests."""
    ledger = ledger_of(max_batch=4)
    baseline = ledger.usage()
    transfers: list[TransferId] = []
    for n in range(40):
        request, transfer = RequestId(f"request {n}"), TransferId(f"transfer {n}")
        ledger.reserve(request, 16)
        ledger.commit(request, 7)
        ledger.commit(request, 16)
        ledger.lease(request, transfer)
        ledger.release_index_slot(request)
        ledger.free(request)
        transfers.append(transfer)
        ledger.check()
        if len(transfers) == 6:  # more transfers in flight than slots
            assert ledger.usage().slots_in_use == 0
            assert ledger.usage().leases == 6
            ledger.end_lease(transfers.pop(0))
    for transfer in transfers:
        ledger.end_lease(transfer)
    assert ledger.usage() == baseline
    ledger.check()


# check() bites


def test_check_finds_a_draft_slot_that_differs_from_the_targets() -> None:
    ledger = ledger_of()
    ledger.reserve(A, 4)
    drafter = drafter_of(ledger)
    drafter.slots.release_index_slot(A)
    with pytest.raises(LedgerCorrupt, match="disagree on the slots"):
        ledger.check()


def test_check_finds_a_draft_length_that_differs_from_the_targets() -> None:
    ledger = ledger_of()
    ledger.reserve(A, 4)
    ledger.target.commit(A, 2)
    with pytest.raises(LedgerCorrupt, match="draft context length differs"):
        ledger.check()


def test_check_finds_pages_freed_under_a_live_request() -> None:
    ledger = ledger_of()
    ledger.reserve(A, 4)
    ledger.target.pool.release(ledger.target.pool.owners()[0])
    with pytest.raises(LedgerCorrupt, match="disagree on its pages"):
        ledger.check()


def test_check_finds_a_transfer_that_owns_pages_without_a_lease() -> None:
    ledger = ledger_of()
    ledger.reserve(A, 4)
    drafter_of(ledger).lease(A, T)
    with pytest.raises(LedgerCorrupt, match="draft pool's transfers differ"):
        ledger.check()


def test_every_error_has_one_root() -> None:
    ledger = ledger_of()
    with pytest.raises(KvError):
        ledger.reserve(A, 1000)
