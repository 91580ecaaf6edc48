"""`workers/skinny.cu` on a CPU that plays the device: what it computes, and that it reads x only when the kernel in
front is done.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import workers
from tests.workers import kernels_on_cpu
from tests.workers.kernels_on_cpu import Map, address, compiled, run

pytestmark = [
    pytest.mark.skipif(not kernels_on_cpu.can_compile(), reason="needs a C++20 compiler (g++ 11)"),
    pytest.mark.timeout(300),
]
SOURCE = Path(workers.__file__).with_name("skinny.cu")


@pytest.mark.parametrize(
    ("rows", "num_rows", "tiles", "stages", "x_stages", "gated", "parts", "outputs", "inputs"),
    [
        (16, 16, 1, 3, 2, False, 1, 192, 256),
        (16, 13, 1, 3, 4, False, 2, 128, 512),
        (32, 20, 2, 2, 3, False, 1, 384, 384),
        (64, 64, 1, 3, 2, True, 1, 160, 320),
        (128, 100, 2, 2, 2, False, 2, 400, 512),
        (128, 128, 1, 5, 3, False, 4, 64, 768),
        (128, 90, 3, 2, 2, True, 1, 288, 192),
    ],
)
def test_products_are_what_torch_makes_them(
    rows: int,
    num_rows: int,
    tiles: int,
    stages: int,
    x_stages: int,
    gated: bool,
    parts: int,
    outputs: int,
    inputs: int,
) -> None:
    generator = torch.Generator().manual_seed(1)
    total = outputs * (2 if gated else 1)
    weight = (torch.randn((total, inputs), generator=generator) * inputs**-0.5).bfloat16()
    x = torch.randn(num_rows, inputs, generator=generator).bfloat16()
    macros = {"ROWS": rows, "TILES": tiles, "STAGES": stages, "X_STAGES": x_stages, "AHEAD": stages - 1}
    kernel = compiled(SOURCE, **macros, GATED=int(gated), PARTS=parts)
    if gated:
        sizes, strides = (inputs, 8, 2, total // 16), (inputs, outputs * inputs, 8 * inputs)
        weight_map = Map.of(weight, sizes, strides, (64, 8, 2, tiles * 4))
    else:
        weight_map = Map.of(weight, (inputs, total), (inputs,), (64, tiles * 64))
    x_map = Map.of(x, (inputs, num_rows), (x.stride(0),), (64, rows))
    num_tiles = -(-outputs // (tiles * (32 if gated else 64)))
    programs = num_tiles * parts if parts > 1 else min(num_tiles, 2)  # that take one tile after the other
    found = torch.full((num_rows, outputs), math.nan, dtype=torch.bfloat16)
    found.share_memory_()
    run(
        kernel,
        ctypes.byref(weight_map),
        ctypes.byref(x_map),
        address(found),
        num_rows,
        outputs,
        inputs // 64 // parts,
        programs,
    )
    wanted = x.float() @ weight.float().T
    if gated:
        wanted = F.silu(wanted[:, :outputs]) * wanted[:, outputs:]
    assert (found.float() - wanted).abs().max() < 0.03  # a bfloat16's half step, of values under 4
