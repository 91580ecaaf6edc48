"""How much memory a worker may plan with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import torch

from kvmanager.budget import PagePlan
from workers.config import EveryRequestFits, FixedPages, KvBudget, MemoryFraction
from workers.errors import ModelMismatch

_MEMINFO, _CGROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
# How a container is told of its memory, by control groups of version 2 and of version 1: where, its limit, what it
# uses, and what of that is files' contents that go at need.
_CONTAINERS = (
    (".", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the memory that pools are cut from: all that there is to share, and what of it is free now."""

    total: int
    free: int

    def budget(self, fraction: float, working_bytes: int = 0) -> int:
        """What pools may take so that, with `working_bytes` more for computing, `fraction` of the total is in use."""
        return int(fraction * self.total) - (self.total - self.free) - working_bytes


def memory_of(device: torch.device) -> Memory:
    """A GPU's memory; for a CPU, what this process can still be given, which counts as its total."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left over is free
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free)
    available = free_memory_bytes()
    return Memory(available, available)


def free_memory_bytes(meminfo: Path = _MEMINFO, cgroups: Path = _CGROUPS) -> int:
    """Memory that this host can still give without swapping, and that a container's limit lets this process have."""
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return max(min([int(value.split()[0]) * 1024, *_left_by_limits(cgroups)]), 0)
    raise ModelMismatch(f"{meminfo} does not say MemAvailable, as Linux does since 3.14", field="kv")


def _left_by_limits(cgroups: Path) -> Iterator[int]:
    """What each limit of the container that this process is in leaves; nothing where there is none."""
    for place, limit, use, files in _CONTAINERS:
        try:
            allowed, used, stat = (
                (cgroups / place / name).read_text().strip() for name in (limit, use, "memory.stat")
            )
        except OSError:
            continue
        if allowed != "max":
            counts = dict(line.split() for line in stat.splitlines())
            yield int(allowed) - int(used) + int(counts.get(files, 0))


def no_room(plan: PagePlan, working_bytes: int, free_bytes: int, asked: KvBudget) -> ModelMismatch:
    """What is short where the pools that were asked for find no room, and what to ask instead."""
    need_bytes = plan.total_bytes + working_bytes
    match asked:
        case FixedPages(num_target_pages=pages):
            remedy = f"lower num_kv_pages (--kv-pages), which is {pages}"
        case EveryRequestFits():
            remedy = "lower max_batch or max_seq_len, or give num_kv_pages or memory_fraction"
        case MemoryFraction(fraction=fraction):
            remedy = f"lower memory_fraction, which is {fraction:g}"
        case _:
            assert_never(asked)
    parts = {
        f"{plan.num_target_pages} target pages": plan.target_bytes,
        f"{plan.num_draft_pages} draft pages" if plan.num_draft_pages else "draft layers": plan.draft_bytes,
        "tables and staging": plan.table_bytes + plan.staging_bytes,
        "computing": working_bytes,
    }
    account = ", ".join(f"{_gib(size)} for {what}" for what, size in parts.items() if size)
    found = f"{_gib(free_bytes)} GiB are free"
    if free_bytes >= need_bytes:  # and yet it was not given
        found += ", of which this process may not have so much"
    return ModelMismatch(
        f"the KV pools need {_gib(need_bytes)} GiB of memory ({account}), and {found}: {remedy}", field="kv"
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.2f}"
