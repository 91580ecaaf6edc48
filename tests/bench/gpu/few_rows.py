"""Candidates for the products of a step of few tokens: layers of the 8B shape without attention, way beside way.

    python -m tests.bench.gpu.few_rows [--rows 16 32 64 128] [--layers 6]

A row is a token: 16 rows are a block of one request. Ways, each captured in one graph and checked against the first:

    library      the library's products with `workers.fused` between them, as workers run now
    ours         a kernel of our own: a weight is read once, in tiles, and few of them are cut along their inputs
    gated        the same, and gate and up end in their activation, without a kernel between

Limit of a layer: its weights over the copy bandwidth of this run. No worker uses `ours`. On an H200 a layer of 16 / 32
/ 64 / 128 rows took 118.6 / 119.1 / 120.7 / 129.7 us by the library, 110.6 / 117.4 / 124.9 / 172.3 by ours, and 110.1 /
115.7 / 125.5 / 165.0 gated, of a limit of 89.7. Kernels that start before the one ahead of them ends, and that ask for
their first weights then, made nothing faster.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.bench.gpu import limits
from tests.bench.gpu.figures import report
from tests.bench.gpu.products import LAYER
from tests.bench.gpu.shape8b import HEAD_DIM, HEADS, HIDDEN
from workers.fused import FusedOps

_COLUMNS, _INPUTS = 64, 128  # of a weight's tile
_STAGES = 5  # tiles on their way or in use
_TILES_TO_FILL = 96  # with fewer tiles of outputs, a product is cut along its inputs
_EPS = 1e-6
_TOLERANCE = 0.02  # of the largest value, in bfloat16


@triton.jit
def _product_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    inputs_per_part,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
):
    """out [rows, outputs] = x [rows, inputs] times the transpose of weight [outputs, inputs].

    GATED: weight has 2 x outputs rows, gates first, and out is silu(gate) * up; PARTS must be 1. PARTS > 1: the program
    that is done last with a tile of outputs adds all parts in their order; `arrived` is 0 before and after.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    inputs = tl.arange(0, INPUTS)
    begin = part * inputs_per_part
    end = tl.minimum(begin + inputs_per_part, num_inputs)
    starts_ptr = weight_ptr + columns.to(tl.int64) * num_inputs
    up_elements = num_outputs.to(tl.int64) * num_inputs
    weight_at = starts_ptr[:, None] + inputs[None, :]
    x_at = x_ptr + rows[:, None] * num_inputs + inputs[None, :]
    there = (rows < num_rows)[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for at in tl.range(begin, end, INPUTS, num_stages=STAGES):
        x = tl.trans(tl.load(x_at + at, mask=there, other=0.0))
        weight = tl.load(weight_at + at)
        total = tl.dot(weight, x, total)
        if GATED:
            weight = tl.load(weight_at + up_elements + at)
            up = tl.dot(weight, x, up)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up
    found = tl.trans(total)
    out_at = out_ptr + rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    if PARTS == 1:
        tl.store(out_at, found.to(out_ptr.dtype.element_ty), mask=there)
    else:
        place = rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        first_ptr = partial_ptr + tile * PARTS * (ROWS * COLUMNS)
        tl.store(first_ptr + part * (ROWS * COLUMNS) + place, found, mask=there)
        tl.debug_barrier()  # every thread has stored before one of them says so
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == PARTS - 1:
            tl.store(arrived_ptr + tile, 0)
            whole = tl.zeros([ROWS, COLUMNS], tl.float32)
            for each in tl.static_range(PARTS):
                piece_at = first_ptr + each * (ROWS * COLUMNS) + place
                whole += tl.load(piece_at, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(out_at, whole.to(out_ptr.dtype.element_ty), mask=there)


class Weights(NamedTuple):
    """Of one layer."""

    norm: Tensor
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Way:
    """How a layer is computed; the defaults are `ours`."""

    gated: bool = False

    def product(self, x_TK: Tensor, weight: Tensor, scratch: Scratch, *, gated: bool = False) -> Tensor:
        num_rows, num_inputs = x_TK.shape
        num_outputs = weight.shape[0] // (2 if gated else 1)
        tiles = num_outputs // _COLUMNS
        parts = 1 if gated or tiles >= _TILES_TO_FILL else 2  # a gate needs its whole sum
        out = torch.empty((num_rows, num_outputs), dtype=x_TK.dtype, device=x_TK.device)
        _product_kernel[tiles, parts](
            x_TK,
            weight,
            out,
            scratch.partials,
            scratch.arrived,
            num_rows,
            num_outputs,
            num_inputs,
            triton.cdiv(triton.cdiv(num_inputs, _INPUTS), parts) * _INPUTS,
            ROWS=max(triton.next_power_of_2(num_rows), 16),
            COLUMNS=_COLUMNS,
            INPUTS=_INPUTS // 2 if gated or num_rows > 64 else _INPUTS,
            PARTS=parts,
            STAGES=_STAGES,
            GATED=gated,
            num_warps=4,
        )
        return out

    def layer(
        self, x_TH: Tensor, total_TH: Tensor, layer: Weights, scratch: Scratch
    ) -> tuple[Tensor, Tensor]:
        ops = FusedOps()
        normed, total = ops.add_rms_norm(x_TH, total_TH, layer.norm, _EPS)
        heads = self.product(normed, layer.qkv, scratch)[:, : HEADS * HEAD_DIM].contiguous()
        moved = self.product(heads, layer.output, scratch)
        normed, total = ops.add_rms_norm(moved, total, layer.norm, _EPS)
        if self.gated:
            inner = self.product(normed, layer.gate_up, scratch, gated=True)
        else:
            inner = ops.swiglu(self.product(normed, layer.gate_up, scratch))
        return self.product(inner, layer.down, scratch), total


class Scratch(NamedTuple):
    partials: Tensor  # float32
    arrived: Tensor  # int32 zeros, one for each tile of outputs


WAYS = {"ours": Way(), "gated": Way(gated=True)}


def library_layer(x_TH: Tensor, total_TH: Tensor, layer: Weights) -> tuple[Tensor, Tensor]:
    ops = FusedOps()
    normed, total = ops.add_rms_norm(x_TH, total_TH, layer.norm, _EPS)
    heads = torch.mm(normed, layer.qkv.t())[:, : HEADS * HEAD_DIM].contiguous()
    normed, total = ops.add_rms_norm(torch.mm(heads, layer.output.t()), total, layer.norm, _EPS)
    return torch.mm(ops.swiglu(torch.mm(normed, layer.gate_up.t())), layer.down.t()), total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    layers = [random_weights(seed) for seed in range(options.layers)]
    limit_us = (
        2 * sum(outputs * inputs for outputs, inputs in LAYER.values()) / limits.copy_bytes_per_s() * 1e6
    )
    partials = torch.empty(1 << 24, device="cuda")
    scratch = Scratch(partials, torch.zeros(1 << 14, dtype=torch.int32, device="cuda"))
    for rows in options.rows:
        x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        wanted, taken_s = timed(x, layers, library_layer)
        report("layer without attention: library", rows, taken_s * 1e6, "us", limit_us)
        for name, way in WAYS.items():

            def layer(
                x_TH: Tensor, total_TH: Tensor, weights: Weights, way: Way = way
            ) -> tuple[Tensor, Tensor]:
                return way.layer(x_TH, total_TH, weights, scratch)

            found, taken_s = timed(x, layers, layer)
            difference = float((found - wanted).abs().max() / wanted.abs().max())
            if not difference <= _TOLERANCE:
                raise ValueError(f"{name} at {rows} rows differs by {difference} of the largest value")
            report(f"layer without attention: {name}", rows, taken_s * 1e6, "us", limit_us)


def random_weights(seed: int) -> Weights:
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(outputs: int, inputs: int) -> Tensor:
        weight = torch.empty(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        return weight.normal_(0.0, inputs**-0.5, generator=generator)

    return Weights(
        torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16), *(random(*shape) for shape in LAYER.values())
    )


@torch.inference_mode()
def timed(
    x: Tensor,
    layers: list[Weights],
    layer: Callable[[Tensor, Tensor, Weights], tuple[Tensor, Tensor]],
) -> tuple[Tensor, float]:
    """The residual behind all layers in float32, and device seconds of one layer, from a captured graph."""

    def body() -> Tensor:
        moved, total = x, torch.zeros_like(x)
        for weights in layers:
            moved, total = layer(moved, total, weights)
        return moved + total

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = body()
    taken_s = limits.seconds(graph.replay, 20) / len(layers)
    return found.float(), taken_s


if __name__ == "__main__":
    main()
