"""What engines ask of a ledger (`Ledger`), and the ledger of a worker whose ranks keep requests apart.

With attention data parallelism every rank of a worker has pools of its own, and all pages of a request lie on one
rank. `DividedLedger` keeps a `KvLedger` for each of them and moves requests in where there is most room:

    reserve ──▶ the rank with the most free pages; a page of the prefix that it has already counts as two of them,
                because it is neither taken nor computed
    all else ──▶ the rank that has the request

So requests that begin alike meet on one rank until it is fuller than another by as much as they share; then that one
computes the prefix once more and has it too. A page is never read on a rank that does not hold it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Protocol

from kvmanager.errors import (
    LeaseExists,
    LedgerCorrupt,
    PoolExhausted,
    RequestExists,
    SlotsExhausted,
    UnknownRequest,
)
from kvmanager.ids import PageKey, RequestId, SlotId, TransferId
from kvmanager.layout import KvGeometry
from kvmanager.lease import NO_DEADLINE
from kvmanager.ledger import KvLedger, LedgerUsage, RequestPages
from kvmanager.manager import BatchLimits


class Ledger(Protocol):
    """The ledger of one worker. Every member is as in `KvLedger`; counts of pages are of all ranks together."""

    @property
    def limits(self) -> BatchLimits: ...

    @property
    def target_geometry(self) -> KvGeometry: ...

    @property
    def draft_geometry(self) -> KvGeometry | None: ...

    @property
    def draft_window(self) -> int | None: ...

    @property
    def num_target_pages(self) -> int: ...

    @property
    def num_draft_pages(self) -> int: ...

    def can_ever_fit(self, num_tokens: int) -> None: ...

    def reserve(
        self,
        request: RequestId,
        num_tokens: int,
        prefix: Sequence[PageKey] = (),
        *,
        num_prompt_tokens: int = 0,
        spare_pages: int = 0,
        position_multiple: int = 1,
    ) -> SlotId: ...

    def grow(self, request: RequestId, num_tokens: int) -> None: ...

    def rank_of(self, request: RequestId) -> int: ...

    def pages(self, request: RequestId) -> RequestPages: ...

    def pages_between(self, request: RequestId, first_position: int, end_position: int) -> RequestPages: ...

    def commit(self, request: RequestId, length: int) -> None: ...

    def commit_all(self, requests: Sequence[RequestId], lengths: Sequence[int]) -> None: ...

    def lengths_of(self, requests: Sequence[RequestId]) -> list[int]: ...

    def length(self, request: RequestId) -> int: ...

    def remember(self, request: RequestId, keys: Sequence[PageKey]) -> int: ...

    def num_cached(self, keys: Sequence[PageKey]) -> int: ...

    def forget_prefixes(self) -> None: ...

    def lease(self, request: RequestId, transfer: TransferId, deadline_s: float = NO_DEADLINE) -> None: ...

    def end_lease(self, transfer: TransferId) -> None: ...

    def release_index_slot(self, request: RequestId) -> None: ...

    def free(self, request: RequestId) -> None: ...

    def usage(self) -> LedgerUsage: ...

    def check(self) -> None: ...


class DividedLedger:
    """Implements `Ledger` over one `KvLedger` of each rank, all alike."""

    def __init__(self, ledgers: Sequence[KvLedger]) -> None:
        self.ledgers = tuple(ledgers)
        first = self.ledgers[0]
        self.limits, self.draft_window = first.limits, first.draft_window
        self.target_geometry, self.draft_geometry = first.target_geometry, first.draft_geometry
        self._ranks: dict[RequestId, int] = {}
        self._transfers: dict[TransferId, int] = {}

    @property
    def num_target_pages(self) -> int:
        return sum(ledger.num_target_pages for ledger in self.ledgers)

    @property
    def num_draft_pages(self) -> int:
        return sum(ledger.num_draft_pages for ledger in self.ledgers)

    def rank_of(self, request: RequestId) -> int:
        """The rank that has all pages of the request. Raises UnknownRequest."""
        try:
            return self._ranks[request]
        except KeyError:
            raise UnknownRequest(request) from None

    def can_ever_fit(self, num_tokens: int) -> None:
        self.ledgers[0].can_ever_fit(num_tokens)

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
        """See `KvLedger.reserve`. What it raises when no rank has room is what the one with most room says.

        `spare_pages`: for those who may grow on all ranks, each of which keeps its requests' share.
        """
        if request in self._ranks:
            raise RequestExists(request)
        refusals: list[PoolExhausted | SlotsExhausted] = []
        for rank in self._by_room(prefix):
            try:
                slot = self.ledgers[rank].reserve(
                    request,
                    num_tokens,
                    prefix,
                    num_prompt_tokens=num_prompt_tokens,
                    spare_pages=self._share(spare_pages, rank),
                    position_multiple=position_multiple,
                )
            except (PoolExhausted, SlotsExhausted) as refusal:
                refusals.append(refusal)
            else:
                self._ranks[request] = rank
                return slot
        raise refusals[0]

    def _share(self, spare_pages: int, rank: int) -> int:
        own = self.ledgers[rank].target.num_requests
        return -(-spare_pages * own // len(self._ranks)) if own else 0

    def _by_room(self, prefix: Sequence[PageKey]) -> list[int]:
        def room(rank: int) -> tuple[int, int]:
            ledger, usage = self.ledgers[rank], self.ledgers[rank].usage()
            return usage.target_pages_free + 2 * ledger.num_cached(prefix), usage.slots_free

        return sorted(range(len(self.ledgers)), key=room, reverse=True)

    def grow(self, request: RequestId, num_tokens: int) -> None:
        self._of(request).grow(request, num_tokens)

    def pages(self, request: RequestId) -> RequestPages:
        return replace(self._of(request).pages(request), rank=self._ranks[request])

    def pages_between(self, request: RequestId, first_position: int, end_position: int) -> RequestPages:
        found = self._of(request).pages_between(request, first_position, end_position)
        return replace(found, rank=self._ranks[request])

    def commit(self, request: RequestId, length: int) -> None:
        self._of(request).commit(request, length)

    def commit_all(self, requests: Sequence[RequestId], lengths: Sequence[int]) -> None:
        """See `KvLedger.commit_all`."""
        parts: dict[int, tuple[list[RequestId], list[int]]] = {}
        for request, length in zip(requests, lengths, strict=True):
            ids, ends = parts.setdefault(self.rank_of(request), ([], []))
            ids.append(request)
            ends.append(length)
        for rank, (ids, ends) in parts.items():
            self.ledgers[rank].can_commit(ids, ends)
        for rank, (ids, ends) in parts.items():
            self.ledgers[rank].commit_all(ids, ends)

    def lengths_of(self, requests: Sequence[RequestId]) -> list[int]:
        return [self.length(request) for request in requests]

    def length(self, request: RequestId) -> int:
        return self._of(request).length(request)

    def remember(self, request: RequestId, keys: Sequence[PageKey]) -> int:
        return self._of(request).remember(request, keys)

    def num_cached(self, keys: Sequence[PageKey]) -> int:
        """Of the rank that has most of them; a request that goes elsewhere finds fewer."""
        return max(ledger.num_cached(keys) for ledger in self.ledgers)

    def forget_prefixes(self) -> None:
        for ledger in self.ledgers:
            ledger.forget_prefixes()

    def lease(self, request: RequestId, transfer: TransferId, deadline_s: float = NO_DEADLINE) -> None:
        if transfer in self._transfers:
            raise LeaseExists(transfer)
        self._of(request).lease(request, transfer, deadline_s)
        self._transfers[transfer] = self._ranks[request]

    def end_lease(self, transfer: TransferId) -> None:
        rank = self._transfers.pop(transfer, None)
        if rank is not None:
            self.ledgers[rank].end_lease(transfer)

    def release_index_slot(self, request: RequestId) -> None:
        if request in self._ranks:
            self._of(request).release_index_slot(request)

    def free(self, request: RequestId) -> None:
        rank = self._ranks.pop(request, None)
        if rank is not None:
            self.ledgers[rank].free(request)

    def usage(self) -> LedgerUsage:
        """Of all ranks together."""
        total = Counter[str]()
        for usage in (ledger.usage() for ledger in self.ledgers):
            total.update({field.name: getattr(usage, field.name) for field in fields(usage)})
        return LedgerUsage(**total)

    def check(self) -> None:
        """Raise LedgerCorrupt unless every rank's ledger is whole and has just the requests that it should."""
        for ledger in self.ledgers:
            ledger.check()
        found = {request: rank for rank, each in enumerate(self.ledgers) for request in each.target.lengths()}
        if found != self._ranks:
            raise LedgerCorrupt("the ranks hold other requests than were given to them")
        if self.usage().leases != len(self._transfers):
            raise LedgerCorrupt("the ranks hold other leases than were given to them")

    def _of(self, request: RequestId) -> KvLedger:
        return self.ledgers[self.rank_of(request)]
