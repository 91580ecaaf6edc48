"""Matrix products of a step of the 8B shape, one by one and as a verify step has them: how near the limit torch's
library comes before anything else of a step is counted.

    python -m tests.bench.gpu.products [--rows 16 128 512 2048]

A row is a token: 16 rows are a block of one request. Limit of a product: its weight over the copy bandwidth of this
run, or its operations over the GEMM rate of this run, whichever is longer. Weights alternate, so that none is in the
cache.
"""

from __future__ import annotations

import argparse

import torch

from tests.bench.gpu import limits
from tests.bench.gpu.figures import report
from tests.bench.gpu.shape8b import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB

LAYER = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "output": (HIDDEN, HEADS * HEAD_DIM),
    "gate and up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
PRODUCTS = {name: (shape, LAYERS) for name, shape in LAYER.items()} | {"head": ((VOCAB, HIDDEN), 1)}
_BYTES_APART = 1 << 30  # of weights that are read before one is read again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128, 512, 2048])
    options = parser.parse_args()
    for rows in options.rows:
        total_s, total_limit_s = 0.0, 0.0
        for name, (shape, count) in PRODUCTS.items():
            taken_s, limit_s = product_s(rows, *shape), product_limit_s(rows, *shape)
            total_s, total_limit_s = total_s + count * taken_s, total_limit_s + count * limit_s
            report(f"product: {name}", rows, taken_s * 1e6, "us", limit_s * 1e6)
        report("products of a verify step", rows, total_s * 1e3, "ms", total_limit_s * 1e3)


def product_s(rows: int, outputs: int, inputs: int) -> float:
    """Device seconds of [rows, inputs] times the transpose of [outputs, inputs], from a captured graph."""
    count = max(2, _BYTES_APART // (2 * outputs * inputs))
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, outputs, device="cuda", dtype=torch.bfloat16)
    torch.mm(x, weights[0].t(), out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            torch.mm(x, weight.t(), out=out)
    return limits.seconds(graph.replay, 5) / count


def product_limit_s(rows: int, outputs: int, inputs: int) -> float:
    operations, read = 2 * rows * outputs * inputs, 2 * outputs * inputs
    return max(read / limits.copy_bytes_per_s(), operations / limits.gemm_flops_per_s())


if __name__ == "__main__":
    main()
