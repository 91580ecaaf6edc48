"""Random histories of the ledger with its prefix cache, against a model that knows what every page holds.

The model writes each page's content, its tokens and all before them, where a request commits it. A hit must
find in every pool exactly the content that its prompt would have written; a page that anyone still owns or that
the cache still names is never handed out; what is evicted is what was longest unused.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvmanager.errors import PoolExhausted, RequestExists, SlotsExhausted, TooLong
from kvmanager.ids import PageKey, RequestId, TransferId
from kvmanager.layout import KvGeometry
from kvmanager.ledger import KvLedger
from kvmanager.prefix import page_keys, shareable

PAGE = 2
MAX_SEQ_LEN = 12
REQUESTS = [RequestId(f"r{n}") for n in range(5)]
TRANSFERS = [TransferId(f"t{n}") for n in range(3)]
requests = st.sampled_from(REQUESTS)
transfers = st.sampled_from(TRANSFERS)
prompts = st.one_of(
    st.integers(1, 9).map(lambda length: [7] * length),  # beginnings in common are the point
    st.lists(st.sampled_from([7, 8]), min_size=1, max_size=9),
)
salts = st.sampled_from(["", "", "", "tenant"])

Content = tuple[str, tuple[int, ...]]
"""Salt, and the tokens up to the end of the page."""


@dataclass
class Live:
    salt: str
    tokens: list[int]
    pages: tuple[tuple[int, ...], ...]  # by pool
    length: int
    has_slot: bool = True


class PrefixHistory(RuleBasedStateMachine):
    @initialize(
        draft_kv=st.sampled_from(["mirrored", "unified"]),
        num_target_pages=st.integers(8, 24),
        num_draft_pages=st.integers(8, 24),
    )
    def start(self, draft_kv: str, num_target_pages: int, num_draft_pages: int) -> None:
        mirrored = draft_kv == "mirrored"
        self.num_pages = (num_target_pages, num_draft_pages) if mirrored else (num_target_pages,)
        geometry = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=2, page_size=PAGE, element_bytes=2)
        self.ledger = KvLedger(
            target=geometry,
            draft=geometry,
            num_target_pages=num_target_pages,
            num_draft_pages=num_draft_pages if mirrored else 0,
            max_batch=3,
            max_seq_len=MAX_SEQ_LEN,
            lookahead=1,
            draft_kv=draft_kv,  # type: ignore[arg-type]
            prefix_cache=True,
        )
        self.baseline = self.ledger.usage()
        self.live: dict[RequestId, Live] = {}
        self.leases: dict[TransferId, tuple[tuple[int, ...], ...]] = {}
        self.content: list[dict[int, Content]] = [{} for _ in self.num_pages]
        self.cached: dict[PageKey, tuple[tuple[int, ...], Content]] = {}
        self.last_used: dict[PageKey, int] = {}
        self.clock = 0

    # The model

    def owned(self, pool: int) -> set[int]:
        held = [live.pages for live in self.live.values()] + list(self.leases.values())
        return {page for pages in held for page in pages[pool]}

    def idle(self) -> dict[PageKey, tuple[int, ...]]:
        owned = self.owned(0)
        return {key: pages for key, (pages, _) in self.cached.items() if pages[0] not in owned}

    def free(self, pool: int) -> int:
        named = {pages[pool] for pages, _ in self.cached.values()}
        return self.num_pages[pool] - 1 - len(self.owned(pool) | named)

    def keys(self, tokens: list[int], salt: str) -> tuple[PageKey, ...]:
        return page_keys(tokens, PAGE, model_pair="pair", salt=salt)

    def hits(self, prefix: tuple[PageKey, ...]) -> int:
        return next((i for i, key in enumerate(prefix) if key not in self.cached), len(prefix))

    def touch(self, pages: tuple[tuple[int, ...], ...]) -> None:
        """Its owner lets go: these cached pages were used until now."""
        self.clock += 1
        for key, (own, _) in self.cached.items():
            if own[0] in pages[0]:
                self.last_used[key] = self.clock

    # What may happen, in any order

    @rule(request=requests, tokens=prompts, extra=st.integers(0, 3), salt=salts)
    def reserve(self, request: RequestId, tokens: list[int], extra: int, salt: str) -> None:
        num_tokens = len(tokens) + extra
        prefix = shareable(self.keys(tokens, salt), len(tokens), PAGE)
        hits = self.hits(prefix)
        need = -(-(num_tokens + 1) // PAGE) - hits
        idle = self.idle()
        spare = len(idle) - sum(key in idle for key in prefix[:hits])
        short = any(need > self.free(pool) + spare for pool in range(len(self.num_pages)))
        free_before = [self.free(pool) for pool in range(len(self.num_pages))]
        try:
            self.ledger.reserve(request, num_tokens, prefix)
        except TooLong:
            assert any(-(-(num_tokens + 1) // PAGE) > pages - 1 for pages in self.num_pages)
            return
        except RequestExists:
            assert request in self.live
            return
        except SlotsExhausted:
            assert sum(live.has_slot for live in self.live.values()) == 3
            return
        except PoolExhausted:
            assert short, "refused although idle pages would have made room"
            return
        assert not short
        assert request not in self.live
        assert self.ledger.length(request) == hits * PAGE
        pages = self.pages(request)
        gone = [key for key in self.cached if self.ledger.num_cached([key]) == 0]
        self.evicted(gone, idle, prefix[:hits], max(need - free for free in free_before))
        for pool, mine in enumerate(pages):
            for index in range(hits):
                end = (index + 1) * PAGE
                assert self.content[pool][mine[index]] == (salt, tuple(tokens[:end])), (
                    "a hit on other content"
                )
            fresh = set(mine[hits:])
            assert not fresh & self.owned(pool), "a page in use was handed out"
            assert not fresh & {own[pool] for own, _ in self.cached.values()}, "a cached page was handed out"
            for page in fresh:
                self.content[pool].pop(page, None)
        self.live[request] = Live(salt, tokens + [9] * extra, pages, hits * PAGE)

    def evicted(
        self,
        gone: list[PageKey],
        idle: dict[PageKey, tuple[int, ...]],
        hit: tuple[PageKey, ...],
        shortage: int,
    ) -> None:
        assert len(gone) == max(shortage, 0), "evicted more than was needed, or less"
        assert set(gone) <= set(idle) - set(hit), "a page in use was evicted"
        stay = [self.last_used[key] for key in idle if key not in gone and key not in hit]
        assert max([self.last_used[key] for key in gone], default=0) <= min(stay, default=self.clock + 1)
        for key in gone:
            del self.cached[key], self.last_used[key]

    def pages(self, request: RequestId) -> tuple[tuple[int, ...], ...]:
        held = self.ledger.pages(request)
        return (held.target, held.draft) if len(self.num_pages) == 2 else (held.target,)

    @rule(request=requests, more=st.integers(0, 9))
    def commit(self, request: RequestId, more: int) -> None:
        live = self.live.get(request)
        if live is None or not live.has_slot:
            return
        live.length = min(live.length + more, len(live.tokens))
        self.ledger.commit(request, live.length)
        for pool, mine in enumerate(live.pages):
            for index in range(live.length // PAGE):
                self.content[pool][mine[index]] = (live.salt, tuple(live.tokens[: (index + 1) * PAGE]))

    @rule(pick=st.integers(0, 4), leave=st.booleans())
    def finish(self, pick: int, leave: bool) -> None:
        """A live request computes what is left, leaves its pages to the cache, and perhaps ends."""
        if self.live:
            request = sorted(self.live)[pick % len(self.live)]
            self.commit(request, MAX_SEQ_LEN)
            self.remember(request)
            if leave:
                self.free_request(request)

    @rule(request=requests)
    def remember(self, request: RequestId) -> None:
        live = self.live.get(request)
        if live is None:
            return
        keys = self.keys(live.tokens, live.salt)
        self.ledger.remember(request, keys)
        for index, key in enumerate(keys[: live.length // PAGE]):
            own = tuple(mine[index] for mine in live.pages)
            content = (live.salt, tuple(live.tokens[: (index + 1) * PAGE]))
            if key not in self.cached:
                self.cached[key] = (own, content)
                self.last_used[key] = self.clock
            elif self.cached[key][0] != own:
                self.clock += 1
                self.last_used[key] = self.clock
                break

    @rule(request=requests, transfer=transfers)
    def lease(self, request: RequestId, transfer: TransferId) -> None:
        live = self.live.get(request)
        if live is not None and transfer not in self.leases:
            self.ledger.lease(request, transfer)
            self.leases[transfer] = live.pages

    @rule(transfer=transfers)
    def end_lease(self, transfer: TransferId) -> None:
        self.ledger.end_lease(transfer)
        pages = self.leases.pop(transfer, None)
        if pages is not None:
            self.touch(pages)

    @rule(request=requests)
    def release_index_slot(self, request: RequestId) -> None:
        self.ledger.release_index_slot(request)
        if request in self.live:
            self.live[request].has_slot = False

    @rule(request=requests)
    def free_request(self, request: RequestId) -> None:
        self.ledger.free(request)
        live = self.live.pop(request, None)
        if live is not None:
            self.touch(live.pages)

    @rule(sure=st.sampled_from([False, False, False, True]))
    def forget(self, sure: bool) -> None:
        if sure:
            self.ledger.forget_prefixes()
            self.cached.clear()
            self.last_used.clear()

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for request in REQUESTS:
            self.ledger.free(request)
        for transfer in TRANSFERS:
            self.ledger.end_lease(transfer)
        self.ledger.check()
        assert self.ledger.usage() == self.baseline
        assert self.ledger.usage().cached_pages == len(self.cached)
        self.ledger.forget_prefixes()
        assert self.ledger.target.pool.num_in_use == 0

    # What is true after every step

    @invariant()
    def the_books_are_in_order(self) -> None:
        self.ledger.check()

    @invariant()
    def counts_equal_the_model(self) -> None:
        usage = self.ledger.usage()
        assert usage.cached_pages == len(self.idle())
        assert usage.target_pages_in_use == len(self.owned(0))
        if len(self.num_pages) == 2:
            assert usage.draft_pages_in_use == len(self.owned(1))

    @invariant()
    def everything_in_the_model_is_cached(self) -> None:
        for key in self.cached:
            assert self.ledger.num_cached([key]) == 1


TestPrefixHistory = PrefixHistory.TestCase
TestPrefixHistory.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
