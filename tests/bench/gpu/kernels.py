"""Where a captured graph's time goes: its kernels by name, and the time in which none runs."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile

from tests.bench.gpu.figures import report

_REPLAYS = 3
_LONGEST_NAME = 60


def report_kernels(figure: str, x: int, graph: torch.cuda.CUDAGraph, most: int = 16) -> None:
    """A line for each of the `most` costliest kernels of one replay, then one for the gaps between kernels."""
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    events = [e for e in profiled.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    spent_us, calls = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in events:
        name = event.name[:_LONGEST_NAME]
        spent_us[name] += event.time_range.end - event.time_range.start
        calls[name] += 1
    for name in sorted(spent_us, key=lambda name: -spent_us[name])[:most]:
        report(f"{figure}: {calls[name] // _REPLAYS} x {name}", x, spent_us[name] / _REPLAYS, "us")
    idle_us = sum(
        max(after.time_range.start - before.time_range.end, 0) for before, after in pairwise(events)
    )
    report(f"{figure}: no kernel", x, idle_us / _REPLAYS, "us")
