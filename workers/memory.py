"""How much memory a worker may plan with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from workers.errors import ModelMismatch

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the memory that pools are cut from: all that there is to share, and what of it is free now."""

    total: int
    free: int

    def budget(self, fraction: float, working_bytes: int = 0) -> int:
        """What pools may take so that, with `working_bytes` more for computing, `fraction` of the total is in use."""
        return int(fraction * self.total) - (self.total - self.free) - working_bytes


def memory_of(device: torch.device) -> Memory:
    """A GPU's memory; for a CPU, what this host can still give without swapping, which counts as its total."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading has left over is free
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free)
    available = free_memory_bytes()
    return Memory(available, available)


def free_memory_bytes() -> int:
    """Memory that this host can still give without swapping, in bytes."""
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ModelMismatch(f"{_MEMINFO} does not say MemAvailable: give kv.num_target_pages instead", field="kv")
