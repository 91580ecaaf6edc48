"""Where the requests of a step lie: their lengths, and their rows of the page tables.

On a worker of one rank, and on the rank of a group that schedules, the ledger knows (`LedgerTables`, `DividedTables`).
The other ranks of a group have no ledger: what they need comes with every step (`workers.group`).
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

import numpy as np

from kvmanager.ids import RequestId
from kvmanager.ledger import KvLedger
from kvmanager.ledgers import DividedLedger
from kvmanager.manager import BatchLimits
from kvmanager.slots import PageTable


class StepTables(Protocol):
    """Read while a step is prepared. Rows are copies: a ledger rewrites its tables between steps."""

    @property
    def limits(self) -> BatchLimits: ...

    @property
    def has_draft(self) -> bool: ...

    def lengths_of(self, requests: Items[RequestId]) -> list[int]:
        """Positions whose KV is committed, in target and draft alike."""

    def target_rows(self, requests: Items[RequestId]) -> PageTable:
        """Page ids in position order, int32 [B, max_pages]."""

    def draft_rows(self, requests: Items[RequestId], *, dummy: bool = False) -> PageTable:
        """Likewise of the drafter's KV. `dummy`: the dummy slot's row for everyone, which only a fault asks for."""

    def draft_begins_of(self, requests: Items[RequestId]) -> list[int]:
        """The positions where rows of the drafter's table begin: 0 but of a drafter with a window."""


class LedgerTables:
    """The tables of a ledger."""

    def __init__(self, ledger: KvLedger) -> None:
        self._ledger = ledger

    @property
    def limits(self) -> BatchLimits:
        return self._ledger.limits

    @property
    def has_draft(self) -> bool:
        return self._ledger.draft is not None

    def lengths_of(self, requests: Items[RequestId]) -> list[int]:
        return self._ledger.lengths_of(requests)

    def target_rows(self, requests: Items[RequestId]) -> PageTable:
        return self._ledger.target.page_table[self._ledger.slots_of(requests)]

    def draft_rows(self, requests: Items[RequestId], *, dummy: bool = False) -> PageTable:
        draft = self._ledger.draft
        if draft is None:
            raise ValueError("this worker has no drafter")
        slots = [self._ledger.dummy_slot] * len(requests) if dummy else draft.slots_of(requests)
        return draft.page_table[slots]

    def draft_begins_of(self, requests: Items[RequestId]) -> list[int]:
        draft = self._ledger.draft
        if draft is None:
            raise ValueError("this worker has no drafter")
        return draft.first_positions_of(requests)


class DividedTables:
    """The tables of ranks with requests of their own: a row names pages of its request's rank."""

    def __init__(self, ledger: DividedLedger) -> None:
        self._ledger = ledger
        self._tables = [LedgerTables(each) for each in ledger.ledgers]

    @property
    def limits(self) -> BatchLimits:
        return self._ledger.limits

    @property
    def has_draft(self) -> bool:
        return self._ledger.draft_geometry is not None

    def lengths_of(self, requests: Items[RequestId]) -> list[int]:
        return self._ledger.lengths_of(requests)

    def target_rows(self, requests: Items[RequestId]) -> PageTable:
        return np.concatenate([self._of(request).target_rows([request]) for request in requests])

    def draft_rows(self, requests: Items[RequestId], *, dummy: bool = False) -> PageTable:
        return np.concatenate([self._of(request).draft_rows([request], dummy=dummy) for request in requests])

    def draft_begins_of(self, requests: Items[RequestId]) -> list[int]:
        return [begin for request in requests for begin in self._of(request).draft_begins_of([request])]

    def _of(self, request: RequestId) -> LedgerTables:
        return self._tables[self._ledger.rank_of(request)]
