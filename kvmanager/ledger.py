"""The one object that engines talk to: target manager and draft manager, moved together.

Life of a request: `reserve` binds one slot in both managers and takes pages for all its tokens and the
look-ahead -> `commit` sets both lengths -> on a context worker, `lease` makes the transfer a co-owner and
`release_index_slot` frees the row -> `free` -> `end_lease` when the transfer is terminal. A call that raises
leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvmanager.errors import InvalidCount, LeaseExists, LedgerCorrupt, TooLong
from kvmanager.ids import PageId, RequestId, SlotId, TransferId, TransferOwner
from kvmanager.layout import KvGeometry
from kvmanager.lease import NO_DEADLINE, LeaseBook
from kvmanager.manager import BatchLimits, DraftKvManager, KvManager, TargetKvManager


@dataclass(frozen=True, slots=True)
class RequestPages:
    """A request's pages in position order. `draft` is empty without a drafter."""

    target: tuple[PageId, ...]
    draft: tuple[PageId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerUsage:
    """Occupancy now. Free pages leave out the dummy page, so in use + free + 1 = the pool's pages."""

    requests: int
    slots_in_use: int
    slots_free: int
    draft_slots_in_use: int
    target_pages_in_use: int
    target_pages_free: int
    draft_pages_in_use: int
    draft_pages_free: int
    leases: int

    @property
    def target_pages(self) -> int:
        """Target pages that requests can own, the dummy page left out."""
        return self.target_pages_in_use + self.target_pages_free

    @property
    def draft_pages(self) -> int:
        """Draft pages that requests can own, the dummy page left out."""
        return self.draft_pages_in_use + self.draft_pages_free


class KvLedger:
    """Target manager + mirrored draft manager.

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
    ) -> None:
        """Page counts include page 0. Without a drafter `draft` is None and `num_draft_pages` is 0."""
        self.limits = BatchLimits(max_batch=max_batch, max_seq_len=max_seq_len, lookahead=lookahead)
        self.target = TargetKvManager(target, num_target_pages, self.limits)
        self.draft: DraftKvManager | None = None
        if draft is not None:
            self.draft = DraftKvManager(draft, num_draft_pages, self.limits, mirrors=self.target)
        elif num_draft_pages:
            raise ValueError(f"{num_draft_pages} draft pages were asked for, but there is no drafter")
        self.dummy_slot = SlotId(max_batch)
        self._managers: tuple[KvManager, ...] = (
            (self.target,) if self.draft is None else (self.target, self.draft)
        )
        self._leases = LeaseBook()

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

    def reserve(self, request: RequestId, num_tokens: int) -> SlotId:
        """Bind the same slot in both managers and take pages for `num_tokens` + look-ahead positions.

        Raises TooLong when it can never fit, SlotsExhausted or PoolExhausted when it does not fit now,
        RequestExists.
        """
        self.can_ever_fit(num_tokens)
        for manager in self._managers:
            manager.can_take(request, num_tokens)
        try:
            slot = self.target.bind(request, num_tokens)
            if self.draft is not None:
                self.draft.bind(request, num_tokens)
        except BaseException:  # an interrupt between the two managers must not leave half a request
            self.free(request)
            raise
        return slot

    @contextmanager
    def reserving(self, request: RequestId, num_tokens: int) -> Iterator[SlotId]:
        """Reserve for a block of code that may fail: any exception, cancellation included, gives all back."""
        slot = self.reserve(request, num_tokens)
        try:
            yield slot
        except BaseException:
            self.free(request)
            raise

    def slot(self, request: RequestId) -> SlotId:
        """The request's slot in both managers, never the dummy slot.

        Raises UnknownRequest, and SlotReleased for a request that gave its slot back.
        """
        return self.target.slot(request)

    def pages(self, request: RequestId) -> RequestPages:
        """The request's pages, with or without a slot. Raises UnknownRequest."""
        return RequestPages(
            target=self.target.pages(request),
            draft=self.draft.pages(request) if self.draft is not None else (),
        )

    def commit(self, request: RequestId, length: int) -> None:
        """Declare positions 0 .. length - 1 written and final, for target and drafter at once.

        Raises UnknownRequest, SlotReleased, and CommitRefused for a length that shrinks or passes what was
        reserved.
        """
        # The managers agree on capacity, length and slot: what the first lets pass, the second does too.
        for manager in self._managers:
            manager.commit(request, length)

    def length(self, request: RequestId) -> int:
        """KV length of the target, equal to the draft context length. Raises UnknownRequest."""
        return self.target.length(request)

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
        for manager in self._managers:
            manager.end_lease(transfer)
        self._leases.end(transfer)

    def release_index_slot(self, request: RequestId) -> None:
        """Free the row in both managers, keep the pages. Idempotent; a stranger changes nothing."""
        for manager in self._managers:
            manager.release_index_slot(request)

    def free(self, request: RequestId) -> None:
        """Free slot and pages of the request in both managers, once.

        Idempotent; a stranger changes nothing.
        """
        for manager in self._managers:
            manager.free(request)

    def usage(self) -> LedgerUsage:
        draft = self.draft
        return LedgerUsage(
            requests=self.target.num_requests,
            slots_in_use=self.target.slots.num_in_use,
            slots_free=self.target.slots.num_free,
            draft_slots_in_use=draft.slots.num_in_use if draft is not None else 0,
            target_pages_in_use=self.target.pool.num_in_use,
            target_pages_free=self.target.pool.num_free,
            draft_pages_in_use=draft.pool.num_in_use if draft is not None else 0,
            draft_pages_free=draft.pool.num_free if draft is not None else 0,
            leases=len(self._leases),
        )

    def check(self) -> None:
        """Raise LedgerCorrupt unless both managers and the leases tell one story.

        O(pages in use); for idle time.
        """
        self._leases.check()
        leased = set(self._leases.transfers())
        for manager in self._managers:
            manager.check()
            owners = {owner.transfer for owner in manager.pool.owners() if isinstance(owner, TransferOwner)}
            if owners != leased:
                raise LedgerCorrupt(
                    f"the {manager.name} pool's transfers differ from the leases: {owners ^ leased}"
                )
