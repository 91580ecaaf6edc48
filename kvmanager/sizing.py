"""Whether a pair starts in a given memory, and what it costs: the whole calculation behind `slipstream plan`.

What runs is paged: both pools are cut from one budget by `plan_from_memory`. For comparison a plan also prices
the dense arena that draft models were given elsewhere: one row of max_seq_len tokens per request of the batch
and one more for the dummy slot, filled or not.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.budget import KvDemand, PagePlan, plan_from_memory
from kvmanager.errors import BudgetInfeasible, InvalidCount
from kvmanager.layout import KvGeometry
from kvmanager.manager import BatchLimits
from kvmanager.shape import DEFAULT_BLOCK_SIZE, KvShape


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingRequest:
    """What is to be served, per rank. `dtype` None takes each checkpoint's own.

    `attention_dp`: every rank runs whole requests with all KV heads, so `tensor_parallel` divides nothing.
    """

    target: KvShape
    drafter: KvShape | None
    max_seq_len: int
    max_batch: int
    budget_bytes: int
    tensor_parallel: int = 1
    attention_dp: bool = False
    page_size: int = 16
    dtype: str | None = None
    staging_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "budget_bytes"):
            if getattr(self, name) < 1:
                raise InvalidCount(name, getattr(self, name), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """One rank's memory. `plan` is None when the pair does not start, and `reason` says why.

    `arena_bytes`: what a dense draft arena would take, 0 without a drafter.
    """

    request: SizingRequest
    demand: KvDemand
    plan: PagePlan | None
    reason: str
    arena_bytes: int
    notes: tuple[str, ...]

    @property
    def starts(self) -> bool:
        return self.plan is not None

    @property
    def full_requests(self) -> int:
        """Requests of max_seq_len tokens, look-ahead included, that both pools hold at once."""
        if self.plan is None:
            return 0
        pools = [(self.demand.target, self.plan.num_target_pages)]
        if self.demand.draft is not None:
            pools.append((self.demand.draft, self.plan.num_draft_pages))
        return min(
            (num_pages - 1) // self.demand.pages_per_request(geometry) for geometry, num_pages in pools
        )


def size(request: SizingRequest) -> Sizing:
    """Work it out. Raises ConfigFieldError for heads that do not divide, InvalidCount for senseless counts."""
    notes = [*request.target.notes]
    ranks = 1 if request.attention_dp else request.tensor_parallel
    target = request.target.geometry(page_size=request.page_size, tensor_parallel=ranks, dtype=request.dtype)
    draft: KvGeometry | None = None
    lookahead = 1
    if request.drafter is not None:
        draft = request.drafter.geometry(
            page_size=request.page_size, tensor_parallel=ranks, dtype=request.dtype
        )
        notes += [f"drafter: {note}" for note in request.drafter.notes]
        lookahead = request.drafter.verify_width or DEFAULT_BLOCK_SIZE
        if request.drafter.block_size is None:
            notes.append(f"the drafter's config names no block_size: {DEFAULT_BLOCK_SIZE} assumed")
    limits = BatchLimits(max_batch=request.max_batch, max_seq_len=request.max_seq_len, lookahead=lookahead)
    demand = KvDemand(target=target, draft=draft, limits=limits, staging_bytes=request.staging_bytes)
    plan, reason = None, ""
    try:
        plan = plan_from_memory(demand, request.budget_bytes)
    except BudgetInfeasible as error:
        reason = str(error)
    return Sizing(
        request=request,
        demand=demand,
        plan=plan,
        reason=reason,
        arena_bytes=dense_arena_bytes(draft, limits) if draft is not None else 0,
        notes=tuple(notes),
    )


def dense_arena_bytes(draft: KvGeometry, limits: BatchLimits) -> int:
    """A private draft arena of [max_batch + 1, layers, 2, max_seq_len, heads, head_dim], as others allocate."""
    return (limits.max_batch + 1) * limits.max_seq_len * draft.bytes_per_token
