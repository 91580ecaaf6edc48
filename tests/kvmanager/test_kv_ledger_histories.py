"""Random histories of the ledger against a brute-force model, with `check()` after every step.

The model is plain sets and dicts: which pages each request and each transfer owns, which slot each live
request has. It predicts what each call raises; a call that raises must leave everything as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmanager.errors import (
    CommitRefused,
    LeaseExists,
    LeaseExpired,
    PoolExhausted,
    RequestExists,
    SlotReleased,
    SlotsExhausted,
    TooLong,
    UnknownLease,
    UnknownRequest,
)
from kvmanager.ids import RequestId, SlotId, TransferId
from kvmanager.layout import KvGeometry
from kvmanager.ledger import KvLedger, RequestPages
from kvmanager.manager import DraftKvManager, TargetKvManager

MAX_BATCH = 3
MAX_SEQ_LEN = 24
LOOKAHEAD = 3
REQUESTS = [RequestId(f"r{n}") for n in range(6)]
TRANSFERS = [TransferId(f"t{n}") for n in range(4)]
requests = st.sampled_from(REQUESTS)
transfers = st.sampled_from(TRANSFERS)


@dataclass
class ModelRequest:
    slot: SlotId | None
    pages: RequestPages
    length: int
    capacity: int


@dataclass
class ModelLease:
    pages: RequestPages
    deadline_s: float
    expired: bool = False


class LedgerHistory(RuleBasedStateMachine):
    @initialize(
        with_draft=st.sampled_from([True, True, True, False]),
        num_target_pages=st.integers(2, 22),
        num_draft_pages=st.integers(2, 26),
    )
    def start(self, with_draft: bool, num_target_pages: int, num_draft_pages: int) -> None:
        self.page_sizes = (4, 3) if with_draft else (4,)
        self.num_pages = (num_target_pages, num_draft_pages) if with_draft else (num_target_pages,)
        self.ledger = KvLedger(
            target=KvGeometry(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, element_bytes=2),
            draft=KvGeometry(num_layers=1, num_kv_heads=1, head_dim=4, page_size=3, element_bytes=2)
            if with_draft
            else None,
            num_target_pages=num_target_pages,
            num_draft_pages=num_draft_pages if with_draft else 0,
            max_batch=MAX_BATCH,
            max_seq_len=MAX_SEQ_LEN,
            lookahead=LOOKAHEAD,
        )
        self.baseline = self.ledger.usage()
        self.live: dict[RequestId, ModelRequest] = {}
        self.leases: dict[TransferId, ModelLease] = {}
        self.now_s = 0.0

    # The model

    def used(self, pool: int) -> set[int]:
        held = [held.pages for held in self.live.values()] + [lease.pages for lease in self.leases.values()]
        return {page for pages in held for page in pages_in(pages, pool)}

    def need(self, num_tokens: int, pool: int) -> int:
        return -(-(num_tokens + LOOKAHEAD) // self.page_sizes[pool])

    def bound_slots(self) -> set[SlotId]:
        return {held.slot for held in self.live.values() if held.slot is not None}

    def refusal_of_reserve(self, request: RequestId, num_tokens: int) -> tuple[type[Exception], ...]:
        pools = range(len(self.page_sizes))
        if num_tokens > MAX_SEQ_LEN:
            return (TooLong,)
        if any(self.need(num_tokens, pool) > self.num_pages[pool] - 1 for pool in pools):
            return (TooLong,)
        if request in self.live:
            return (RequestExists,)
        if len(self.bound_slots()) == MAX_BATCH:
            return (SlotsExhausted,)
        if any(self.need(num_tokens, p) > self.num_pages[p] - 1 - len(self.used(p)) for p in pools):
            return (PoolExhausted,)
        return ()

    @contextmanager
    def refused(self, *errors: type[Exception]) -> Iterator[None]:
        before = self.ledger.usage()
        with pytest.raises(errors) as caught:
            yield
        assert type(caught.value) in errors
        assert self.ledger.usage() == before

    def reserved(self, request: RequestId, num_tokens: int) -> None:
        """Compare a new reservation with the model, then add it."""
        pages = self.ledger.pages(request)
        for pool in range(len(self.page_sizes)):
            mine = pages_in(pages, pool)
            assert len(mine) == self.need(num_tokens, pool)
            assert list(mine) == sorted(set(mine))
            assert not set(mine) & self.used(pool), "a page is owned twice"
            assert set(mine) <= set(range(1, self.num_pages[pool]))
        slot = self.ledger.slot(request)
        assert slot not in self.bound_slots()
        self.live[request] = ModelRequest(slot, pages, length=0, capacity=num_tokens + LOOKAHEAD)

    # What may happen, in any order

    @rule(request=requests, num_tokens=st.integers(1, MAX_SEQ_LEN + 1))
    def reserve(self, request: RequestId, num_tokens: int) -> None:
        errors = self.refusal_of_reserve(request, num_tokens)
        if errors:
            with self.refused(*errors):
                self.ledger.reserve(request, num_tokens)
            return
        slot = self.ledger.reserve(request, num_tokens)
        self.reserved(request, num_tokens)
        assert slot == self.live[request].slot

    @rule(request=requests, num_tokens=st.integers(1, 8))
    def a_block_fails_after_reserving(self, request: RequestId, num_tokens: int) -> None:
        if self.refusal_of_reserve(request, num_tokens):
            return
        with self.refused(ZeroDivisionError), self.ledger.reserving(request, num_tokens):
            raise ZeroDivisionError

    @rule(request=requests, num_tokens=st.integers(1, MAX_SEQ_LEN + 1))
    def grow(self, request: RequestId, num_tokens: int) -> None:
        pools = range(len(self.page_sizes))
        held = self.live.get(request)
        if num_tokens > MAX_SEQ_LEN or any(
            self.need(num_tokens, pool) > self.num_pages[pool] - 1 for pool in pools
        ):
            with self.refused(TooLong):
                self.ledger.grow(request, num_tokens)
        elif held is None:
            with self.refused(UnknownRequest):
                self.ledger.grow(request, num_tokens)
        elif held.slot is None:
            with self.refused(SlotReleased):
                self.ledger.grow(request, num_tokens)
        elif any(
            self.need(num_tokens, p) - len(pages_in(held.pages, p))
            > self.num_pages[p] - 1 - len(self.used(p))
            for p in pools
        ):
            with self.refused(PoolExhausted):
                self.ledger.grow(request, num_tokens)
            assert self.ledger.pages(request) == held.pages
        else:
            used = [self.used(pool) for pool in pools]
            self.ledger.grow(request, num_tokens)
            pages = self.ledger.pages(request)
            for pool in pools:
                before, after = pages_in(held.pages, pool), pages_in(pages, pool)
                assert after[: len(before)] == before
                assert len(after) == max(len(before), self.need(num_tokens, pool))
                assert not set(after[len(before) :]) & used[pool], "a page is owned twice"
            held.pages, held.capacity = pages, max(held.capacity, num_tokens + LOOKAHEAD)

    @rule(request=requests, length=st.integers(-1, MAX_SEQ_LEN + LOOKAHEAD + 1))
    def commit(self, request: RequestId, length: int) -> None:
        held = self.live.get(request)
        if held is None:
            with self.refused(UnknownRequest):
                self.ledger.commit(request, length)
        elif not held.length <= length <= held.capacity:
            with self.refused(CommitRefused):
                self.ledger.commit(request, length)
        elif held.slot is None:
            with self.refused(SlotReleased):
                self.ledger.commit(request, length)
        else:
            self.ledger.commit(request, length)
            held.length = length

    @rule(request=requests, transfer=transfers, ttl_s=st.integers(1, 5))
    def lease(self, request: RequestId, transfer: TransferId, ttl_s: int) -> None:
        held = self.live.get(request)
        if held is None:
            with self.refused(UnknownRequest):
                self.ledger.lease(request, transfer, self.now_s + ttl_s)
        elif transfer in self.leases:
            with self.refused(LeaseExists):
                self.ledger.lease(request, transfer, self.now_s + ttl_s)
        else:
            self.ledger.lease(request, transfer, self.now_s + ttl_s)
            self.leases[transfer] = ModelLease(held.pages, self.now_s + ttl_s)

    @rule(transfer=transfers, ttl_s=st.integers(0, 5))
    def renew(self, transfer: TransferId, ttl_s: int) -> None:
        lease = self.leases.get(transfer)
        if lease is None:
            with self.refused(UnknownLease):
                self.ledger.renew_lease(transfer, self.now_s + ttl_s)
        elif lease.expired:
            with self.refused(LeaseExpired):
                self.ledger.renew_lease(transfer, self.now_s + ttl_s)
        else:
            self.ledger.renew_lease(transfer, self.now_s + ttl_s)
            lease.deadline_s = self.now_s + ttl_s

    @rule(passed_s=st.integers(0, 3))
    def time_passes(self, passed_s: int) -> None:
        self.now_s += passed_s
        before = self.ledger.usage()
        due = {t for t, lease in self.leases.items() if not lease.expired and lease.deadline_s <= self.now_s}
        named = self.ledger.expire_leases(self.now_s)
        assert len(named) == len(due)
        assert set(named) == due
        assert self.ledger.usage() == before, "an expired lease pins until its transfer is terminal"
        for transfer in due:
            self.leases[transfer].expired = True

    @rule(transfer=transfers)
    def end_lease(self, transfer: TransferId) -> None:
        self.ledger.end_lease(transfer)
        self.leases.pop(transfer, None)

    @rule(request=requests)
    def release_index_slot(self, request: RequestId) -> None:
        self.ledger.release_index_slot(request)
        if request in self.live:
            self.live[request].slot = None

    @rule(request=requests)
    def free(self, request: RequestId) -> None:
        self.ledger.free(request)
        self.live.pop(request, None)

    @precondition(lambda self: not self.live and not self.leases)
    @rule(num_tokens=st.integers(1, 12), in_flight=st.integers(0, 1))
    def ten_batches_pass_through_a_context_worker(self, num_tokens: int, in_flight: int) -> None:
        if self.refusal_of_reserve(REQUESTS[0], num_tokens):
            return
        flying: list[TransferId] = []
        for n in range(10 * MAX_BATCH):
            request, transfer = RequestId(f"passing {n}"), TransferId(f"passing {n}")
            try:
                self.ledger.reserve(request, num_tokens)
            except PoolExhausted:
                self.ledger.end_lease(flying.pop(0))
                self.ledger.reserve(request, num_tokens)
            self.ledger.commit(request, num_tokens)
            self.ledger.lease(request, transfer)
            self.ledger.release_index_slot(request)
            self.ledger.free(request)
            flying.append(transfer)
            if len(flying) > in_flight:
                self.ledger.end_lease(flying.pop(0))
            self.ledger.check()
        for transfer in flying:
            self.ledger.end_lease(transfer)
        assert self.ledger.usage() == self.baseline

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for request in REQUESTS:
            self.ledger.free(request)
        for transfer in TRANSFERS:
            self.ledger.end_lease(transfer)
        self.ledger.check()
        assert self.ledger.usage() == self.baseline

    # What is true after every step

    @invariant()
    def the_books_are_in_order(self) -> None:
        self.ledger.check()

    @invariant()
    def counts_equal_the_model(self) -> None:
        usage = self.ledger.usage()
        in_use = (usage.target_pages_in_use, usage.draft_pages_in_use)
        free = (usage.target_pages_free, usage.draft_pages_free)
        for pool, num_pages in enumerate(self.num_pages):
            assert in_use[pool] == len(self.used(pool))
            assert free[pool] == num_pages - 1 - len(self.used(pool))
        assert usage.requests == len(self.live)
        assert usage.leases == len(self.leases)
        assert usage.slots_in_use == len(self.bound_slots())
        assert usage.slots_free == MAX_BATCH - len(self.bound_slots())
        assert usage.draft_slots_in_use == (len(self.bound_slots()) if self.ledger.draft is not None else 0)

    @invariant()
    def no_live_request_is_on_the_dummy_slot_and_both_managers_agree(self) -> None:
        managers: list[TargetKvManager | DraftKvManager] = [self.ledger.target]
        if self.ledger.draft is not None:
            managers.append(self.ledger.draft)
        for pool, manager in enumerate(managers):
            expected = [[0] * manager.page_table.shape[1] for _ in range(MAX_BATCH + 1)]
            for request, held in self.live.items():
                assert self.ledger.pages(request) == held.pages
                assert manager.length(request) == self.ledger.length(request) == held.length
                if held.slot is None:
                    with pytest.raises(SlotReleased):
                        manager.slot(request)
                    continue
                assert manager.slot(request) == self.ledger.slot(request) == held.slot
                assert held.slot != self.ledger.dummy_slot
                mine = pages_in(held.pages, pool)
                expected[held.slot][: len(mine)] = mine
            assert manager.page_table.tolist() == expected


def pages_in(pages: RequestPages, pool: int) -> tuple[int, ...]:
    return (pages.target, pages.draft)[pool]


TestLedgerHistory = LedgerHistory.TestCase
TestLedgerHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
