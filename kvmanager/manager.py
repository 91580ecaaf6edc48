"""One model's KV books: its pool, its page table, and each request's pages and length.

Life of a request here: bound (pages taken, row filled) -> length committed step by step -> perhaps leased to
a transfer -> slot released -> freed. The pages return to the pool when the request and every transfer have
let go.

Of a model with a window (`KvGeometry.window`) a request holds the pages of its window and its look-ahead only. They
begin with the page that the first committed length will read; each commit frees the pages that fall behind, once, and
takes as many ahead, so that a request which runs never lacks one.

The target's manager chooses slots. The drafter's manager has a pool and pages of its own but mirrors every
slot: a request has the same slot in both, always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmanager.errors import (
    CommitRefused,
    InvalidCount,
    LedgerCorrupt,
    PoolExhausted,
    RequestExists,
    SlotReleased,
    SlotsExhausted,
    TooLong,
    UnknownRequest,
)
from kvmanager.ids import PageId, RequestId, RequestOwner, SlotId, TransferId, TransferOwner
from kvmanager.layout import KvGeometry
from kvmanager.pool import PagePool
from kvmanager.slots import PageTable, SlotTable


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """What both managers agree on.

    `lookahead`: positions beyond a request's tokens that drafting may write to.
    """

    max_batch: int
    max_seq_len: int
    lookahead: int

    def __post_init__(self) -> None:
        for name, least in (("max_batch", 1), ("max_seq_len", 1), ("lookahead", 0)):
            if getattr(self, name) < least:
                raise InvalidCount(name, getattr(self, name), least)

    @property
    def max_positions(self) -> int:
        """Positions that one slot's row must be able to address."""
        return self.max_seq_len + self.lookahead


@dataclass(slots=True)
class _Held:
    """What one request holds. `length` positions are written and final; `capacity` positions are reserved.

    `pages` are those from the request's page `first_page` on, which was `opening_page` when it was bound.
    """

    pages: tuple[PageId, ...]
    length: int
    capacity: int
    opening_page: int = 0
    first_page: int = 0


class KvManager:
    """Pages and rows of one model. Holds the rules that are the same for target and drafter."""

    def __init__(self, geometry: KvGeometry, num_pages: int, limits: BatchLimits, name: str) -> None:
        self.geometry = geometry
        self.limits = limits
        self.name = name
        self.pool = PagePool(num_pages, name)
        self.slots = SlotTable(limits.max_batch, geometry.most_pages(limits.max_positions, limits.lookahead))
        self._held: dict[RequestId, _Held] = {}

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the dummy page included: dim 0 of the storage tensor."""
        return self.pool.num_pages

    @property
    def page_table(self) -> PageTable:
        """int32 [max_batch + 1, max_pages_per_slot]; row `max_batch` is the dummy slot. Read, never write."""
        return self.slots.table

    def num_pages_for(self, num_tokens: int, first_page: int = 0) -> int:
        """Pages that a reservation of `num_tokens` takes from its page `first_page` on, look-ahead included."""
        pages = self.geometry.pages_for(num_tokens + self.limits.lookahead) - first_page
        return pages if self.geometry.window is None else min(pages, self.slots.max_pages)

    def can_ever_fit(self, num_tokens: int) -> None:
        """Raise TooLong when this pool could not hold the request even if it were empty."""
        need = self.num_pages_for(num_tokens)
        if need > self.pool.num_usable:
            raise TooLong(
                num_tokens, need, self.pool.num_usable, f"the size of the {self.name} pool", "pages"
            )

    def can_take(
        self, request: RequestId, num_tokens: int, *, first_page: int = 0, shared: int = 0, evictable: int = 0
    ) -> None:
        """Raise what a binding of the request would raise now, and change nothing.

        Its pages begin with `first_page`; `shared` of them exist already; `evictable` more pages can be freed for it.
        """
        if request in self._held:
            raise RequestExists(request)
        if not self.slots.num_free:
            raise SlotsExhausted(self.limits.max_batch)
        need = self.num_pages_for(num_tokens, first_page) - shared
        free = self.pool.num_free + evictable
        if need > free:
            raise PoolExhausted(need=need, free=free, pool=self.name)

    def num_pages_to_grow(self, request: RequestId, num_tokens: int) -> int:
        """Pages that the request lacks for `num_tokens` and the look-ahead."""
        held = self._of(request)
        return max(self.num_pages_for(num_tokens, held.first_page) - len(held.pages), 0)

    def can_grow(self, request: RequestId, num_tokens: int, *, evictable: int = 0) -> None:
        """Raise what growing the request would raise now, and change nothing."""
        need = self.num_pages_to_grow(request, num_tokens)
        self.slot(request)
        free = self.pool.num_free + evictable
        if need > free:
            raise PoolExhausted(need=need, free=free, pool=self.name)

    def grow(self, request: RequestId, num_tokens: int) -> None:
        """Add the pages that the request lacks. The ledger has asked `can_grow` of every manager before."""
        held = self._of(request)
        taken = self.pool.take(self.num_pages_to_grow(request, num_tokens), RequestOwner(request))
        if taken:
            held.pages = (*held.pages, *taken)
            self.slots.set_pages(request, held.pages)
        held.capacity = max(held.capacity, num_tokens + self.limits.lookahead)

    def slot(self, request: RequestId) -> SlotId:
        """The request's slot. SlotReleased when it gave it back, UnknownRequest for a stranger."""
        try:
            return self.slots.slot(request)
        except UnknownRequest:
            if request in self._held:
                raise SlotReleased(request) from None
            raise

    def slots_of(self, requests: Sequence[RequestId]) -> list[SlotId]:
        """`slot` of each of them, in one call."""
        try:
            return self.slots.slots_of(requests)
        except UnknownRequest:
            return [
                self.slot(request) for request in requests
            ]  # raises what is true of the first without one

    def pages(self, request: RequestId) -> tuple[PageId, ...]:
        """The request's pages in position order, with or without a slot; the first is that of `first_position`."""
        return self._of(request).pages

    def pages_between(self, request: RequestId, first_position: int, end_position: int) -> tuple[PageId, ...]:
        """Those of the request's pages that hold any of these positions."""
        held, size = self._of(request), self.geometry.page_size
        skipped = max(first_position // size - held.first_page, 0)
        return held.pages[skipped : max(self.geometry.pages_for(end_position) - held.first_page, 0)]

    def first_positions_of(self, requests: Sequence[RequestId]) -> list[int]:
        """The position where each request's first page, and so its row of the page table, begins."""
        held, size = self._held, self.geometry.page_size
        try:
            return [held[request].first_page * size for request in requests]
        except KeyError as missing:
            raise UnknownRequest(missing.args[0]) from None

    def length(self, request: RequestId) -> int:
        """Positions 0 .. length - 1 are written and final."""
        return self._of(request).length

    def commit(self, request: RequestId, length: int) -> None:
        """Set the length. What `can_commit` raises changes nothing."""
        self.can_commit((request,), (length,))
        self.set_lengths((request,), (length,))

    def lengths_of(self, requests: Sequence[RequestId]) -> list[int]:
        """`length` of each of them, in one call."""
        held = self._held
        try:
            return [held[request].length for request in requests]
        except KeyError as missing:
            raise UnknownRequest(missing.args[0]) from None

    def can_commit(self, requests: Sequence[RequestId], lengths: Sequence[int]) -> None:
        """Raise what committing any of them would raise, and change nothing.

        CommitRefused, UnknownRequest, SlotReleased. PoolExhausted only for a window whose next pages are missing
        because a transfer still holds those behind it.
        """
        for request, length in zip(requests, lengths, strict=True):
            held = self._of(request)
            if not held.length <= length <= held.capacity:
                raise CommitRefused(request, length, held.length, held.capacity)
        self.slots_of(requests)
        if self.geometry.window is not None:
            self._can_slide(requests, lengths)

    def set_lengths(self, requests: Sequence[RequestId], lengths: Sequence[int]) -> None:
        """Lengths that `can_commit` let pass, here or in the manager that this one mirrors."""
        held = self._held
        for request, length in zip(requests, lengths, strict=True):
            held[request].length = length
            if self.geometry.window is not None:
                self._slide(request, held[request])

    def _behind(self, held: _Held, length: int) -> tuple[tuple[PageId, ...], int]:
        """The pages that lie behind the window of a context of this length, and how many are taken for them ahead."""
        first_page = max(held.first_page, self.geometry.first_page(length))
        behind = held.pages[: first_page - held.first_page]
        kept = len(held.pages) - len(behind)
        return behind, max(self.num_pages_for(held.capacity - self.limits.lookahead, first_page) - kept, 0)

    def _can_slide(self, requests: Sequence[RequestId], lengths: Sequence[int]) -> None:
        free = self.pool.num_free
        for request, length in zip(requests, lengths, strict=True):
            behind, ahead = self._behind(self._of(request), length)
            free += sum(self.pool.num_owners(page) == 1 for page in behind)
            if ahead > free:
                raise PoolExhausted(need=ahead, free=free, pool=self.name)
            free -= ahead

    def _slide(self, request: RequestId, held: _Held) -> None:
        """Free what lies behind the window, and take as many pages ahead of it as the request may need."""
        behind, ahead = self._behind(held, held.length)
        held.first_page = max(held.first_page, self.geometry.first_page(held.length))
        if not behind and not ahead:
            return
        owner = RequestOwner(request)
        self.pool.give_back(behind, owner)
        held.pages = (*held.pages[len(behind) :], *self.pool.take(ahead, owner))
        self.slots.set_pages(request, held.pages)

    def lease(self, request: RequestId, transfer: TransferId) -> None:
        """Make the transfer a further owner of all pages of the request."""
        self.pool.share(self._of(request).pages, TransferOwner(transfer))

    def end_lease(self, transfer: TransferId) -> None:
        self.pool.release(TransferOwner(transfer))

    def release_index_slot(self, request: RequestId) -> None:
        """Free the row, keep the pages. Idempotent; a stranger changes nothing."""
        self.slots.release_index_slot(request)

    def free(self, request: RequestId) -> None:
        """Free the row and end the request's ownership of its pages.

        Idempotent; a stranger changes nothing.
        """
        self.slots.release_index_slot(request)
        self._held.pop(request, None)
        self.pool.release(RequestOwner(request))

    @property
    def num_requests(self) -> int:
        """Requests that hold pages, with or without a slot."""
        return len(self._held)

    def lengths(self) -> dict[RequestId, int]:
        """A copy of every request's length."""
        return {request: held.length for request, held in self._held.items()}

    def _of(self, request: RequestId) -> _Held:
        held = self._held.get(request)
        if held is None:
            raise UnknownRequest(request)
        return held

    def _take_pages(
        self,
        request: RequestId,
        num_tokens: int,
        shared: tuple[PageId, ...],
        length: int,
        first_page: int = 0,
    ) -> tuple[PageId, ...]:
        """`shared`: leading pages that the request co-owns already; positions before `length` are written and final."""
        count = self.num_pages_for(num_tokens, first_page) - len(shared)
        pages = (*shared, *self.pool.take(count, RequestOwner(request)))
        self._held[request] = _Held(
            pages=pages,
            length=length,
            capacity=num_tokens + self.limits.lookahead,
            opening_page=first_page,
            first_page=first_page,
        )
        return pages

    def check(self) -> None:
        """Raise LedgerCorrupt unless pool, table and requests tell the same story."""
        self.pool.check()
        self.slots.check()
        for request, held in self._held.items():
            if self.pool.pages_of(RequestOwner(request)) != held.pages:
                raise LedgerCorrupt(f"request {request!r} and the {self.name} pool disagree on its pages")
            tokens = held.capacity - self.limits.lookahead
            enough = self.num_pages_for(tokens, held.first_page) <= len(held.pages)
            if not 0 <= held.length <= held.capacity or not enough:
                raise LedgerCorrupt(
                    f"request {request!r} has length {held.length} in {len(held.pages)} pages"
                )
            if held.first_page != max(held.opening_page, self.geometry.first_page(held.length)):
                raise LedgerCorrupt(
                    f"request {request!r} has length {held.length} and {self.name} pages from {held.first_page} on"
                )
        for owner in self.pool.owners():
            if isinstance(owner, RequestOwner) and owner.request not in self._held:
                raise LedgerCorrupt(
                    f"the {self.name} pool still counts the pages of freed request {owner.request!r}"
                )
        for request, slot in self.slots.assignments().items():
            if request not in self._held:
                raise LedgerCorrupt(
                    f"slot {slot} of the {self.name} manager is bound to freed request {request!r}"
                )
            if self.slots.row(slot) != self._held[request].pages:
                raise LedgerCorrupt(
                    f"slot {slot} of the {self.name} manager shows other pages than {request!r} holds"
                )


class TargetKvManager(KvManager):
    """The target model's manager: it chooses each request's slot."""

    def __init__(self, geometry: KvGeometry, num_pages: int, limits: BatchLimits) -> None:
        super().__init__(geometry, num_pages, limits, "target")

    def bind(self, request: RequestId, num_tokens: int, shared: tuple[PageId, ...] = ()) -> SlotId:
        """Take pages and a slot. The ledger has asked `can_take` of every manager before."""
        length = len(shared) * self.geometry.page_size
        return self.slots.assign(request, self._take_pages(request, num_tokens, shared, length))


class DraftKvManager(KvManager):
    """The drafter's manager: pool and pages of its own, slots and lengths those of the target's manager."""

    def __init__(
        self, geometry: KvGeometry, num_pages: int, limits: BatchLimits, mirrors: TargetKvManager
    ) -> None:
        super().__init__(geometry, num_pages, limits, "draft")
        self._target = mirrors

    def bind(
        self, request: RequestId, num_tokens: int, shared: tuple[PageId, ...] = (), first_page: int = 0
    ) -> SlotId:
        """Take pages from the request's page `first_page` on, and the slot and length that it has in the target's."""
        slot, length = self._target.slot(request), self._target.length(request)
        pages = self._take_pages(request, num_tokens, shared, length, first_page)
        self.slots.assign_slot(request, slot, pages)
        return slot

    def check(self) -> None:
        super().check()
        if self.slots.assignments() != self._target.slots.assignments():
            raise LedgerCorrupt("target and draft managers disagree on the slots of their requests")
        if self.lengths() != self._target.lengths():
            raise LedgerCorrupt("a request's draft context length differs from its target KV length")
