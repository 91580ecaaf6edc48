"""A layer's mixture of experts in the shape of Qwen3-30B-A3B, from a captured graph: how near it comes to its weights.

    python -m tests.bench.gpu.experts [--rows 1 16 128 512 2048]

A row is a token. Limit: the weights of the experts that these rows use over the copy bandwidth of this run, or their
operations over the GEMM rate of this run, whichever is longer. Products and router are timed apart too: what the whole
layer takes more than both is sorting rows by expert and adding them up again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from drafter.linear import Linear
from drafter.ranks import ALONE
from tests.bench.gpu import limits
from tests.bench.gpu.figures import report
from workers.fused import FusedOps
from workers.models.experts import GroupedExperts, MixtureMlp, Router

HIDDEN, INNER, EXPERTS, PER_TOKEN = 2048, 768, 128, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 512, 2048])
    options = parser.parse_args()
    router = Router(Linear(_random(EXPERTS, HIDDEN)), PER_TOKEN, normalised=True)
    experts = GroupedExperts(_random(EXPERTS, 2 * INNER, HIDDEN), _random(EXPERTS, HIDDEN, INNER), FusedOps())
    mlp = MixtureMlp(router, experts, 0, ALONE)
    with torch.inference_mode():
        for rows in options.rows:
            _measure(rows, router, experts, mlp)


def _measure(rows: int, router: Router, experts: GroupedExperts, mlp: MixtureMlp) -> None:
    x_TH = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    chosen_N = router(x_TH).experts_TK.flatten().sort()[0]
    used = len(chosen_N.unique())
    ends_E = torch.searchsorted(chosen_N, torch.arange(EXPERTS, device="cuda"), right=True, out_int32=True)
    rows_NH = torch.randn(len(chosen_N), HIDDEN, device="cuda", dtype=torch.bfloat16)
    weights = 3 * HIDDEN * INNER
    limit_s = max(
        2 * used * weights / limits.copy_bytes_per_s(),
        2 * len(chosen_N) * weights / limits.gemm_flops_per_s(),
    )
    report(f"mixture of experts ({used} used)", rows, _seconds(lambda: mlp(x_TH)) * 1e6, "us", limit_s * 1e6)
    report("its products", rows, _seconds(lambda: experts(rows_NH, ends_E)) * 1e6, "us", limit_s * 1e6)
    report("its router", rows, _seconds(lambda: router(x_TH).weights_TK) * 1e6, "us")


def _seconds(call: Callable[[], Tensor]) -> float:
    """Device seconds of a call, from a captured graph of several."""
    call()
    torch.cuda.synchronize()
    graph, count = torch.cuda.CUDAGraph(), 10
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return limits.seconds(graph.replay, 5) / count


def _random(*shape: int) -> Tensor:
    found = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return found.mul_(shape[-1] ** -0.5)


if __name__ == "__main__":
    main()
