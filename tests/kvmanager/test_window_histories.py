"""Random histories of a drafter that keeps a window, against a model that counts positions one by one.

The model knows nothing of rows or of what slides: of each request it says which positions are still read, and from
them which pages there are. Target pages, prefix hits and leases are part of the histories, because each of them may
hold on to a page that the window has left.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvmanager.errors import PoolExhausted, SlotsExhausted
from kvmanager.ids import PageId, PageKey, RequestId, SlotId, TransferId
from kvmanager.layout import KvGeometry
from kvmanager.ledger import KvLedger
from kvmanager.manager import DraftKvManager

MAX_BATCH, MAX_SEQ_LEN, PAGE = 3, 32, 4
REQUESTS = [RequestId(f"r{n}") for n in range(5)]
TRANSFERS = [TransferId(f"t{n}") for n in range(3)]
TEXTS = [[PageKey(f"{text}{page}".encode()) for page in range(MAX_SEQ_LEN // PAGE)] for text in "ab"]


@dataclass
class ModelRequest:
    keys: list[PageKey]
    prompt: int
    capacity: int
    length: int
    pages: dict[int, PageId]  # the drafter's, by the page's place in the request
    slot: SlotId | None


class WindowHistory(RuleBasedStateMachine):
    @initialize(window=st.integers(1, 11), lookahead=st.integers(1, 5), draft_pages=st.integers(8, 22))
    def start(self, window: int, lookahead: int, draft_pages: int) -> None:
        self.window, self.lookahead, self.num_draft_pages = window, lookahead, draft_pages
        self.ledger = KvLedger(
            target=KvGeometry(num_layers=2, num_kv_heads=1, head_dim=4, page_size=PAGE, element_bytes=2),
            draft=KvGeometry(1, 1, 4, PAGE, 2, window),
            num_target_pages=26,
            num_draft_pages=draft_pages,
            max_batch=MAX_BATCH,
            max_seq_len=MAX_SEQ_LEN,
            lookahead=lookahead,
            prefix_cache=True,
        )
        draft = self.ledger.draft
        assert isinstance(draft, DraftKvManager)
        self.draft = draft
        self.live: dict[RequestId, ModelRequest] = {}
        self.leases: dict[TransferId, frozenset[PageId]] = {}
        self.baseline = self.ledger.usage()

    # The model

    def places(self, prompt: int, length: int, capacity: int) -> list[int]:
        """Pages of the positions that are or will be read, as many as any window and its look-ahead can touch."""
        read_from = max(prompt - self.window, length - self.window, 0)
        touched = max(
            len({(start + ahead) // PAGE for ahead in range(self.window + self.lookahead)})
            for start in range(PAGE)
        )
        return sorted({position // PAGE for position in range(read_from, capacity)})[:touched]

    @property
    def owned(self) -> set[PageId]:
        mine = {page for held in self.live.values() for page in held.pages.values()}
        return mine.union(*self.leases.values())

    @property
    def num_free(self) -> int:
        return self.num_draft_pages - 1 - len(self.owned)

    def look(self, request: RequestId) -> None:
        """What the ledger says of a request now, place by place; pages that stay are the same as before."""
        held = self.live[request]
        places = self.places(held.prompt, held.length, held.capacity)
        assert self.draft.first_positions_of([request]) == [places[0] * PAGE]
        now = dict(zip(places, self.ledger.pages(request).draft, strict=True))
        assert all(now[place] == page for place, page in held.pages.items() if place in now)
        others = {page for other, o in self.live.items() if other != request for page in o.pages.values()}
        taken = {page for place, page in now.items() if place not in held.pages}
        assert not taken & others.union(*self.leases.values()), "a page is owned twice"
        held.pages = now

    # What may happen, in any order

    @rule(
        request=st.sampled_from(REQUESTS),
        prompt=st.integers(1, MAX_SEQ_LEN - 1),
        more=st.integers(1, 12),
        text=st.sampled_from(TEXTS),
    )
    def reserve(self, request: RequestId, prompt: int, more: int, text: list[PageKey]) -> None:
        if request in self.live:
            return
        num_tokens = min(prompt + more, MAX_SEQ_LEN)
        capacity = num_tokens + self.lookahead
        places = self.places(prompt, 0, capacity)
        cached = self.ledger.num_cached(text)
        before = self.ledger.usage()
        try:
            slot = self.ledger.reserve(request, num_tokens, text, num_prompt_tokens=prompt)
        except (PoolExhausted, SlotsExhausted) as error:
            assert self.ledger.usage() == before
            if isinstance(error, PoolExhausted) and error.pool == "draft":
                assert len(places) > self.num_free
            return
        assert len(places) <= self.num_free
        length = self.ledger.length(request)
        assert length == min(cached, max(prompt - self.window, 0) // PAGE) * PAGE, (
            "a hit in the window, or none before"
        )
        self.live[request] = ModelRequest(text, prompt, capacity, length, {}, slot)
        self.look(request)

    @rule(request=st.sampled_from(REQUESTS), more=st.integers(0, 20))
    def commit(self, request: RequestId, more: int) -> None:
        held = self.live.get(request)
        if held is None or held.slot is None:
            return
        length = min(held.length + more, held.capacity)
        after = self.places(held.prompt, length, held.capacity)
        leaving = {page for place, page in held.pages.items() if place not in after}
        returning = leaving - set().union(*self.leases.values())
        if len(set(after) - held.pages.keys()) > self.num_free + len(returning):
            with pytest.raises(PoolExhausted):
                self.ledger.commit(request, length)
            assert self.ledger.length(request) == held.length
        else:
            self.ledger.commit(request, length)
            held.length = length
        self.look(request)

    @rule(request=st.sampled_from(REQUESTS), more=st.integers(1, 8))
    def grow(self, request: RequestId, more: int) -> None:
        held = self.live.get(request)
        if held is None or held.slot is None:
            return
        num_tokens = min(held.capacity - self.lookahead + more, MAX_SEQ_LEN)
        try:
            self.ledger.grow(request, num_tokens)
        except PoolExhausted:
            self.look(request)
            return
        held.capacity = max(held.capacity, num_tokens + self.lookahead)
        self.look(request)

    @rule(request=st.sampled_from(REQUESTS), count=st.integers(1, 8))
    def remember(self, request: RequestId, count: int) -> None:
        if request in self.live:
            self.ledger.remember(request, self.live[request].keys[:count])

    @rule(request=st.sampled_from(REQUESTS), transfer=st.sampled_from(TRANSFERS))
    def lease(self, request: RequestId, transfer: TransferId) -> None:
        if request in self.live and transfer not in self.leases:
            self.ledger.lease(request, transfer)
            self.leases[transfer] = frozenset(self.live[request].pages.values())

    @rule(transfer=st.sampled_from(TRANSFERS))
    def end_lease(self, transfer: TransferId) -> None:
        self.ledger.end_lease(transfer)
        self.leases.pop(transfer, None)

    @rule(request=st.sampled_from(REQUESTS))
    def release_index_slot(self, request: RequestId) -> None:
        self.ledger.release_index_slot(request)
        if request in self.live:
            self.live[request].slot = None

    @rule(request=st.sampled_from(REQUESTS))
    def free(self, request: RequestId) -> None:
        self.ledger.free(request)
        self.live.pop(request, None)

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
        assert self.ledger.usage().draft_pages_in_use == len(self.owned)
        assert self.ledger.usage().draft_pages_free == self.num_free

    @invariant()
    def every_position_that_the_next_step_reads_or_writes_has_a_page(self) -> None:
        for held in self.live.values():
            first = max(held.prompt - self.window, held.length - self.window, 0)
            end = min(max(held.length, held.prompt) + self.lookahead, held.capacity)
            assert {position // PAGE for position in range(first, end)} <= held.pages.keys()

    @invariant()
    def both_managers_agree_on_slots_and_no_live_request_is_on_the_dummy_slot(self) -> None:
        for request, held in self.live.items():
            if held.slot is None:
                continue
            assert self.draft.slot(request) == self.ledger.target.slot(request) == held.slot
            assert held.slot != self.ledger.dummy_slot
            row = self.draft.page_table[held.slot].tolist()
            mine = list(held.pages.values())
            assert row == mine + [0] * (len(row) - len(mine))


TestWindowHistory = WindowHistory.TestCase
TestWindowHistory.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
