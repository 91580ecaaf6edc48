"""The page pool against a brute-force model: sets of pages per owner and nothing else."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvmanager.errors import InvalidCount, LedgerCorrupt, PageAlreadyHeld, PageNotInUse, PoolExhausted
from kvmanager.ids import DUMMY_PAGE, Owner, PageId, RequestId, RequestOwner, TransferId, TransferOwner
from kvmanager.pool import PagePool
from kvmanager.runs import PageRun, merge_runs


def request(name: str) -> RequestOwner:
    return RequestOwner(RequestId(name))


def transfer(name: str) -> TransferOwner:
    return TransferOwner(TransferId(name))


def test_page_zero_is_never_handed_out() -> None:
    pool = PagePool(8)
    assert pool.take(7, request("a")) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.num_free == 0


def test_a_pool_of_the_dummy_page_alone_has_nothing_to_give() -> None:
    pool = PagePool(1)
    with pytest.raises(PoolExhausted, match="0 free pages, 1 are needed"):
        pool.take(1, request("a"))
    pool.check()


def test_an_exhausted_pool_says_what_is_needed_and_free_and_takes_nothing() -> None:
    pool = PagePool(8, "draft")
    pool.take(5, request("a"))
    with pytest.raises(PoolExhausted, match="the draft pool has 2 free pages, 3 are needed") as refused:
        pool.take(3, request("b"))
    assert (refused.value.need, refused.value.free) == (3, 2)
    assert pool.pages_of(request("b")) == ()
    assert pool.num_free == 2
    pool.check()


def test_pages_come_as_one_run_when_a_run_is_long_enough() -> None:
    pool = PagePool(32)
    for name in "abcd":
        pool.take(5, request(name))
    pool.release(request("b"))  # 6..10 free, and 21..31
    assert merge_runs(pool.take(8, request("e"))) == [PageRun(PageId(21), 8)]
    assert merge_runs(pool.take(5, request("f"))) == [PageRun(PageId(6), 5)]


def test_a_short_take_leaves_the_long_run_whole() -> None:
    pool = PagePool(64)
    for name in "ab":
        pool.take(3, request(name))
    pool.release(request("a"))  # 1..3 free, and 7..63
    assert pool.take(2, request("c")) == [1, 2]


def test_pages_from_several_runs_ascend_and_come_from_as_few_long_runs_as_will_do() -> None:
    pool = PagePool(20)
    for name, count in (("a", 2), ("b", 1), ("c", 6), ("d", 1), ("e", 4), ("f", 5)):
        pool.take(count, request(name))
    for name in "ace":
        pool.release(request(name))  # free: 1..2, 4..9, 11..14
    pages = pool.take(9, request("g"))
    assert pages == sorted(pages)
    assert [run.first for run in merge_runs(pages)] == [4, 11]


def test_freed_neighbours_melt_into_one_run() -> None:
    pool = PagePool(10)
    for name in "abc":
        pool.take(3, request(name))
    for name in "acb":  # the middle one last, so it touches free runs on both sides
        pool.release(request(name))
        pool.check()
    assert merge_runs(pool.take(9, request("d"))) == [PageRun(PageId(1), 9)]


def test_a_shared_page_is_freed_by_its_last_owner_only() -> None:
    pool = PagePool(8)
    pages = pool.take(3, request("a"))
    pool.share(pages[:2], transfer("t"))
    assert pool.release(request("a")) == [3]
    assert pool.num_owners(PageId(1)) == 1
    assert pool.release(transfer("t")) == [1, 2]
    assert pool.num_in_use == 0


def test_a_second_release_and_a_stranger_free_nothing() -> None:
    pool = PagePool(8)
    pool.take(3, request("a"))
    kept = pool.take(2, request("b"))
    pool.release(request("a"))
    assert pool.release(request("a")) == []
    assert pool.release(request("stranger")) == []
    assert pool.pages_of(request("b")) == tuple(kept)
    assert pool.num_free == 5
    pool.check()


def test_a_request_and_a_transfer_of_the_same_name_are_two_owners() -> None:
    pool = PagePool(8)
    pages = pool.take(2, request("x"))
    pool.share(pages, transfer("x"))
    assert pool.release(request("x")) == []
    assert pool.num_in_use == 2


def test_sharing_a_free_page_or_the_dummy_page_is_refused_and_shares_nothing() -> None:
    pool = PagePool(8)
    pages = pool.take(2, request("a"))
    for stray in (PageId(5), DUMMY_PAGE):
        with pytest.raises(PageNotInUse, match=f"page {stray} "):
            pool.share([*pages, stray], transfer("t"))
    assert pool.pages_of(transfer("t")) == ()
    pool.check()


def test_sharing_a_page_twice_with_one_owner_is_refused() -> None:
    pool = PagePool(8)
    pages = pool.take(2, request("a"))
    with pytest.raises(PageAlreadyHeld):
        pool.share([pages[0], pages[0]], transfer("t"))
    pool.share(pages, transfer("t"))
    with pytest.raises(PageAlreadyHeld):
        pool.share([pages[1]], transfer("t"))
    pool.release(request("a"))
    assert pool.release(transfer("t")) == pages
    pool.check()


def test_taking_a_negative_count_is_refused() -> None:
    with pytest.raises(InvalidCount, match="count is -1, but must be at least 0"):
        PagePool(8).take(-1, request("a"))


def test_check_finds_a_page_that_is_free_and_owned() -> None:
    pool = PagePool(8)
    pool.take(3, request("a"))
    pool._free.give(PageRun(PageId(2), 1))
    with pytest.raises(LedgerCorrupt):
        pool.check()


def test_check_finds_a_page_that_nobody_owns_and_nobody_can_take() -> None:
    pool = PagePool(8)
    pool.take(3, request("a"))
    del pool._held[request("a")]
    with pytest.raises(LedgerCorrupt, match="owner counts"):
        pool.check()


def test_an_operation_costs_the_same_in_a_pool_of_a_million_pages() -> None:
    def cost_s(num_pages: int) -> float:
        pool = PagePool(num_pages)
        for index in range(200):  # fragmented: every second reservation is given back
            pool.take(7, request(f"live {index}"))
        for index in range(0, 200, 2):
            pool.release(request(f"live {index}"))
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for index in range(50):
                pool.take(11, request(f"new {index}"))
            for index in range(50):
                pool.release(request(f"new {index}"))
            best = min(best, time.perf_counter() - start)
        return best

    assert cost_s(1_000_000) < 20 * cost_s(2_000)  # a scan would cost 500 times as much


@given(st.lists(st.integers(0, 30), unique=True))
@settings(max_examples=50, deadline=None)
def test_merged_runs_hold_the_same_pages_in_the_same_order_and_no_two_of_them_touch(
    page_ids: list[int],
) -> None:
    runs = merge_runs([PageId(page) for page in page_ids])
    assert [page for run in runs for page in run.page_ids()] == page_ids
    for before, after in pairwise(runs):
        assert before.end != after.first


OWNERS: tuple[Owner, ...] = (*map(request, "abcd"), *map(transfer, "abcd"))


class PoolHistory(RuleBasedStateMachine):
    """Any order of take, share and release. The model knows each owner's pages as a plain set."""

    @initialize(num_pages=st.integers(1, 40))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.owned: dict[Owner, set[PageId]] = {}

    def free_pages(self) -> set[int]:
        return set(range(1, self.pool.num_pages)) - {page for pages in self.owned.values() for page in pages}

    @rule(owner=st.sampled_from(OWNERS), count=st.integers(0, 12))
    def take(self, owner: Owner, count: int) -> None:
        free = self.free_pages()
        if count > len(free):
            with pytest.raises(PoolExhausted):
                self.pool.take(count, owner)
            return
        longest = max((run.count for run in merge_runs(sorted(map(PageId, free)))), default=0)
        pages = self.pool.take(count, owner)
        assert len(pages) == count
        assert set(pages) <= free
        assert pages == sorted(set(pages))
        if count and count <= longest:
            assert len(merge_runs(pages)) == 1
        if pages:
            self.owned.setdefault(owner, set()).update(pages)

    @rule(holder=st.sampled_from(OWNERS), owner=st.sampled_from(OWNERS))
    def share(self, holder: Owner, owner: Owner) -> None:
        pages = self.pool.pages_of(holder)
        if self.owned.get(owner, set()) & set(pages):
            with pytest.raises(PageAlreadyHeld):
                self.pool.share(pages, owner)
            return
        self.pool.share(pages, owner)
        if pages:
            self.owned.setdefault(owner, set()).update(pages)

    @rule(owner=st.sampled_from(OWNERS))
    def release(self, owner: Owner) -> None:
        mine = self.owned.pop(owner, set())
        others = {page for pages in self.owned.values() for page in pages}
        assert self.pool.release(owner) == sorted(mine - others)

    @invariant()
    def books_equal_the_model(self) -> None:
        self.pool.check()
        assert self.pool.num_free == len(self.free_pages())
        assert set(self.pool.owners()) == set(self.owned)
        for owner, pages in self.owned.items():
            assert set(self.pool.pages_of(owner)) == pages


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
