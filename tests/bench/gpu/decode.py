"""Decode steps of an 8B shape with a drafter of blocks of 16: draft, verify and what the host adds, by batch.

    python -m tests.bench.gpu.decode [--batches 1 8 32 128] [--context 2048] [--vocab 151936] [--draft-vocab 0]
        [--layers 36] [--kernels]

Floor of a forward: its weights and the keys and values that it reads over the copy bandwidth of this run, or its
operations over the GEMM rate of this run, whichever is longer. `draft` and `verify` are graphs replayed back to back;
`step` is wall time of the engine's decode loop, and what neither graph explains of it is the host's gap. `--kernels`
adds where each graph's time goes.
"""

from __future__ import annotations

import argparse
import time

import msgspec
import torch

from kvmanager.ids import RequestId
from tests.bench.gpu import limits, shape8b
from tests.bench.gpu.figures import report
from tests.bench.gpu.kernels import report_kernels
from tests.bench.gpu.shape8b import BLOCK, HEAD_DIM, HEADS, Shape
from workers.assembly import Assembly, build
from workers.config import FixedPages, PairSpec, WorkerConfig
from workers.request import SamplingParams
from workers.sequence import Sequence

PAGE = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=shape8b.VOCAB)
    parser.add_argument("--draft-vocab", type=int, default=0, help="tokens that the drafter says; 0: all")
    parser.add_argument("--layers", type=int, default=shape8b.LAYERS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    shape = Shape(num_layers=options.layers, vocab_size=options.vocab, draft_vocab=options.draft_vocab)
    report("copy", "", limits.copy_bytes_per_s() / 1e12, "TB/s")
    report("gemm", "", limits.gemm_flops_per_s() / 1e12, "TFLOP/s")
    sustained = limits.sustained_gemm_flops_per_s()
    report("gemm sustained", "", sustained / 1e12, "TFLOP/s", limits.gemm_flops_per_s() / 1e12)
    models = shape8b.models(shape)
    assembly = build(config(max(options.batches), options.context + 64), models)
    with torch.inference_mode():
        sequences = [occupy(assembly, index, options.context) for index in range(max(options.batches))]
        for batch in options.batches:
            measure(assembly, sequences[:batch], shape, options)


def config(batch: int, max_seq_len: int, **changes: object) -> WorkerConfig:
    pages = batch * -(-(max_seq_len + BLOCK) // PAGE) + 1
    plain = WorkerConfig(
        role="aggregated",
        pair=PairSpec(name="random-8b"),
        device="cuda",
        dtype="bfloat16",
        page_size=PAGE,
        kv=FixedPages(num_target_pages=pages),
        max_batch=batch,
        max_seq_len=max_seq_len,
        chunk_tokens=8192,
        prefix_cache=False,
    )
    return msgspec.structs.replace(plain, **changes)


def occupy(assembly: Assembly, index: int, context: int) -> Sequence:
    """A request whose prompt counts as computed: zeros take as long to read as anything."""
    request_id, ledger = RequestId(str(index)), assembly.engine.ledger
    ledger.reserve(request_id, context + 64)
    ledger.commit(request_id, context)
    return Sequence(
        request_id=request_id,
        num_prompt_tokens=context,
        sampling=SamplingParams(max_tokens=1 << 20, ignore_eos=True),
        eos_token_ids=frozenset(),
        drafting=True,
        max_draft_tokens=BLOCK - 1,
        output=[11 + index],
    )


def measure(assembly: Assembly, sequences: list[Sequence], shape: Shape, options: argparse.Namespace) -> None:
    batch, decode = len(sequences), assembly.engine.decode
    context, steps = options.context, options.steps
    step = decode._step
    for _ in range(3):
        step.run(sequences, BLOCK - 1)
    walls = []
    for _ in range(steps):
        began = time.perf_counter()
        step.run(sequences, BLOCK - 1)
        walls.append(time.perf_counter() - began)
    loop = []
    for _ in range(steps):  # with the bookkeeping; hardly a draft is accepted, so lengths grow by one
        began = time.perf_counter()
        decode.step(sequences)
        loop.append(time.perf_counter() - began)
    # Graphs alone: what the device needs when nobody makes it wait.
    draft = step._drafts[batch, BLOCK]  # type: ignore[attr-defined]
    verify = step._verifies[batch, BLOCK, True]  # type: ignore[attr-defined]
    draft_s = limits.seconds(draft.graph.replay, steps)
    verify_s = limits.seconds(verify.graph.replay, steps)
    step_s = sorted(loop)[len(loop) // 2]
    run_s = sorted(walls)[len(walls) // 2]
    report("decode: verify", batch, verify_s * 1e3, "ms", verify_floor_s(shape, batch, context) * 1e3)
    report("decode: draft", batch, draft_s * 1e3, "ms", draft_floor_s(shape, batch, context) * 1e3)
    report("decode draft of verify", batch, draft_s * 1e3, "ms", verify_s * 1e3)
    report("decode: step", batch, step_s * 1e3, "ms", (draft_s + verify_s) * 1e3)
    report("decode: step without bookkeeping", batch, run_s * 1e3, "ms", (draft_s + verify_s) * 1e3)
    report("decode gap of step", batch, (step_s - draft_s - verify_s) * 1e3, "ms", step_s * 1e3)
    if options.kernels:
        report_kernels("verify kernels", batch, verify.graph)
        report_kernels("draft kernels", batch, draft.graph)


def verify_floor_s(shape: Shape, batch: int, context: int) -> float:
    tokens, weights = batch * BLOCK, shape.target_weights + shape.context_weights
    return _floor_s(weights, tokens, shape.num_layers, batch, context, shape)


def draft_floor_s(shape: Shape, batch: int, context: int) -> float:
    return _floor_s(shape.draft_weights, batch * BLOCK, shape.draft_layers, batch, context, shape)


def _floor_s(weights: int, tokens: int, layers: int, batch: int, context: int, shape: Shape) -> float:
    read = 2 * weights + batch * context * shape.kv_bytes_per_token(layers)
    operations = 2 * weights * tokens + 4 * tokens * context * HEADS * HEAD_DIM * layers
    return max(read / limits.copy_bytes_per_s(), operations / limits.gemm_flops_per_s())


if __name__ == "__main__":
    main()
