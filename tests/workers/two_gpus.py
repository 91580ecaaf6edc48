"""A worker of two ranks on two devices: the first rank is in this process, the other is one that sees the second GPU.

As a program, `python -m tests.workers.two_gpus CONFIG` hosts such a worker for a test that asks it over its standard
input and output, a line of JSON each: first it tells its hello, base64; then it answers

    ["connect", hello, base64]      with "connected"
    ["prefill", PrefillRequest]     with the prompt tokens that it computed, once the prompt has been shipped
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from workers.assembly import Assembly, assemble
from workers.config import WorkerConfig
from workers.device import compute_device
from workers.group.meeting import FirstSeat
from workers.group.ranks import Seat
from workers.host import EngineHost
from workers.request import PrefillRequest

ROOT = Path(__file__).parents[2]


@contextmanager
def two_ranks(
    told: WorkerConfig, timeout_s: float = 60.0
) -> Iterator[tuple[Assembly, subprocess.Popen[bytes]]]:
    seats = [Seat(rank=rank, size=2, timeout_s=timeout_s, start_s=180.0) for rank in range(2)]
    first = FirstSeat(seats[0])
    arguments = [msgspec.json.encode(value).decode() for value in (told, seats[1], first.meeting)]
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.workers.loaded_rank", *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        cwd=ROOT,
    )
    try:
        assembly = assemble(told, ranks=first.meet(compute_device(told.device)))
        yield assembly, other
        assembly.close()
        other.wait(timeout=60)
    finally:
        other.kill()
        other.wait()


class HostedWorker:
    """The program, as a test asks it. Close it."""

    def __init__(self, told: WorkerConfig) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.two_gpus", msgspec.json.encode(told).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            self.hello = b64decode(self._answer())
        except BaseException:
            self.close()
            raise

    def connect(self, hello: bytes) -> None:
        self._ask("connect", b64encode(hello).decode())

    def prefill(self, request: PrefillRequest) -> int:
        return int(self._ask("prefill", request))

    def close(self) -> None:
        """End it as it should end; it is killed when it does not."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, *order: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the worker has ended")
        return msgspec.json.decode(line)


def main(config: str) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever libraries print is no answer

    def tell(answer: object) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")

    with two_ranks(msgspec.json.decode(config, type=WorkerConfig)) as (assembly, _):
        host = EngineHost(assembly, num_threads=1)
        host.start()
        tell(b64encode(host.facts.hello).decode())
        for line in sys.stdin.buffer:
            what, told = msgspec.json.decode(line, type=tuple[str, msgspec.Raw])
            if what == "connect":
                host.connect(b64decode(msgspec.json.decode(told, type=str)))
                tell("connected")
            else:
                asyncio.run(host.prefill(msgspec.json.decode(told, type=PrefillRequest)))
                tell(host.stats().prompt_tokens_computed)
        host.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
