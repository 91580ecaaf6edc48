"""What a captured step reads of its requests: a row of int32 each, filled on the host and copied in one piece.

    [ anchor | start | draft start | target's page table row ... | drafter's page table row ... ]

Life of the rows: a step fills those of its live requests and makes padding of the rest of its graph's batch, and the
graphs that the step replays read them. The host waits for the device once a step, so nothing is overwritten that the
device has yet to read. Padding is a request without context whose pages are all the dummy page.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvmanager.ids import DUMMY_PAGE
from kvmanager.slots import PageTable
from workers.attention.blocks import PlanRows

_ANCHOR, _START, _DRAFT_START, _PAGES = range(4)


class StepRows:
    """Rows of up to `max_batch` requests. `draft_pages`: 0 on a worker without a drafter."""

    def __init__(self, max_batch: int, target_pages: int, draft_pages: int, device: torch.device) -> None:
        self._draft_at = _PAGES + target_pages
        shape = (max_batch, self._draft_at + draft_pages)
        with torch.inference_mode(False):
            self._pinned = torch.zeros(shape, dtype=torch.int32).pin_memory()
            self._device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._host = self._pinned.numpy()

    def anchors(self, batch: int) -> Tensor:
        """Each request's last chosen token, int32 [batch]."""
        return self._device[:batch, _ANCHOR]

    def starts(self, batch: int) -> Tensor:
        """The position of each anchor, int32 [batch]."""
        return self._device[:batch, _START]

    def target(self, batch: int) -> PlanRows:
        """Where the target's keys and values lie."""
        return PlanRows(self.starts(batch), self._device[:batch, _PAGES : self._draft_at])

    def draft(self, batch: int) -> PlanRows:
        """Where the drafter's keys and values lie."""
        return PlanRows(self._device[:batch, _DRAFT_START], self._device[:batch, self._draft_at :])

    def fill(
        self,
        batch: int,
        anchors: Sequence[int],
        starts: Sequence[int],
        target: PageTable,
        draft_starts: Sequence[int] = (),
        draft: PageTable | None = None,
    ) -> None:
        """Rows of len(anchors) requests and padding up to `batch`, on their way to the device when this returns.

        target, draft: rows of the page tables. Without `draft` the drafter's columns stay as they were: a step that
        does not draft reads none of them.
        """
        live = len(anchors)
        rows = self._host[:live]
        rows[:, _ANCHOR] = anchors
        rows[:, _START] = starts
        rows[:, _PAGES : self._draft_at] = target
        if draft is not None:
            rows[:, _DRAFT_START] = draft_starts
            rows[:, self._draft_at :] = draft
        self._pad(live, batch)
        self._device[:batch].copy_(self._pinned[:batch], non_blocking=True)

    def park(self, batch: int) -> None:
        """Make the first `batch` rows padding: what reads them then writes to the dummy page alone."""
        self._pad(0, batch)
        self._device[:batch].copy_(self._pinned[:batch])

    def _pad(self, live: int, batch: int) -> None:
        self._host[live:batch, :_PAGES] = 0
        self._host[live:batch, _PAGES:] = DUMMY_PAGE
