"""Where a captured graph's, or any device work's, time goes: its kernels by name or kind, and when none runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile

from tests.bench.gpu.figures import report

_REPLAYS = 3
_LONGEST_NAME = 60
# The first kind of which a part is in a kernel's name, in small letters. Names: NCCL's, flashinfer's and cuBLAS's as
# the profiler shows them, and those of our own in workers.attention and workers.fused.
_KINDS = (
    ("exchange", ("nccl",)),
    ("attention", ("attend", "attention", "batchprefill", "batchdecode", "mergestate", "_join", "_prepare")),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "gemv", "splitk", "few_rows", "_product")),
)
OTHER, NOTHING = "other", "no kernel"


def kind_of(name: str) -> str:
    small = name.lower()
    return next((kind for kind, parts in _KINDS if any(part in small for part in parts)), OTHER)


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel, in microseconds of the profile's clock."""

    name: str
    start_us: float
    end_us: float


def seen(run: Callable[[], object]) -> list[Kernel]:
    """The kernels of `_REPLAYS` calls of `run`, after one more that is not looked at."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_REPLAYS):
            run()
        torch.cuda.synchronize()
    events = [e for e in profiled.events() or [] if e.device_type == torch.autograd.DeviceType.CUDA]
    found = [Kernel(e.name, e.time_range.start, e.time_range.end) for e in events]
    return sorted(found, key=lambda kernel: kernel.start_us)


def idle_us(kernels: list[Kernel]) -> float:
    return sum(max(after.start_us - before.end_us, 0.0) for before, after in pairwise(kernels))


def spent_us_by_kind(kernels: list[Kernel]) -> dict[str, float]:
    """Of all kernels by their kinds, and of the time in which none runs."""
    spent_us = defaultdict[str, float](float)
    for kernel in kernels:
        spent_us[kind_of(kernel.name)] += kernel.end_us - kernel.start_us
    return {**spent_us, NOTHING: idle_us(kernels)}


def report_kinds(figure: str, x: int, run: Callable[[], object]) -> None:
    """A line for each kind, beside the time of all of them."""
    spent_us = spent_us_by_kind(seen(run))
    whole_us = sum(spent_us.values()) / _REPLAYS
    for kind in sorted(spent_us, key=lambda kind: -spent_us[kind]):
        report(f"{figure}: {kind}", x, spent_us[kind] / _REPLAYS, "us", whole_us)


def report_kernels(figure: str, x: int, graph: torch.cuda.CUDAGraph, most: int = 16) -> None:
    """A line for each of the `most` costliest kernels of one replay, then one for the gaps between kernels."""
    kernels = seen(graph.replay)
    spent_us, calls = defaultdict[str, float](float), defaultdict[str, int](int)
    for kernel in kernels:
        name = kernel.name[:_LONGEST_NAME]
        spent_us[name] += kernel.end_us - kernel.start_us
        calls[name] += 1
    for name in sorted(spent_us, key=lambda name: -spent_us[name])[:most]:
        report(f"{figure}: {calls[name] // _REPLAYS} x {name}", x, spent_us[name] / _REPLAYS, "us")
    report(f"{figure}: no kernel", x, idle_us(kernels) / _REPLAYS, "us")
