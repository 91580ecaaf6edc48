"""A worker of several ranks of which the first is in this process, and the others are processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch.distributed as dist

from tests.workers.random_pair import load_pair
from workers.assembly import Assembly, build
from workers.config import WorkerConfig
from workers.group.ranks import GroupRanks, Seat
from workers.pairs import ModelPair


@dataclass(frozen=True)
class ProcessGroup:
    assembly: Assembly
    followers: list[subprocess.Popen[bytes]]


@contextmanager
def group_of_processes(
    size: int, directory: Path, config: WorkerConfig, *, timeout_s: float = 60.0
) -> Iterator[ProcessGroup]:
    """The pair lies in `directory`, as `write_random_pair` left it. Followers that still run at the end are killed."""
    pair = ModelPair("random", directory / "target", directory / "drafter")
    if size == 1:
        assembly = build(config, load_pair(pair))
        try:
            yield ProcessGroup(assembly, [])
        finally:
            assembly.close()
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seats = [Seat(rank=rank, size=size, timeout_s=timeout_s, start_s=120.0) for rank in range(size)]
    followers = []
    for seat in seats[1:]:
        told = [msgspec.json.encode(value).decode() for value in (seat, config)]
        command = [sys.executable, "-m", "tests.workers.group_rank", str(directory), *told, str(store.port)]
        followers.append(subprocess.Popen(command))
    try:
        models = load_pair(pair, GroupRanks(seats[0], store), attention_dp=config.attention_dp)
        assembly = build(config, models)
        try:
            yield ProcessGroup(assembly, followers)
        finally:
            assembly.close()
    finally:
        for follower in followers:
            follower.kill()
            follower.wait()
