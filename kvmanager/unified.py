"""The drafter's KV when it lies in the target's pages: no pool and no slots of its own to go wrong.

Everything a request has in the target's manager, slot, row, pages and length, it has here by being the same
thing; a drafter's layer is found behind the target's layers of the same page.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmanager.ids import RequestId, SlotId
from kvmanager.layout import KvGeometry, require_unifiable
from kvmanager.manager import TargetKvManager
from kvmanager.slots import PageTable


class UnifiedDraftKv:
    """The drafter's view of the target's manager. `num_pages` is 0: it has no pool."""

    num_pages = 0

    def __init__(self, geometry: KvGeometry, target: TargetKvManager) -> None:
        """Raises LayoutRefused for models whose KV cannot share pages."""
        require_unifiable(target.geometry, geometry)
        self.geometry = geometry
        self._target = target

    @property
    def page_table(self) -> PageTable:
        """The target's own table. Read, never write."""
        return self._target.page_table

    def slot(self, request: RequestId) -> SlotId:
        """See `KvManager.slot`."""
        return self._target.slot(request)

    def slots_of(self, requests: Sequence[RequestId]) -> list[SlotId]:
        """See `KvManager.slots_of`."""
        return self._target.slots_of(requests)

    def first_positions_of(self, requests: Sequence[RequestId]) -> list[int]:
        """See `KvManager.first_positions_of`."""
        return self._target.first_positions_of(requests)

    def length(self, request: RequestId) -> int:
        """See `KvManager.length`."""
        return self._target.length(request)
