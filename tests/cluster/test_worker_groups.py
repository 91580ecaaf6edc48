"""A worker of several ranks on a Ray: each rank an actor, one worker to the gateway, and one life for all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.client import Client
from tests.cluster.parts import Part, environment, held_at, worker_pid, workers_at
from tests.workers.split_pair import run_aggregated
from workers.assembly import load_models
from workers.config import PairSpec, WorkerConfig
from workers.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

MAX_TOKENS = 40
LONG = 440
PROMPT = list(range(40, 70))
CONFIG = """
mode = "aggregated"
pair = "tiny"
dtype = "float64"
max_batch = 4
max_seq_len = 512
num_threads = 1
rank_timeout_s = 8
silence_limit_s = 8
replay_wait_s = 90
[aggregated]
tensor_parallel_size = 2
"""


@dataclass
class Served:
    home: Path
    part: Part
    address: str

    def ask(self, max_tokens: int, then: Callable[[], object] = lambda: None) -> list[int]:
        """The answer's tokens. `then` is called once the first have come."""
        tokens: list[int] = []
        with Client(self.address) as client:
            for event in client.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True):
                first = not tokens
                tokens += getattr(event, "token_ids", ())
                if first and tokens:
                    then()
        return tokens

    @property
    def epoch(self) -> str:
        return workers_at(self.address)["aggregated-0"].epoch

    def pids(self) -> list[int]:
        """Of both ranks."""
        return [worker_pid(self.home, name) for name in ("aggregated-0", "aggregated-0/1")]


def wait_until(what: Callable[[], bool], log: Path, limit_s: float = 90.0) -> None:
    until_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.1)


@pytest.fixture
def served() -> Iterator[Served]:
    # Ray puts sockets below this path, and their paths are limited to 107 bytes.
    home = Path("/tmp") / f"slip-{os.getpid()}-{time.monotonic_ns() % 100_000}"
    home.mkdir()
    config = home / "cluster.toml"
    config.write_text(CONFIG)
    part = Part(
        home / "serve.log",
        *("serve", "--config", str(config), "--listen", "127.0.0.1:0"),
        env=environment(home),
    )
    try:
        yield Served(home, part, part.wait_for(r"ready on (\S+)")[1])
    finally:
        part.kill()
        subprocess.run(["rm", "-rf", str(home)], check=True)


@pytest.fixture(scope="module")
def golden() -> list[int]:
    """What one rank says."""
    models = load_models(WorkerConfig(role="aggregated", pair=PairSpec(name="tiny"), dtype="float64"))
    sampling = SamplingParams(max_tokens=LONG, ignore_eos=True)
    return run_aggregated(models, [PROMPT], sampling, dtype="float64")[0].tokens


def test_two_ranks_answer_through_the_gateway_as_one_does_and_end_with_it(
    served: Served, golden: list[int]
) -> None:
    assert served.ask(MAX_TOKENS) == golden[:MAX_TOKENS]
    assert workers_at(served.address).keys() == {"aggregated-0"}
    assert held_at(served.address) == []
    pids = served.pids()
    assert served.part.end() == 0
    wait_until(lambda: gone(pids), served.part.log)


@pytest.mark.chaos
def test_a_group_falls_as_a_whole_and_another_one_goes_on_with_the_stream(
    served: Served, golden: list[int]
) -> None:
    """Whichever rank is lost, and however: no rank of the old group stays, and no token is lost or said twice."""
    for rank, sent in ((1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGKILL), (0, signal.SIGSTOP)):
        before, pids = served.epoch, served.pids()

        def lose(pid: int = pids[rank], sent: signal.Signals = sent) -> None:
            os.kill(pid, sent)

        began_s = time.monotonic()
        assert served.ask(LONG, lose) == golden
        print(f"rank {rank}, {sent.name}: answered after {time.monotonic() - began_s:.1f} s")
        assert served.epoch not in ("", before)
        assert held_at(served.address) == []
        wait_until(lambda pids=pids: gone(pids), served.part.log)  # type: ignore[misc]


def gone(pids: list[int]) -> bool:
    """Whether none of these processes lives; Ray may not have looked after one that is dead yet."""
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return False
        except OSError:
            continue
    return True
