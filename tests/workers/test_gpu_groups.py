"""A worker of two ranks on two GPUs: what models exchange goes over NCCL, and a lost rank ends the step that waits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.device import DEVICE_NAME
from tests.workers.random_pair import VOCAB, dspark, write_random_pair
from tests.workers.split_pair import answers, config
from workers.assembly import Assembly, assemble
from workers.config import PairSpec, WorkerConfig
from workers.device import compute_device
from workers.group.errors import GroupBroken
from workers.group.meeting import FirstSeat
from workers.group.ranks import Seat
from workers.request import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
HEADS = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}  # 64: flashinfer's smallest
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=48, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.9, top_k=7, seed=5),
}
PROMPTS = [[(seed * 5 + i * i * seed + i) % VOCAB for i in range(9 + 4 * seed)] for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairSpec:
    if DEVICE_NAME == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    found = write_random_pair(tmp_path_factory.mktemp("pair"), dspark("rnn") | HEADS, **HEADS)
    return PairSpec(name="", target=str(found.target_path), drafter=str(found.drafter_path))


@contextmanager
def two_ranks(
    told: WorkerConfig, timeout_s: float = 60.0
) -> Iterator[tuple[Assembly, subprocess.Popen[bytes]]]:
    """The first rank is here, on the first GPU; the other is a process that sees the second one only."""
    seats = [Seat(rank=rank, size=2, timeout_s=timeout_s, start_s=180.0) for rank in range(2)]
    first = FirstSeat(seats[0])
    arguments = [msgspec.json.encode(value).decode() for value in (told, seats[1], first.meeting)]
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.workers.loaded_rank", *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"},
        cwd=Path(__file__).parents[2],
    )
    try:
        assembly = assemble(told, ranks=first.meet(compute_device(told.device)))
        yield assembly, other
        assembly.close()
        other.wait(timeout=60)
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_answer_as_one_does(pair: PairSpec, dtype: Any, sampling: str) -> None:
    """In float32 token for token; in bfloat16, with captured steps, roundings differ, and steps are about as many."""
    told = config("aggregated", dtype=dtype, device=DEVICE_NAME, pair=pair)
    alone = answers(assemble(told).engine, PROMPTS, SAMPLINGS[sampling])
    with two_ranks(told) as (assembly, other):
        captured = type(assembly.engine.decode._step._work._step).__name__  # type: ignore[attr-defined]
        assert captured == ("CapturedStep" if (DEVICE_NAME, dtype) == ("cuda", "bfloat16") else "EagerStep")
        together = answers(assembly.engine, PROMPTS, SAMPLINGS[sampling])
    assert other.returncode == 0
    if dtype == "float32":
        assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert all(len(each.tokens) == 48 for each in together)
    steps = [sum(each.stats.decode_steps for each in found if each.stats) for found in (alone, together)]
    assert steps[1] <= 1.3 * steps[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_killed_rank_is_found_between_steps(pair: PairSpec, dtype: Any) -> None:
    told = config("aggregated", dtype=dtype, device=DEVICE_NAME, pair=pair)
    with two_ranks(told, timeout_s=8.0) as (assembly, other):
        answers(assembly.engine, PROMPTS, SAMPLINGS["greedy"])
        other.kill()
        other.wait()
        began_s = time.monotonic()
        with pytest.raises(GroupBroken):
            answers(assembly.engine, PROMPTS, SAMPLINGS["greedy"])
        assert time.monotonic() - began_s < 10.0
