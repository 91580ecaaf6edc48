"""A worker of two ranks against one of a single rank, on the same 8B shape: decode steps and a prefill, and where the
time goes. On a machine with two GPUs, in about two minutes:

    python -m tests.bench.gpu.tensor_parallel

    [--batches 1 32] [--context 2048] [--prompt 8192] [--layers 36] [--steps 20] [--device cpu --tiny]

TP 1 runs on the first GPU. Then its process leads a second one, which has the other GPU, over random weights of which
each rank makes its own share. `step` is wall time of a whole step on the first rank, from the word to the others until
the host has the tokens; `draft` and `verify` are its parts on the device. `kernels` are those of the first rank, and in
what NCCL's take it waits for the other one. On a CPU ranks exchange over gloo: that shows the bench to run, no more.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
import torch

from kvmanager.ids import RequestId
from tests.bench.gpu import decode, shape8b
from tests.bench.gpu.figures import median, report
from tests.bench.gpu.kernels import report_kinds
from tests.bench.gpu.shape8b import BLOCK, Shape
from workers.assembly import Assembly, build
from workers.config import WorkerConfig
from workers.group.meeting import FirstSeat, Meeting, attend
from workers.group.rank import build_follower
from workers.group.ranks import GroupRanks, Seat
from workers.request import SamplingParams
from workers.runner import PromptChunk
from workers.sequence import Sequence

RANKS = 2
WARM_UPS = 3
# Kernels are compiled in the first steps, on one rank perhaps for longer than on the other.
TIMEOUT_S, START_S = 120.0, 300.0
TINY = Shape(
    num_layers=8, draft_layers=1, vocab_size=99, hidden_size=64, heads=4, kv_heads=2, head_dim=16, inner=96
)

Seconds = dict[tuple[str, int], float]
"""By what was done, and to how many requests or tokens."""


class Job(msgspec.Struct, frozen=True):
    """What both processes are told. `seat` is of the one that is told."""

    seat: Seat
    meeting: Meeting
    config: WorkerConfig
    tiny: bool
    layers: int

    @property
    def shape(self) -> Shape:
        return TINY if self.tiny else Shape(num_layers=self.layers)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=shape8b.LAYERS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--follow", help="for the other process: its job, as JSON")
    options = parser.parse_args(arguments)
    if options.follow is not None:
        follow(msgspec.json.decode(options.follow, type=Job))
        return
    if options.device == "cuda" and torch.cuda.device_count() < RANKS:
        print(f"two GPUs are needed, here are {torch.cuda.device_count()}")
        return
    seats = [Seat(rank=rank, size=RANKS, timeout_s=TIMEOUT_S, start_s=START_S) for rank in range(RANKS)]
    first = FirstSeat(seats[0])
    config = decode.config(
        max(options.batches),
        max(options.context, options.prompt) + decode.PAGE,
        device=options.device,
        dtype="bfloat16" if options.device == "cuda" else "float32",
    )
    job = Job(seats[1], first.meeting, config, options.tiny, options.layers)
    alone = measure("TP 1", build(config, models(job, None)), options)
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    follower = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.bench.gpu.tensor_parallel",
            "--follow",
            msgspec.json.encode(job).decode(),
        ],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"},
    )
    try:
        ranks = first.meet(device_of(job))
        together = measure("TP 2", build(config, models(job, ranks)), options)
        follower.wait(timeout=60)
    finally:
        follower.kill()
        follower.wait()
    for (what, x), seconds in together.items():
        report(f"tensor parallel, {what}: TP 1", x, alone[what, x] * 1e3, "ms")
        report(f"tensor parallel, {what}: TP 2", x, seconds * 1e3, "ms", alone[what, x] * 1e3)


def follow(job: Job) -> None:
    torch.set_num_threads(1)
    ranks = attend(job.seat, job.meeting, device_of(job))
    build_follower(job.config, models(job, ranks)).run()


def device_of(job: Job) -> torch.device:
    """Each process sees one GPU as its first."""
    return torch.device(job.config.device, 0) if job.config.device == "cuda" else torch.device("cpu")


def models(job: Job, ranks: GroupRanks | None) -> shape8b.Models:
    dtype = torch.bfloat16 if job.config.device == "cuda" else torch.float32
    return shape8b.models(job.shape, dtype=dtype, device=device_of(job), ranks=ranks)


@torch.inference_mode()
def measure(name: str, assembly: Assembly, options: argparse.Namespace) -> Seconds:
    """Closes the assembly."""
    found: Seconds = {}
    try:
        prefill = prefilling(assembly, options.prompt)
        found["prefill", options.prompt] = seconds_of(prefill, options)
        show_kernels(f"{name} kernels of prefill", options.prompt, prefill, options)
        assembly.engine.ledger.free(PROMPT)
        sequences = [decode.occupy(assembly, index, options.context) for index in range(max(options.batches))]
        step = assembly.engine.decode._step
        for batch in options.batches:

            def run(batch: int = batch) -> object:
                return step.run(sequences[:batch], BLOCK - 1)

            found["step", batch] = seconds_of(run, options)
            outcome = step.run(sequences[:batch], BLOCK - 1)
            found["draft", batch], found["verify", batch] = outcome.draft_s, outcome.verify_s
            show_kernels(f"{name} kernels of step", batch, run, options)
    finally:
        assembly.close()
    return found


PROMPT = RequestId("prompt")


def prefilling(assembly: Assembly, tokens: int) -> Callable[[], object]:
    assembly.engine.ledger.reserve(PROMPT, tokens)
    runner = assembly.engine._runner  # type: ignore[attr-defined]
    sequence = Sequence(
        request_id=PROMPT,
        num_prompt_tokens=tokens,
        sampling=SamplingParams(max_tokens=1),
        eos_token_ids=frozenset(),
        drafting=True,
        max_draft_tokens=BLOCK - 1,
        prompt_token_ids=tuple(10 + index % 64 for index in range(tokens)),
    )
    return lambda: runner.prefill([PromptChunk(sequence, 0, tokens)])


def seconds_of(run: Callable[[], object], options: argparse.Namespace) -> float:
    """The median of some calls, each until the device is through with it."""
    took_s = []
    for _ in range(WARM_UPS + options.steps):
        began_s = time.perf_counter()
        run()
        if options.device == "cuda":
            torch.cuda.synchronize()
        took_s.append(time.perf_counter() - began_s)
    return median(took_s[WARM_UPS:])


def show_kernels(figure: str, x: int, run: Callable[[], object], options: argparse.Namespace) -> None:
    if options.device == "cuda":
        report_kinds(figure, x, run)


if __name__ == "__main__":
    main()
