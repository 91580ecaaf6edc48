"""One process for each GPU, started by torchrun, or one process alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Process:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this process writes results and talks."""
        return self.rank == 0

    def wait_for_all(self) -> None:
        """Return once every process has come here."""
        if self.world > 1:
            dist.barrier()

    def gather(self, found: T) -> list[T]:
        """What every process found, in order of rank."""
        if self.world == 1:
            return [found]
        everyones: list[T | None] = [None] * self.world
        dist.all_gather_object(everyones, found)
        return [one for one in everyones if one is not None]

    def say(self, text: str) -> None:
        """A line of progress, once."""
        if self.leads:
            print(text, flush=True)


@contextmanager
def process(device: str) -> Iterator[Process]:
    """Join the peers that torchrun started (RANK, WORLD_SIZE, LOCAL_RANK); `device` is "cuda" or "cpu"."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    place = (
        torch.device(device, int(os.environ.get("LOCAL_RANK", "0")))
        if device == "cuda"
        else torch.device(device)
    )
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if world > 1:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Process(rank, world, place)
    finally:
        if world > 1:
            dist.destroy_process_group()
