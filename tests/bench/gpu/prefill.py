"""Prefill of one prompt of an 8B shape, drafter's context included, against the bfloat16 GEMM rate of this run.

python -m tests.bench.gpu.prefill [--tokens 8192] [--layers 36]
"""

from __future__ import annotations

import argparse

import torch

from kvmanager.ids import RequestId
from tests.bench.gpu import decode, limits, shape8b
from tests.bench.gpu.figures import report
from tests.bench.gpu.shape8b import HEAD_DIM, HEADS, Shape
from workers.assembly import build
from workers.request import SamplingParams
from workers.runner import PromptChunk
from workers.sequence import Sequence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=shape8b.LAYERS)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    shape, tokens = Shape(num_layers=options.layers), options.tokens
    assembly = build(decode.config(1, tokens + 64), shape8b.models(shape))
    ledger, runner = assembly.engine.ledger, assembly.engine._runner  # type: ignore[attr-defined]
    ledger.reserve(RequestId("a"), tokens)
    sequence = Sequence(
        request_id=RequestId("a"),
        num_prompt_tokens=tokens,
        sampling=SamplingParams(max_tokens=1),
        eos_token_ids=frozenset(),
        drafting=True,
        max_draft_tokens=shape8b.BLOCK - 1,
        prompt_token_ids=tuple(range(10, tokens + 10)),
    )
    with torch.inference_mode():
        prefill_s = limits.seconds(
            lambda: runner.prefill([PromptChunk(sequence, 0, tokens)]), options.repeats
        )
    layers = shape.num_layers * shape.layer_weights + shape.context_weights
    operations = 2 * layers * tokens + 2 * tokens * tokens * HEADS * HEAD_DIM * shape.num_layers
    rate = operations / prefill_s
    report("gemm", "", limits.gemm_flops_per_s() / 1e12, "TFLOP/s")
    report("prefill: time", tokens, prefill_s * 1e3, "ms", operations / limits.gemm_flops_per_s() * 1e3)
    report("prefill rate", tokens, rate / 1e12, "TFLOP/s", limits.gemm_flops_per_s() / 1e12)


if __name__ == "__main__":
    main()
