"""How much memory a worker may plan with."""

from __future__ import annotations

from pathlib import Path

from workers.errors import ModelMismatch

_MEMINFO = Path("/proc/meminfo")


def free_memory_bytes() -> int:
    """Memory that this host can still give without swapping, in bytes."""
    for line in _MEMINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ModelMismatch(f"{_MEMINFO} does not say MemAvailable: give kv.num_target_pages instead", field="kv")
