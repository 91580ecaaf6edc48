"""The persistent page table: one row, a slot, per live request.

Life of a slot: free, its row all page 0 -> assigned to one request, its row filled with the request's pages
-> released: the row is put back to page 0 first and only then becomes free, so that whoever gets the slot
next never sees the pages of the request before it. Row `max_batch` is the dummy slot: all page 0, for padding
rows of captured graphs, never assigned.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvmanager.errors import (
    DummySlotError,
    InvalidCount,
    LedgerCorrupt,
    RequestExists,
    RowTooShort,
    SlotsExhausted,
    SlotTaken,
    UnknownRequest,
)
from kvmanager.ids import DUMMY_PAGE, PageId, RequestId, SlotId

PageTable = npt.NDArray[np.int32]


class SlotTable:
    """Slots 0 .. max_batch - 1 and the dummy slot `max_batch`."""

    def __init__(self, max_batch: int, max_pages: int) -> None:
        if max_batch < 1:
            raise InvalidCount("max_batch", max_batch, 1)
        if max_pages < 1:
            raise InvalidCount("max_pages", max_pages, 1)
        self.max_batch = max_batch
        self.max_pages = max_pages
        self.dummy_slot = SlotId(max_batch)
        self.table: PageTable = np.full((max_batch + 1, max_pages), DUMMY_PAGE, dtype=np.int32)
        """[max_batch + 1, max_pages] page ids in position order, page 0 beyond a request's pages.

        Readers never write.
        """
        self._slot: dict[RequestId, SlotId] = {}
        self._pages: dict[SlotId, tuple[PageId, ...]] = {}  # what each assigned row must show
        self._holder: dict[SlotId, RequestId] = {}
        self._free = (1 << max_batch) - 1  # bit s is set while slot s is free

    @property
    def num_in_use(self) -> int:
        return len(self._slot)

    @property
    def num_free(self) -> int:
        return self.max_batch - len(self._slot)

    def assign(self, request: RequestId, pages: Sequence[PageId]) -> SlotId:
        """Bind the lowest free slot to a new request and fill its row."""
        if not self._free:
            if request in self._slot:
                raise RequestExists(request)
            raise SlotsExhausted(self.max_batch)
        slot = SlotId((self._free & -self._free).bit_length() - 1)
        self.assign_slot(request, slot, pages)
        return slot

    def assign_slot(self, request: RequestId, slot: SlotId, pages: Sequence[PageId]) -> None:
        """Bind a given slot to a new request and fill its row; how a mirror follows.

        On an error nothing changes.
        """
        if request in self._slot:
            raise RequestExists(request)
        if slot == self.dummy_slot:
            raise DummySlotError(request)
        if not 0 <= slot < self.max_batch:
            raise InvalidCount("slot", slot, 0)
        if slot in self._holder:
            raise SlotTaken(slot, request, self._holder[slot])
        self._refuse_pages(request, pages)
        self._free &= ~(1 << slot)
        self._slot[request] = slot
        self._holder[slot] = request
        self._fill(slot, pages)

    def set_pages(self, request: RequestId, pages: Sequence[PageId]) -> None:
        """Replace the pages of a live request's row. On an error the row stays as it was."""
        slot = self.slot(request)
        self._refuse_pages(request, pages)
        self._fill(slot, pages)

    def slot(self, request: RequestId) -> SlotId:
        """The live request's slot, never the dummy slot. UnknownRequest for one that has none."""
        slot = self._slot.get(request)
        if slot is None:
            raise UnknownRequest(request)
        if slot == self.dummy_slot:
            raise DummySlotError(request)
        return slot

    def slots_of(self, requests: Sequence[RequestId]) -> list[SlotId]:
        """`slot` of each of them: what a decode step asks, in one call."""
        slots = self._slot
        try:
            return [slots[request] for request in requests]
        except KeyError as missing:
            raise UnknownRequest(missing.args[0]) from None

    def release_index_slot(self, request: RequestId) -> bool:
        """Free the request's slot; False when it has none (released before, or a stranger)."""
        slot = self._slot.get(request)
        if slot is None:
            return False
        # Detach, then recycle: in the other order the next request could get a row that shows old pages.
        self.table[slot] = DUMMY_PAGE
        del self._pages[slot]
        del self._slot[request]
        del self._holder[slot]
        self._free |= 1 << slot
        return True

    def assignments(self) -> dict[RequestId, SlotId]:
        """A copy of who has which slot."""
        return dict(self._slot)

    def row(self, slot: SlotId) -> tuple[PageId, ...]:
        """The pages that a bound slot's row must show."""
        return self._pages[slot]

    def _refuse_pages(self, request: RequestId, pages: Sequence[PageId]) -> None:
        if len(pages) > self.max_pages:
            raise RowTooShort(request, need=len(pages), width=self.max_pages)
        if DUMMY_PAGE in pages:
            raise DummySlotError(request)

    def _fill(self, slot: SlotId, pages: Sequence[PageId]) -> None:
        self.table[slot, : len(pages)] = pages
        self.table[slot, len(pages) :] = DUMMY_PAGE
        self._pages[slot] = tuple(pages)

    def check(self) -> None:
        """Raise LedgerCorrupt unless slots are bound one to one and each row shows its request's pages."""
        if self.dummy_slot in self._holder or self.dummy_slot in self._slot.values():
            raise LedgerCorrupt("a live request maps to the dummy slot")
        if {slot: request for request, slot in self._slot.items()} != self._holder:
            raise LedgerCorrupt("slots and requests are not bound one to one")
        if self._holder.keys() != self._pages.keys():
            raise LedgerCorrupt("a slot has pages but no request, or a request but no pages")
        bound = sum(1 << slot for slot in self._holder)
        if bound & self._free or bound | self._free != (1 << self.max_batch) - 1:
            raise LedgerCorrupt("a slot is both free and bound, or neither")
        shown = np.full_like(self.table, DUMMY_PAGE)
        for slot, pages in self._pages.items():
            shown[slot, : len(pages)] = pages
        for wrong in np.flatnonzero((shown != self.table).any(axis=1)):
            holder = self._holder.get(SlotId(int(wrong)), "no one")
            raise LedgerCorrupt(f"row {wrong}, held by {holder}, does not show its request's pages")
