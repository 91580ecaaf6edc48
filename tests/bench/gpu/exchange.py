"""What two ranks on two GPUs exchange in a step: sums of activations over NCCL, and the words between their hosts.

    python -m tests.bench.gpu.exchange [--tokens 16 128 512 2048] [--hidden 4096]

Sums are of bfloat16 [tokens, hidden], twenty of them in one captured graph; the median of some replays, each behind
others of it. Limit: their bytes over a plain copy from the other GPU in this run. Before that, some sums are checked
against their parts. A step's words: the first rank tells of a step, and all vote.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from functools import partial

import msgspec
import torch
from torch import Tensor

from tests.bench.gpu import limits
from tests.bench.gpu.figures import median, report
from workers.group.meeting import FirstSeat, Meeting, attend
from workers.group.ranks import GroupRanks, Seat

_SUMS, _REPEATS, _CHECKS = 20, 20, 4
_WORDS, _WORD_BYTES = 200, 8192
_COPY_BYTES = 256 << 20


def main(arguments: list[str] | None = None) -> None:
    """Raises ValueError for a wrong sum, on either rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128, 512, 2048])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--follow", help="for the other process: its seat and where to meet, as JSON")
    options = parser.parse_args(arguments)
    if options.follow is not None:
        seat, meeting = msgspec.json.decode(options.follow, type=tuple[Seat, Meeting])
        ranks = attend(seat, meeting, torch.device("cuda", 0))
        ranks.started()
        sums(ranks, options)
        for _ in range(_WORDS):
            ranks.hear()
            ranks.vote()
            ranks.cast()
        ranks.close()
        return
    if torch.cuda.device_count() < 2:
        print(f"two GPUs are needed, here are {torch.cuda.device_count()}")
        return
    limit = peer_copy_bytes_per_s()
    seats = [Seat(rank=rank, size=2, timeout_s=60.0, start_s=120.0) for rank in range(2)]
    first = FirstSeat(seats[0])
    told = msgspec.json.encode((seats[1], first.meeting)).decode()
    told_too = ["--tokens", *map(str, options.tokens), "--hidden", str(options.hidden), "--follow", told]
    command = [sys.executable, "-m", "tests.bench.gpu.exchange", *told_too]
    follower = subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"})
    try:
        ranks = first.meet(torch.device("cuda", 0))
        ranks.started()
        for tokens, taken_s in sums(ranks, options).items():
            num_bytes = 2 * tokens * options.hidden
            report("sum over two ranks", tokens, taken_s * 1e6, "us", num_bytes / limit * 1e6)
        report("a step's words", "", words_s(ranks) * 1e6, "us")
        if follower.wait(timeout=60) != 0:
            raise ValueError("the other rank found a wrong sum; see above")
        ranks.close()
    finally:
        follower.kill()
        follower.wait()


def sums(ranks: GroupRanks, options: argparse.Namespace) -> dict[int, float]:
    """Device seconds of a sum, by tokens; both ranks call it."""
    return {tokens: timed(ranks, (tokens, options.hidden)) for tokens in options.tokens}


def timed(ranks: GroupRanks, shape: tuple[int, int]) -> float:
    """Raises ValueError for a wrong sum."""
    x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    ranks.sum(x)
    graph, one = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_SUMS):
            ranks.sum(x)
    with torch.cuda.graph(one, capture_error_mode="thread_local"):
        ranks.sum(x)
    for seed in range(_CHECKS):
        parts = [random(2 * seed + each, shape) for each in range(2)]
        expected = (parts[0].float() + parts[1].float()).to(x.dtype)
        for sum_up in (partial(ranks.sum, x), one.replay):
            x.copy_(parts[ranks.rank])
            sum_up()
            if not torch.equal(x, expected):
                raise ValueError(f"{shape}: {int((x != expected).sum())} sums are wrong")
    return median([limits.seconds(graph.replay, 1) for _ in range(_REPEATS)]) / _SUMS


def random(seed: int, shape: tuple[int, int]) -> Tensor:
    """The same on both ranks."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16).cuda()


def words_s(ranks: GroupRanks) -> float:
    took_s = []
    for _ in range(_WORDS):
        began_s = time.perf_counter()
        ranks.tell(bytes(_WORD_BYTES))
        ranks.vote()
        ranks.cast()
        took_s.append(time.perf_counter() - began_s)
    return median(took_s)


def peer_copy_bytes_per_s() -> float:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cuda:1")
    destination = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda:0")
    return _COPY_BYTES / limits.seconds(lambda: destination.copy_(source, non_blocking=True), _REPEATS)


if __name__ == "__main__":
    main()
