"""Builds a rank that follows: the same models, pools and computing as the rank that schedules, and no ledger."""

from __future__ import annotations

from kvmanager.layout import KvGeometry
from workers.assembly import Models, lay_ground, make_work
from workers.config import WorkerConfig
from workers.group.follow import Follower, HeardTables, PoolSize
from workers.sampler import Sampler


def build_follower(config: WorkerConfig, models: Models) -> Follower:
    """`config` as the first rank has it; the models of this rank, loaded with its end of the group.

    Raises ModelMismatch for a budget that cannot start, ValueError for models of a worker of one rank.
    """
    if models.ranks is None:
        raise ValueError("a worker of one rank has no other to follow")
    ground = lay_ground(config, models)
    limits = ground.demand.limits

    def size(geometry: KvGeometry, pool_pages: int) -> PoolSize:
        return PoolSize(geometry.pages_for(limits.max_positions), pool_pages)

    target_pages = ground.plan.num_target_pages
    draft = None
    if ground.demand.draft is not None:
        draft = size(
            ground.demand.draft, target_pages if ground.demand.unified else ground.plan.num_draft_pages
        )
    tables = HeardTables(limits, size(ground.demand.target, target_pages), draft)
    sampler = Sampler()
    computing = ground.compute(config, models, tables, sampler)
    return Follower(ranks=models.ranks, work=make_work(models, computing, sampler), tables=tables)
