"""Kernels that may take the place of those in `workers`, beside these, by product and batch, in one run.

    python -m tests.bench.gpu.candidates.measure [--batches 1 8] [--context 2048] [--tries 8]
    python -m tests.bench.gpu.decode --candidates        whole steps with the quickest of them

    block_attention.cu   for `workers.attention.blocks`: the copy engine fetches keys and values, and begins while the
                         kernel in front still runs
    skinny.cu            `workers/skinny.cu`, with a cluster's programs that fetch x for each other, and any number of
                         parts

`tests.workers.test_candidate_kernels` runs both on a CPU, where `emulated.h` plays the device. They have not run on a
GPU yet, and nothing in `workers` uses them. Who measures them moves them into `workers`, or deletes them.

A batch of B requests is B * 16 rows. Limit: bytes over the copy bandwidth of this run. Products alternate between
weights, so that none is in the cache, and are held against torch's answer first.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
from torch import Tensor

from drafter.linear import Linear
from tests.bench.gpu import limits
from tests.bench.gpu.block_attention import attention_s, kv_bytes
from tests.bench.gpu.candidates.launch import CopyingPlan, Cut, SharingWeight, cuts, install
from tests.bench.gpu.few_rows import replayed
from tests.bench.gpu.figures import report
from tests.bench.gpu.products import LAYER
from tests.bench.gpu.shape8b import BLOCK, HIDDEN, NUM_TAPS, VOCAB
from workers.attention.blocks import BlockPlan
from workers.fused import FusedOps
from workers.skinny import SkinnyProducts, SkinnyWeight

# What a verify or draft step multiplies beside its layers: the head, and what makes the drafter's context of taps.
BESIDE_LAYERS = {"head": (VOCAB, HIDDEN), "taps": (HIDDEN, NUM_TAPS * HIDDEN)}
_MOST_ROWS = 128
_BYTES_APART = 1 << 30
_TOLERANCE = 0.02  # of the norm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--tries", type=int, default=8, help="cuts of a product, the likeliest first")
    options = parser.parse_args()
    for batch in options.batches:
        limit_us = kv_bytes(batch, options.context) / limits.copy_bytes_per_s() * 1e6
        for name, kind in (("used", BlockPlan), ("candidate", CopyingPlan)):
            taken_s = attention_s(batch, options.context, kind)
            report(f"block attention of a layer: {name}", batch, taken_s * 1e6, "us", limit_us)
    best_of(options.batches, options.tries)


def use_the_best(batches: Iterable[int]) -> None:
    """Put the candidates in place, products cut as is best for these batches."""
    install(best_of(batches, tries=4))


@torch.inference_mode()
def best_of(batches: Iterable[int], tries: int) -> dict[tuple[int, int, int, bool], Cut]:
    """The quickest cut of each product that is quicker than what is used."""
    found = {}
    products = SkinnyProducts(torch.device("cuda"))
    for name, (total, inputs) in (LAYER | BESIDE_LAYERS).items():
        gated = name.startswith("gate")
        outputs = total // 2 if gated else total
        weights = [
            _random(total, inputs, seed) for seed in range(max(2, _BYTES_APART // (2 * total * inputs)))
        ]
        limit_us = 2 * total * inputs / limits.copy_bytes_per_s() * 1e6
        for rows in sorted({batch * BLOCK for batch in batches if batch * BLOCK <= _MOST_ROWS}):
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            used = [_linear(weight, SkinnyWeight(products, weight)) for weight in weights]
            with products.used():
                wanted, used_us = _timed(used, x, gated)
            report(f"product: {name}, used", rows, used_us, "us", limit_us)
            candidates = [SharingWeight(products, weight) for weight in weights]
            linears = [
                _linear(weight, candidate) for weight, candidate in zip(weights, candidates, strict=True)
            ]
            least_us = used_us
            for cut in cuts(rows, outputs, inputs, gated)[:tries]:
                for candidate in candidates:
                    candidate.forced = cut
                with products.used():
                    answer, taken_us = _timed(linears, x, gated)
                difference = float((answer.float() - wanted.float()).norm() / wanted.float().norm())
                if not difference <= _TOLERANCE:
                    raise ValueError(f"{name}, {rows} rows, {cut}: differs by {difference}")
                how = f"{cut.tiles} tiles, {cut.parts} parts, {cut.sharing} sharing, {cut.stages} stages"
                report(f"product: {name}, {how}", rows, taken_us, "us", limit_us)
                if taken_us < least_us:
                    least_us, found[cut.rows, outputs, inputs, gated] = taken_us, cut
    return found


def _random(outputs: int, inputs: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = torch.empty(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    return weight.normal_(0.0, inputs**-0.5, generator=generator)


def _linear(weight: Tensor, skinny: SkinnyWeight) -> Linear:
    linear = Linear(weight)
    linear.skinny = skinny
    return linear


def _timed(linears: list[Linear], x: Tensor, gated: bool) -> tuple[Tensor, float]:
    """The last answer, and microseconds of one."""
    ops = FusedOps()

    def body() -> Tensor:
        for linear in linears:
            found = linear.gated(x, ops.swiglu) if gated else linear(x)
        return found

    found, taken_s = replayed(body)
    return found, taken_s / len(linears) * 1e6


if __name__ == "__main__":
    main()
