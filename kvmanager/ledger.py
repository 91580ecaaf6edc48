"""The one object that engines talk to: target manager and draft manager, moved together.

Life of a request: `reserve` binds one slot in both managers and takes pages for all its tokens and the
look-ahead, the first of them from the prefix cache where it has them -> perhaps `grow` adds more ->
`commit` sets both lengths ->
`remember` leaves its full pages to the cache -> on a context worker, `lease` makes the transfer a co-owner and
`release_index_slot` frees the row -> `free` -> `end_lease` when the transfer is terminal. A call that raises
leaves nothing behind.

Pages that the cache alone holds are evicted before a reservation is refused, so they count as free.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvmanager.errors import InvalidCount, LayoutRefused, LeaseExists, LedgerCorrupt, TooLong
from kvmanager.ids import PageId, PageKey, RequestId, RequestOwner, SlotId, TransferId, TransferOwner
from kvmanager.layout import DraftKv, KvGeometry
from kvmanager.lease import NO_DEADLINE, LeaseBook
from kvmanager.manager import BatchLimits, DraftKvManager, KvManager, TargetKvManager
from kvmanager.prefix import PrefixCache
from kvmanager.unified import UnifiedDraftKv


@dataclass(frozen=True, slots=True)
class RequestPages:
    """A request's pages in position order. `draft` is empty unless the drafter has a pool of its own.

    `rank`: whose pools they are pages of, where the ranks of a worker keep requests apart.
    """

    target: tuple[PageId, ...]
    draft: tuple[PageId, ...]
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerUsage:
    """Occupancy now. Free pages leave out the dummy page, so in use + free + 1 = the pool's pages.

    In use: owned by requests or transfers. `cached_pages` of the free pages of each pool hold what the prefix
    cache keeps until a reservation wants them; they leave nothing behind, so usages compare equal without them.
    """

    requests: int
    slots_in_use: int
    slots_free: int
    draft_slots_in_use: int
    target_pages_in_use: int
    target_pages_free: int
    draft_pages_in_use: int
    draft_pages_free: int
    leases: int
    cached_pages: int = field(default=0, compare=False)

    @property
    def target_pages(self) -> int:
        """Target pages that requests can own, the dummy page left out."""
        return self.target_pages_in_use + self.target_pages_free

    @property
    def draft_pages(self) -> int:
        """Draft pages that requests can own, the dummy page left out."""
        return self.draft_pages_in_use + self.draft_pages_free


class KvLedger:
    """Target manager + draft manager, mirrored or unified, + prefix cache.

    Page 0 of each pool is the dummy slot's and is never handed out.
    """

    def __init__(
        self,
        *,
        target: KvGeometry,
        draft: KvGeometry | None,
        num_target_pages: int,
        num_draft_pages: int,
        max_batch: int,
        max_seq_len: int,
        lookahead: int,
        draft_kv: DraftKv = "mirrored",
        prefix_cache: bool = False,
    ) -> None:
        """Page counts include page 0. `num_draft_pages` is 0 when the drafter has no pool: none, or unified.

        Raises LayoutRefused for unified pages that the models' KV cannot share, and for a prefix cache over
        pools of different page sizes.
        """
        self.limits = BatchLimits(max_batch=max_batch, max_seq_len=max_seq_len, lookahead=lookahead)
        self.target = TargetKvManager(target, num_target_pages, self.limits)
        self.draft: DraftKvManager | UnifiedDraftKv | None = None
        self._mirror: DraftKvManager | None = None
        if draft is not None and draft_kv == "unified":
            self.draft = UnifiedDraftKv(draft, self.target)
        elif draft is not None:
            self.draft = self._mirror = DraftKvManager(
                draft, num_draft_pages, self.limits, mirrors=self.target
            )
        if num_draft_pages and self._mirror is None:
            raise ValueError(f"{num_draft_pages} draft pages were asked for, but there is no draft pool")
        self.dummy_slot = SlotId(max_batch)
        self._managers: tuple[KvManager, ...] = (
            (self.target,) if self._mirror is None else (self.target, self._mirror)
        )
        self._windowed = self._mirror if draft is not None and draft.window is not None else None
        self._leases = LeaseBook()
        self._cache: PrefixCache | None = None
        if prefix_cache and draft is not None and draft.page_size != target.page_size:
            raise LayoutRefused(
                "target and draft pages are cached together, so they must hold equally many tokens: "
                f"{target.page_size} and {draft.page_size}"
            )
        # A window's pages are not cached: a hit ends before it, see `kvmanager.prefix.shareable`.
        cached = [manager for manager in self._managers if manager.geometry.window is None]
        self._cached: tuple[KvManager, ...] = tuple(cached)
        if prefix_cache:
            self._cache = PrefixCache([manager.pool for manager in cached])

    @property
    def target_geometry(self) -> KvGeometry:
        return self.target.geometry

    @property
    def draft_geometry(self) -> KvGeometry | None:
        """None without a drafter."""
        return self.draft.geometry if self.draft is not None else None

    @property
    def num_target_pages(self) -> int:
        """The dummy page included."""
        return self.target.num_pages

    @property
    def num_draft_pages(self) -> int:
        """Likewise; 0 when the drafter has no pool."""
        return self.draft.num_pages if self.draft is not None else 0

    @property
    def draft_window(self) -> int | None:
        """How many positions of context the drafter keeps; None: all, or there is no drafter."""
        return self.draft.geometry.window if self.draft is not None else None

    @property
    def draft_kv(self) -> DraftKv | None:
        """The form of the drafter's KV; None without a drafter."""
        if self.draft is None:
            return None
        return "mirrored" if self._mirror is not None else "unified"

    def can_ever_fit(self, num_tokens: int) -> None:
        """Raise TooLong, naming the limit, for a request that no amount of waiting lets in.

        Look-ahead included.
        """
        if num_tokens < 1:
            raise InvalidCount("num_tokens", num_tokens, 1)
        if num_tokens > self.limits.max_seq_len:
            raise TooLong(num_tokens, num_tokens, self.limits.max_seq_len, "max_seq_len", "positions")
        for manager in self._managers:
            manager.can_ever_fit(num_tokens)

    def reserve(
        self,
        request: RequestId,
        num_tokens: int,
        prefix: Sequence[PageKey] = (),
        *,
        num_prompt_tokens: int = 0,
        spare_pages: int = 0,
        position_multiple: int = 1,
    ) -> SlotId:
        """Bind the same slot in both managers and take pages for `num_tokens` + look-ahead positions.

        Pages of `prefix` (see `shareable`) that are cached become the request's first pages, and its length
        starts behind them, at a multiple of `position_multiple`. Of `num_prompt_tokens` a drafter with a window keeps
        the last only, from the start, and no hit reaches into them. `spare_pages` must remain free in each pool, for
        those who may grow. Raises TooLong when it can never fit, SlotsExhausted or PoolExhausted when it does not fit
        now, RequestExists.
        """
        self.can_ever_fit(num_tokens)
        cache, windowed = self._cache, self._windowed
        first_page = 0
        if windowed is not None:
            first_page = windowed.geometry.first_page(min(num_prompt_tokens, num_tokens))
            first_position = first_page * windowed.geometry.page_size
            prefix = prefix[: first_position // self.target.geometry.page_size]
        num_hits = cache.match(prefix) if cache is not None else 0
        while num_hits * self.target.geometry.page_size % position_multiple:
            num_hits -= 1
        hits = prefix[:num_hits]
        evictable = cache.num_idle - cache.num_idle_among(hits) if cache is not None else 0
        for manager in self._cached:
            manager.can_take(request, num_tokens, shared=len(hits), evictable=evictable - spare_pages)
        if windowed is not None:  # its pages return as its window moves on: it needs no spare ones
            windowed.can_take(request, num_tokens, first_page=first_page)
        try:
            shared: list[tuple[PageId, ...]] = [()] * len(self._managers)
            if cache is not None:
                shared[: len(self._cached)] = cache.share(hits, RequestOwner(request))
                cache.evict([m.num_pages_for(num_tokens) - len(hits) for m in self._cached])
            slot = self.target.bind(request, num_tokens, shared[0])
            if self._mirror is not None:
                self._mirror.bind(request, num_tokens, shared[1], first_page)
        except BaseException:  # an interrupt between the two managers must not leave half a request
            self.free(request)
            raise
        return slot

    def grow(self, request: RequestId, num_tokens: int) -> None:
        """Add pages to a live request until it has them for `num_tokens` + look-ahead positions; it never shrinks.

        A transfer that holds a lease on the request's pages does not own those that come later. Raises TooLong when
        so many can never fit, PoolExhausted when they do not fit now, UnknownRequest, SlotReleased.
        """
        self.can_ever_fit(num_tokens)
        cache = self._cache
        evictable = cache.num_idle if cache is not None else 0
        for manager in self._managers:
            manager.can_grow(request, num_tokens, evictable=evictable if manager in self._cached else 0)
        if cache is not None:
            cache.evict([manager.num_pages_to_grow(request, num_tokens) for manager in self._cached])
        # An interrupt between the two leaves the drafter's pages behind the target's; the next call adds them.
        for manager in self._managers:
            manager.grow(request, num_tokens)

    @contextmanager
    def reserving(
        self, request: RequestId, num_tokens: int, prefix: Sequence[PageKey] = ()
    ) -> Iterator[SlotId]:
        """Reserve for a block of code that may fail: any exception, cancellation included, gives all back."""
        slot = self.reserve(request, num_tokens, prefix)
        try:
            yield slot
        except BaseException:
            self.free(request)
            raise

    def rank_of(self, request: RequestId) -> int:
        """Which rank has the request's pages; here all of them do, the first for one."""
        return 0

    def slot(self, request: RequestId) -> SlotId:
        """The request's slot in both managers, never the dummy slot.

        Raises UnknownRequest, and SlotReleased for a request that gave its slot back.
        """
        return self.target.slot(request)

    def pages(self, request: RequestId) -> RequestPages:
        """The request's pages, with or without a slot. Raises UnknownRequest."""
        return RequestPages(
            target=self.target.pages(request),
            draft=self._mirror.pages(request) if self._mirror is not None else (),
        )

    def pages_between(self, request: RequestId, first_position: int, end_position: int) -> RequestPages:
        """Those of the request's pages that hold any of these positions; of a window's, as far as they exist."""
        mirror = self._mirror
        return RequestPages(
            target=self.target.pages_between(request, first_position, end_position),
            draft=mirror.pages_between(request, first_position, end_position) if mirror is not None else (),
        )

    def commit(self, request: RequestId, length: int) -> None:
        """Declare positions 0 .. length - 1 written and final, for target and drafter at once.

        Raises UnknownRequest, SlotReleased, and CommitRefused for a length that shrinks or passes what was
        reserved; for a drafter with a window also what `KvManager.can_commit` says.
        """
        self.commit_all((request,), (length,))

    def commit_all(self, requests: Sequence[RequestId], lengths: Sequence[int]) -> None:
        """`commit` of all of them: what a decode step does. An error, as `commit` raises it, changes none."""
        self.can_commit(requests, lengths)
        for manager in self._managers:
            manager.set_lengths(requests, lengths)

    def can_commit(self, requests: Sequence[RequestId], lengths: Sequence[int]) -> None:
        """Raise what `commit_all` would raise, and change nothing."""
        # The managers agree on capacity, length and slot: what the first lets pass, the second does too, unless it has
        # a window to move.
        self.target.can_commit(requests, lengths)
        if self._windowed is not None:
            self._windowed.can_commit(requests, lengths)

    def slots_of(self, requests: Sequence[RequestId]) -> list[SlotId]:
        """`slot` of each of them, in one call."""
        return self.target.slots_of(requests)

    def lengths_of(self, requests: Sequence[RequestId]) -> list[int]:
        """`length` of each of them, in one call. Raises UnknownRequest."""
        return self.target.lengths_of(requests)

    def length(self, request: RequestId) -> int:
        """KV length of the target, equal to the draft context length. Raises UnknownRequest."""
        return self.target.length(request)

    def remember(self, request: RequestId, keys: Sequence[PageKey]) -> int:
        """Leave the request's full pages to the prefix cache under `keys`; returns how many were new.

        Only pages whose positions are all committed are taken. The caller vouches that both models' KV of them
        is valid: a request that computed no draft context must not call this. Raises UnknownRequest.
        """
        full_pages = self.length(request) // self.target.geometry.page_size
        pages = [manager.pages(request)[:full_pages] for manager in self._cached]
        return self._cache.insert(keys, pages) if self._cache is not None else 0

    def num_cached(self, keys: Sequence[PageKey]) -> int:
        """How many leading pages of these the prefix cache holds. Changes nothing."""
        return self._cache.match(keys) if self._cache is not None else 0

    def forget_prefixes(self) -> None:
        """Empty the prefix cache. Pages in use stay with their owners."""
        if self._cache is not None:
            self._cache.clear()

    def lease(self, request: RequestId, transfer: TransferId, deadline_s: float = NO_DEADLINE) -> None:
        """Make the transfer a co-owner of all the request's pages until `end_lease`.

        `deadline_s` is on the clock that `expire_leases` is called with. Raises UnknownRequest, LeaseExists.
        """
        self.target.pages(request)
        if transfer in self._leases:
            raise LeaseExists(transfer)
        try:
            for manager in self._managers:
                manager.lease(request, transfer)
            self._leases.take(transfer, deadline_s)
        except BaseException:
            self.end_lease(transfer)
            raise

    def renew_lease(self, transfer: TransferId, deadline_s: float) -> None:
        """Raises UnknownLease, LeaseExpired."""
        self._leases.renew(transfer, deadline_s)

    def expire_leases(self, now_s: float) -> list[TransferId]:
        """Transfers whose lease ran out since the last call.

        Abort each; its pages stay pinned until `end_lease`.
        """
        return self._leases.expire(now_s)

    def end_lease(self, transfer: TransferId) -> None:
        """The transfer is terminal: it owns nothing more. Idempotent; a stranger changes nothing."""
        pages = self.target.pool.pages_of(TransferOwner(transfer))
        for manager in self._managers:
            manager.end_lease(transfer)
        self._leases.end(transfer)
        self._released(pages)

    def release_index_slot(self, request: RequestId) -> None:
        """Free the row in both managers, keep the pages. Idempotent; a stranger changes nothing."""
        for manager in self._managers:
            manager.release_index_slot(request)

    def free(self, request: RequestId) -> None:
        """Free slot and pages of the request in both managers, once.

        Idempotent; a stranger changes nothing.
        """
        pages = self.target.pool.pages_of(RequestOwner(request))
        for manager in self._managers:
            manager.free(request)
        self._released(pages)

    def _released(self, target_pages: Sequence[PageId]) -> None:
        if self._cache is not None:
            self._cache.released(target_pages)

    def usage(self) -> LedgerUsage:
        mirror = self._mirror
        cached = self._cache.num_idle if self._cache is not None else 0
        cached_drafts = cached if self._windowed is None else 0
        return LedgerUsage(
            requests=self.target.num_requests,
            slots_in_use=self.target.slots.num_in_use,
            slots_free=self.target.slots.num_free,
            draft_slots_in_use=self._num_draft_slots(),
            target_pages_in_use=self.target.pool.num_in_use - cached,
            target_pages_free=self.target.pool.num_free + cached,
            draft_pages_in_use=mirror.pool.num_in_use - cached_drafts if mirror is not None else 0,
            draft_pages_free=mirror.pool.num_free + cached_drafts if mirror is not None else 0,
            leases=len(self._leases),
            cached_pages=cached,
        )

    def _num_draft_slots(self) -> int:
        """A unified drafter's slots are the target's own."""
        if self.draft is None:
            return 0
        return (self._mirror or self.target).slots.num_in_use

    def check(self) -> None:
        """Raise LedgerCorrupt unless both managers and the leases tell one story.

        O(pages in use); for idle time.
        """
        self._leases.check()
        if self._cache is not None:
            self._cache.check()
        leased = set(self._leases.transfers())
        for manager in self._managers:
            manager.check()
            owners = {owner.transfer for owner in manager.pool.owners() if isinstance(owner, TransferOwner)}
            if owners != leased:
                raise LedgerCorrupt(
                    f"the {manager.name} pool's transfers differ from the leases: {owners ^ leased}"
                )
