"""Few rows through an 8B shape's layers without attention: torch's products, and those of `workers.skinny`.

    python -m tests.bench.gpu.few_rows [--rows 16 32 64 128] [--layers 6] [--products] [--tilings]

A step of few tokens reads every weight once and computes little. Limit of a layer: its weights over the copy bandwidth
of this run. Every norm and gate between the products is in the layer's time; attention and its exchange of heads are
not, so neighbouring products still depend on each other. Both ways must come to the same, and rounding is all they may
differ by. `--products`: each product alone too, captured behind its like, and how it is cut. `--tilings`: also each
other way to cut it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.linear import Linear
from tests.bench.gpu import limits
from tests.bench.gpu.figures import report
from tests.bench.gpu.products import LAYER
from tests.bench.gpu.shape8b import HEAD_DIM, HEADS, HIDDEN
from workers.fused import FusedOps
from workers.skinny import SkinnyProducts
from workers.tiling import MOST_ROWS, Tiling, tilings

_EPS = 1e-6
_TOLERANCE = 0.02  # of the norm, in bfloat16
_BYTES_APART = 1 << 30  # of weights that are read before one is read again


class Layer(NamedTuple):
    norm: Tensor
    qkv: Linear
    output: Linear
    gate_up: Linear
    down: Linear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--tilings", action="store_true")
    options = parser.parse_args()
    products = SkinnyProducts(torch.device("cuda"))
    layers = [random_layer(seed, products) for seed in range(options.layers)]
    limit_us = (
        2 * sum(outputs * inputs for outputs, inputs in LAYER.values()) / limits.copy_bytes_per_s() * 1e6
    )
    for rows in options.rows:
        x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        wanted, taken_s = timed(x, layers)
        report("layer without attention: library", rows, taken_s * 1e6, "us", limit_us)
        with products.used():
            found, taken_s = timed(x, layers)
        difference = float((found - wanted).norm() / wanted.norm())
        if not difference <= _TOLERANCE:
            raise ValueError(f"{rows} rows differ by {difference}")
        report("layer without attention: skinny", rows, taken_s * 1e6, "us", limit_us)
        if options.products or options.tilings:
            each_product(rows, options.tilings)


def random_layer(seed: int, products: SkinnyProducts) -> Layer:
    generator = torch.Generator("cuda").manual_seed(seed)
    linears = [random_linear(outputs, inputs, generator, products) for outputs, inputs in LAYER.values()]
    return Layer(torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16), *linears)


def random_linear(outputs: int, inputs: int, generator: torch.Generator, products: SkinnyProducts) -> Linear:
    weight = torch.empty(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    linear = Linear(weight.normal_(0.0, inputs**-0.5, generator=generator))
    linear.skinny = products.of(weight)
    return linear


@torch.inference_mode()
def timed(x: Tensor, layers: list[Layer]) -> tuple[Tensor, float]:
    """What comes out behind all layers in float32, and device seconds of one layer."""

    def body() -> Tensor:
        moved, total = x, torch.zeros_like(x)
        ops = FusedOps()
        for layer in layers:
            normed, total = ops.add_rms_norm(moved, total, layer.norm, _EPS)
            heads = layer.qkv(normed)[:, : HEADS * HEAD_DIM]
            normed, total = ops.add_rms_norm(layer.output(heads), total, layer.norm, _EPS)
            moved = layer.down(layer.gate_up.gated(normed, ops.swiglu))
        return moved + total

    found, taken_s = replayed(body)
    return found.float(), taken_s / len(layers)


def replayed(body: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result, and device seconds, of a captured graph."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = body()
    return found, limits.seconds(graph.replay, 20)


class _Told(SkinnyProducts):
    """Cuts every product as it is told to, if it is."""

    told: Tiling | None = None

    def tiling(self, num_rows: int, outputs: int, inputs: int, gated: bool) -> Tiling | None:
        return self.told or super().tiling(num_rows, outputs, inputs, gated)


@torch.inference_mode()
def each_product(rows: int, all_tilings: bool) -> None:
    products = _Told(torch.device("cuda"))
    for name, (outputs, inputs) in LAYER.items():
        generator = torch.Generator("cuda").manual_seed(1)
        count = max(4, _BYTES_APART // (2 * outputs * inputs))
        linears = [random_linear(outputs, inputs, generator, products) for _ in range(count)]
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        ops, gated = FusedOps(), name.startswith("gate")

        def body(
            linears: list[Linear] = linears, x: Tensor = x, ops: FusedOps = ops, gated: bool = gated
        ) -> Tensor:
            for linear in linears:
                found = linear.gated(x, ops.swiglu) if gated else linear(x)
            return found

        limit_us = 2 * outputs * inputs / limits.copy_bytes_per_s() * 1e6
        report(f"product of few rows, {name}: library", rows, replayed(body)[1] / count * 1e6, "us", limit_us)
        if rows > MOST_ROWS:
            continue
        shape = rows, outputs // (2 if gated else 1), inputs, gated
        chosen = products.tiling(*shape)
        for cut in tilings(*shape):
            if cut != chosen and not all_tilings:
                continue
            products.told = cut
            with products.used():
                taken_us = replayed(body)[1] / count * 1e6
            products.told = None
            what = f"{cut.tiles} tiles, {cut.parts} parts{', chosen' if cut == chosen else ''}"
            report(f"product of few rows, {name}: {what}", rows, taken_us, "us", limit_us)


if __name__ == "__main__":
    main()
