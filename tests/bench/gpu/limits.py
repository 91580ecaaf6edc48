"""Physical limits of the GPU as this run finds them: what other figures of the same run are divided by."""

from __future__ import annotations

import functools

import torch


def seconds(body: object, repeats: int, warm_ups: int = 3) -> float:
    """Device seconds of one call of `body`, the mean of `repeats` launched back to back."""
    assert callable(body)
    for _ in range(warm_ups):
        body()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(repeats):
        body()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1000 / repeats


@functools.cache
def copy_bytes_per_s() -> float:
    """Of a device-to-device copy, bytes read and bytes written counted."""
    source = torch.ones(4 << 30, dtype=torch.uint8, device="cuda")
    destination = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: destination.copy_(source), 10)


@functools.cache
def gemm_flops_per_s() -> float:
    """Of a bfloat16 product of 8,192-square matrices of random numbers, right after a pause."""
    return _gemm_flops_per_s(10, 3)


@functools.cache
def sustained_gemm_flops_per_s() -> float:
    """The same for as long as a bench's loop runs, when the GPU's power limit has lowered its clock."""
    return _gemm_flops_per_s(500, 1000)


def _gemm_flops_per_s(repeats: int, warm_ups: int) -> float:
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / seconds(lambda: torch.mm(a, b, out=out), repeats, warm_ups)
