"""A rank that follows: it hears of a step, computes its share, and keeps nothing of it but pages.

    hear ──▶ look at the step ──▶ vote ──▶ forward passes ──▶ cast ──▶ hear ...        until told to stop, or broken

Whatever fails here closes the group, and with it the worker: a rank has no way on by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import msgspec
import torch

from drafter.counts import TokenCounts
from kvmanager.ids import RequestId
from kvmanager.manager import BatchLimits
from kvmanager.slots import PageTable
from transceiver.remote import PortServer
from workers.group.lead import digest
from workers.group.plan import Beat, Decode, Prefill, Row, Step, Stop, decode, unpack_rows
from workers.group.progress import Progress
from workers.group.ranks import GroupRanks
from workers.group.work import StepWork
from workers.sequence import Sequence

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Of one pool's page tables: pages of a row, and of the pool."""

    row_pages: int
    pool_pages: int


class HeardTables:
    """Implements `StepTables` from what the present step brought. `draft` is None without a drafter."""

    def __init__(self, limits: BatchLimits, target: PoolSize, draft: PoolSize | None) -> None:
        self.limits = limits
        self._target, self._draft = target, draft
        self._place: dict[RequestId, int] = {}
        self._lengths: list[int] = []
        self._draft_begins: list[int] = []
        self._target_rows: PageTable = unpack_rows([], target.row_pages, target.pool_pages)
        self._draft_rows: PageTable | None = None

    @property
    def has_draft(self) -> bool:
        return self._draft is not None

    def show(self, rows: Items[Row]) -> None:
        """The requests of the coming step. Raises ValueError for rows that no pool has."""
        self._place = {row.request_id: place for place, row in enumerate(rows)}
        self._lengths = [row.length for row in rows]
        self._draft_begins = [row.draft_begin for row in rows]
        target, draft = self._target, self._draft
        self._target_rows = unpack_rows(
            [row.target_pages for row in rows], target.row_pages, target.pool_pages
        )
        if draft is not None:
            self._draft_rows = unpack_rows(
                [row.draft_pages for row in rows], draft.row_pages, draft.pool_pages
            )

    def lengths_of(self, requests: Items[RequestId]) -> list[int]:
        return [self._lengths[self._place[request]] for request in requests]

    def target_rows(self, requests: Items[RequestId]) -> PageTable:
        return self._target_rows[[self._place[request] for request in requests]]

    def draft_rows(self, requests: Items[RequestId], *, dummy: bool = False) -> PageTable:
        if self._draft_rows is None:
            raise ValueError("this worker has no drafter")
        return self._draft_rows[[self._place[request] for request in requests]]

    def draft_begins_of(self, requests: Items[RequestId]) -> list[int]:
        return [self._draft_begins[self._place[request]] for request in requests]


class Follower:
    """Runs the steps of one rank that does not schedule. `run` takes its thread until the group ends."""

    def __init__(
        self,
        *,
        ranks: GroupRanks,
        work: StepWork,
        tables: HeardTables,
        progress: Progress,
        server: PortServer | None,
    ) -> None:
        """`server` ships this rank's share of transfers; None on an aggregated worker."""
        self._ranks = ranks
        self._work = work
        self._tables = tables
        self._progress = progress
        self._server = server
        ranks.started()

    def run(self) -> None:
        """Returns once the first rank says so. Raises GroupBroken, or what failed here."""
        try:
            with torch.inference_mode():
                while self._follow():
                    pass
        finally:
            self._ranks.close()
            if self._server is not None:
                self._server.close()

    def _follow(self) -> bool:
        step = self._heard()
        if isinstance(step, Stop):
            return False
        self._ranks.vote()
        match step:
            case Beat():
                pass
            case Prefill(chunks):
                sequences = [
                    replace(_sequence(chunk.row), num_prompt_tokens=chunk.num_prompt_tokens)
                    for chunk in chunks
                ]
                self._work.prefill(sequences, step)
            case Decode(rows, anchors):
                sequences = [_sequence(row, anchor) for row, anchor in zip(rows, anchors, strict=True)]
                self._ranks.remember(digest(self._work.decode(sequences, step)))
        self._ranks.cast()
        if self._server is not None:
            self._progress.launched()
        return True

    def _heard(self) -> Step:
        """The next step with its tables shown. One that makes no sense here breaks the group."""
        message = self._ranks.hear()
        try:
            step = decode(message)
            match step:
                case Prefill(chunks):
                    self._tables.show(self._work.own([chunk.row for chunk in chunks]))
                case Decode(rows):
                    self._tables.show(self._work.own(rows))
                case _:
                    pass
        except (msgspec.DecodeError, ValueError):
            _log.exception("a step that this rank cannot follow")
            raise
        return step


def _sequence(row: Row, *newest: int) -> Sequence:
    """As much of a request as forward passes and choices look at."""
    # Here the newest token is the whole output.
    num_banned = row.num_banned + len(newest) if row.num_banned else 0
    sampling = msgspec.structs.replace(
        row.sampling, min_tokens=num_banned, stop_token_ids=row.banned, ignore_eos=True
    )
    return Sequence(
        request_id=row.request_id,
        num_prompt_tokens=row.length,
        sampling=sampling,
        eos_token_ids=frozenset(),
        drafting=row.drafting,
        max_draft_tokens=0,
        draft_origin=row.draft_origin,
        output=list(newest),
        counts=TokenCounts.of(row.counts) if row.counts is not None else None,
    )
