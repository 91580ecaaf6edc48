"""Builds a rank that follows: the same models, pools and computing as the rank that schedules, and no ledger.

In a split role it has a transfer port of its own, over its own pools, which does what the first rank orders.
"""

from __future__ import annotations

import torch

from kvmanager.layout import KvGeometry
from transceiver.remote import PortServer
from workers.assembly import (
    MakePort,
    Models,
    lay_ground,
    load_models,
    make_work,
    nixl_rank_port,
    rank_identity,
)
from workers.config import WorkerConfig
from workers.device import compute_device
from workers.group.follow import Follower, HeardTables, PoolSize
from workers.group.meeting import Meeting, attend
from workers.group.progress import Progress
from workers.group.ranks import Seat
from workers.group.streams import stream_to_first
from workers.sampler import Sampler


class FollowingRank:
    """A rank that follows, as the process hosts it that is there for nothing else."""

    def __init__(self, config: WorkerConfig, seat: Seat, meeting: Meeting) -> None:
        """Meet the others and load. Slow; raises ModelMismatch as the first rank does, or GroupBroken.

        A rank that is refused stays in its group until its process ends: the refusal shall be heard before the others
        break.
        """
        torch.set_num_threads(config.num_threads)
        self._num_threads = config.num_threads
        self._ranks = attend(seat, meeting, compute_device(config.device))
        self._follower = build_follower(config, load_models(config, self._ranks))

    def run(self) -> None:
        """Takes its thread until the group ends: returns when it is told to, raises GroupBroken or what failed here."""
        torch.set_num_threads(self._num_threads)  # of this thread, which may be another one
        self._follower.run()


def build_follower(config: WorkerConfig, models: Models, make_port: MakePort = nixl_rank_port) -> Follower:
    """`config` as the first rank has it; the models of this rank, loaded with its end of the group.

    Raises ModelMismatch for a budget that cannot start, ValueError for models of a worker of one rank.
    """
    if models.ranks is None:
        raise ValueError("a worker of one rank has no other to follow")
    ground = lay_ground(config, models)
    limits = ground.demand.limits

    def size(geometry: KvGeometry, pool_pages: int) -> PoolSize:
        return PoolSize(ground.demand.pages_per_request(geometry), pool_pages)

    target_pages = ground.plan.num_target_pages
    draft = None
    if ground.demand.draft is not None:
        draft = size(
            ground.demand.draft, target_pages if ground.demand.unified else ground.plan.num_draft_pages
        )
    tables = HeardTables(limits, size(ground.demand.target, target_pages), draft)
    sampler = Sampler()
    computing = ground.compute(config, models, tables, sampler)
    progress = Progress(computing.runner.written)
    server: PortServer | None = None
    if config.role != "aggregated":
        stream, worker = stream_to_first(models.ranks)
        identity = rank_identity(config, models, ground.demand, worker)
        server = PortServer(make_port(identity, ground.memory.regions), stream, progress.behind)
    return Follower(
        ranks=models.ranks,
        work=make_work(models, computing, sampler),
        tables=tables,
        progress=progress,
        server=server,
    )
