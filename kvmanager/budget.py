"""From a memory budget to page counts: the budget bounds everything, target and draft together.

A request has as many positions in the draft pool as in the target pool, so both pools are cut for the same
number of tokens. What the memory holds is affine in that number:

    bytes(tokens) = slope x tokens + intercept
    slope         = bytes per token of target + bytes per token of draft
    intercept     = the dummy page of each pool + each pool's page table + staging

With unified pages there is one pool and one table, and its pages hold both models' bytes.

A drafter with a window keeps so many positions of a request and no more, however long it is. Its pool is part of the
intercept then: as many windows as there are slots, or as many as the budget has room for beside one full request.

The drafter is sized by the runtime `max_seq_len`, as the target is, and there is no dense arena.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from kvmanager.errors import BudgetInfeasible, InvalidCount
from kvmanager.layout import DraftKv, KvGeometry, require_unifiable
from kvmanager.manager import BatchLimits

TABLE_ENTRY_BYTES = 4  # int32


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDemand:
    """What is to be served. `staging_bytes`: transfer buffers and the like that live in the same budget."""

    target: KvGeometry
    draft: KvGeometry | None
    limits: BatchLimits
    staging_bytes: int = 0
    draft_kv: DraftKv = "mirrored"

    def __post_init__(self) -> None:
        if self.unified and self.draft is not None:
            require_unifiable(self.target, self.draft)
        if self.staging_bytes < 0:
            raise InvalidCount("staging_bytes", self.staging_bytes, 0)

    @property
    def geometries(self) -> tuple[KvGeometry, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def unified(self) -> bool:
        """Whether the drafter's layers lie in the target's pages; without a drafter there is nothing to unify."""
        return self.draft_kv == "unified" and self.draft is not None

    @property
    def pools(self) -> tuple[KvGeometry, ...]:
        """The geometries that have pool and page table of their own."""
        return self.geometries[:1] if self.unified else self.geometries

    @property
    def bytes_per_token(self) -> int:
        """The slope: KV bytes of one position, target and draft together; a window's are no part of it."""
        return sum(geometry.bytes_per_token for geometry in self.geometries if geometry.window is None)

    def pages_per_request(self, geometry: KvGeometry) -> int:
        """Pages that a request of max_seq_len, look-ahead included, holds at once, at most."""
        return geometry.most_pages(self.limits.max_positions, self.limits.lookahead)

    @property
    def window_pages(self) -> int:
        """Pages of the drafter's windows, one for every slot; 0 for a drafter without, whose pages grow with tokens."""
        if self.draft is None or self.draft.window is None:
            return 0
        return self.limits.max_batch * self.pages_per_request(self.draft)

    @property
    def table_bytes(self) -> int:
        """Every pool's page table, the dummy row included."""
        rows = self.limits.max_batch + 1
        return sum(rows * self.pages_per_request(geometry) * TABLE_ENTRY_BYTES for geometry in self.pools)

    @property
    def fixed_bytes(self) -> int:
        """The intercept: what is spent before the first token."""
        return (
            sum(geometry.page_bytes for geometry in self.geometries) + self.table_bytes + self.staging_bytes
        )

    @property
    def least_bytes(self) -> int:
        """The smallest budget that starts: one request of max_seq_len, look-ahead included, in both pools."""
        return self.fixed_bytes + sum(
            self.pages_per_request(geometry) * geometry.page_bytes for geometry in self.geometries
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """Page counts for `KvLedger`, dummy pages included, and what they cost.

    `num_tokens` fit in both pools at once; a window's pool does not limit them.
    """

    num_target_pages: int
    num_draft_pages: int
    num_tokens: int
    target_bytes: int
    draft_bytes: int
    table_bytes: int
    staging_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.target_bytes + self.draft_bytes + self.table_bytes + self.staging_bytes


def plan_from_memory(demand: KvDemand, budget_bytes: int) -> PagePlan:
    """Cut `budget_bytes` into both pools, tables and staging.

    BudgetInfeasible says what is short by how much.
    """
    if budget_bytes < demand.least_bytes:
        raise BudgetInfeasible(
            f"the KV budget is {budget_bytes} B, but one request of max_seq_len {demand.limits.max_seq_len} "
            f"(+ {demand.limits.lookahead} look-ahead) needs {demand.least_bytes} B: {_account(demand)}; "
            f"{_what_would_fit(demand, budget_bytes)}"
        )
    if demand.draft is not None and demand.window_pages:
        return _plan_windows(demand, demand.draft, budget_bytes)
    num_tokens = (budget_bytes - demand.fixed_bytes) // demand.bytes_per_token
    target_pages = num_tokens // demand.target.page_size
    if demand.draft is None or demand.unified:
        return plan_from_pages(demand, num_target_pages=target_pages + 1, num_draft_pages=0)
    draft_pages = num_tokens // demand.draft.page_size
    # Rounding down to whole pages may cost a pool the last page of the one request that must fit. The check
    # of `least_bytes` has shown that both pools can have theirs, so the short one gets it from the other.
    spare = budget_bytes - demand.fixed_bytes
    least_target = demand.target.pages_for(demand.limits.max_positions)
    least_draft = demand.draft.pages_for(demand.limits.max_positions)
    if target_pages < least_target:
        target_pages = least_target
        draft_pages = (spare - target_pages * demand.target.page_bytes) // demand.draft.page_bytes
    elif draft_pages < least_draft:
        draft_pages = least_draft
        target_pages = (spare - draft_pages * demand.draft.page_bytes) // demand.target.page_bytes
    return plan_from_pages(demand, num_target_pages=target_pages + 1, num_draft_pages=draft_pages + 1)


def _plan_windows(demand: KvDemand, draft: KvGeometry, budget_bytes: int) -> PagePlan:
    spare = budget_bytes - demand.fixed_bytes
    least_target_bytes = demand.pages_per_request(demand.target) * demand.target.page_bytes
    draft_pages = min(demand.window_pages, (spare - least_target_bytes) // draft.page_bytes)
    target_pages = (spare - draft_pages * draft.page_bytes) // demand.target.page_bytes
    return plan_from_pages(demand, num_target_pages=target_pages + 1, num_draft_pages=draft_pages + 1)


def plan_from_pages(demand: KvDemand, *, num_target_pages: int, num_draft_pages: int) -> PagePlan:
    """Price explicit page counts, dummy pages included. Unified pages count as target pages.

    BudgetInfeasible for counts that do not hold one request of max_seq_len.
    """
    counts = [("target", demand.target, num_target_pages)]
    if demand.draft is not None and not demand.unified:
        counts.append(("draft", demand.draft, num_draft_pages))
    elif num_draft_pages and demand.unified:
        raise BudgetInfeasible(
            f"{num_draft_pages} draft pages were asked for, but the drafter's layers lie in the target's pages"
        )
    elif num_draft_pages:
        raise BudgetInfeasible(f"{num_draft_pages} draft pages were asked for, but there is no drafter")
    for name, geometry, num_pages in counts:
        need = demand.pages_per_request(geometry) + 1
        if num_pages < need:
            raise BudgetInfeasible(
                f"{num_pages} {name} pages of {geometry.page_size} tokens were asked for, but max_seq_len "
                f"{demand.limits.max_seq_len} (+ {demand.limits.lookahead} look-ahead) needs {need}, "
                "the dummy page included"
            )
    draft_bytes = 0
    if demand.draft is not None:
        draft_bytes = (num_target_pages if demand.unified else num_draft_pages) * demand.draft.page_bytes
    return PagePlan(
        num_target_pages=num_target_pages,
        num_draft_pages=num_draft_pages,
        num_tokens=min(
            (num_pages - 1) * geometry.page_size
            for _, geometry, num_pages in counts
            if geometry.window is None
        ),
        target_bytes=num_target_pages * demand.target.page_bytes,
        draft_bytes=draft_bytes,
        table_bytes=demand.table_bytes,
        staging_bytes=demand.staging_bytes,
    )


def _account(demand: KvDemand) -> str:
    draft = f"{demand.draft.bytes_per_token if demand.draft is not None else 0} for the drafter"
    if demand.draft is not None and demand.draft.window is not None:
        draft += f" ({demand.pages_per_request(demand.draft)} pages of a window of {demand.draft.window})"
    dummies = demand.fixed_bytes - demand.table_bytes - demand.staging_bytes
    return (
        f"{demand.target.bytes_per_token} B per token for the target, {draft}, "
        f"{dummies} B of dummy pages, {demand.table_bytes} B of tables, {demand.staging_bytes} B of staging"
    )


def _what_would_fit(demand: KvDemand, budget_bytes: int) -> str:
    """The largest max_seq_len that this budget would start with; `least_bytes` only grows with it."""

    def too_dear(max_seq_len: int) -> bool:
        limits = replace(demand.limits, max_seq_len=max_seq_len)
        return replace(demand, limits=limits).least_bytes > budget_bytes

    fits = bisect_left(range(1, demand.limits.max_seq_len), True, key=too_dear)
    return f"max_seq_len {fits} would fit" if fits else "not even max_seq_len 1 would fit"
