"""A worker's group in one process: a thread per following rank, joined by the gloo that joins processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from workers.assembly import Assembly, MakePort, Models, build, nixl_rank_port
from workers.config import WorkerConfig
from workers.group.exchange import Connect
from workers.group.follow import Follower
from workers.group.rank import build_follower
from workers.group.ranks import GroupRanks, Seat

TIMEOUT_S = 60.0  # of a loaded machine

Result = TypeVar("Result")
LoadRank = Callable[[GroupRanks], Models]


@contextmanager
def group(
    size: int,
    load: LoadRank,
    config: WorkerConfig,
    *,
    change: Callable[[int, Follower], None] = lambda rank, follower: None,
    errors: list[BaseException] | None = None,
    make_port: MakePort = nixl_rank_port,
    timeout_s: float = TIMEOUT_S,
    connect: Callable[[Seat, Store], Connect] | None = None,
) -> Iterator[Assembly]:
    """The first rank's assembly; the others follow until the end.

    `change` is shown each of them before. `errors` gets what ended them; without it nothing may. `connect`: what ranks'
    tensors pass over, as if they lay on a device.
    """
    store = dist.HashStore()
    ended: list[BaseException] = []

    def ranks(rank: int) -> GroupRanks:
        seat = Seat(rank=rank, size=size, timeout_s=timeout_s, start_s=TIMEOUT_S)
        return GroupRanks(seat, store, connect=None if connect is None else connect(seat, store))

    def follow(rank: int) -> None:
        end = ranks(rank)
        try:
            follower = build_follower(config, load(end), make_port)
            change(rank, follower)
            follower.run()
        except BaseException as error:
            ended.append(error)
            end.close()

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    first = ranks(0)
    try:
        assembly = build(config, load(first), make_port)
        yield assembly
        assembly.close()
    finally:
        first.close()
        for thread in threads:
            thread.join(TIMEOUT_S)
    if errors is None:
        assert not ended, ended
    else:
        errors += ended


def on_ranks(size: int, call: Callable[[GroupRanks], Result]) -> list[Result]:
    """What `call` returns on each rank of a group, in rank order."""
    store = dist.HashStore()

    def run(rank: int) -> Result:
        end = GroupRanks(Seat(rank=rank, size=size, timeout_s=TIMEOUT_S, start_s=TIMEOUT_S), store)
        try:
            return call(end)
        finally:
            end.least([0])  # nobody leaves while another still waits for its part
            end.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
