"""A worker of several ranks on a Ray: each rank an actor, one worker to the gateway, and one life for all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.answers import AnswerEnd
from cluster.client import Client
from tests.cluster.failing_worker import ORDER
from tests.cluster.parts import Part, environment, held_at, worker_pid, workers_at
from tests.cluster.ray_head import RayHead, free_ports
from tests.workers.split_pair import run_aggregated
from workers.assembly import Models, load_models
from workers.config import PairSpec, WorkerConfig
from workers.request import RequestStats, SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

MAX_TOKENS = 40
LONG = 240
PROMPT = list(range(40, 70))
LONG_PROMPT = [32 + index * index % 90 for index in range(800)]
MAX_SEQ_LEN = 1152
COMMON = f"""
pair = "tiny"
dtype = "float64"
draft_tokens = "full"
max_batch = 4
max_seq_len = {MAX_SEQ_LEN}
chunk_tokens = 32
heartbeat_interval_s = 0.2
prefix_cache = false
num_threads = 1
rank_timeout_s = 8
silence_limit_s = 8
replay_wait_s = 90
"""
AGGREGATED = f"""
mode = "aggregated"
{COMMON}
[aggregated]
tensor_parallel_size = 2
"""
SPLIT = f"""
{COMMON}
[context]
tensor_parallel_size = 2
"""
PAIR = f"""
{SPLIT}
[generation]
tensor_parallel_size = 2
"""
APART = f"""
{PAIR}
attention_dp = true
"""
TP2, TP4 = "tensor_parallel_size = 2", "tensor_parallel_size = 4"
DP2 = f"{TP2}\nattention_dp = true"
TARGET_BYTES, DRAFT_BYTES = 2 * 4 * 2 * 32 * 8, 2 * 2 * 2 * 32 * 8  # K|V, layers, KV heads, head_dim, float64
SHIPPED_TOKENS = 32  # of the prompt, in whole pages of 16


@dataclass
class Served:
    home: Path
    part: Part
    address: str

    def ask(
        self, prompt: Sequence[int], max_tokens: int, then: Callable[[], object] = lambda: None
    ) -> tuple[list[int], RequestStats | None]:
        """The answer's tokens, and what they cost. `then` is called once the first have come."""
        tokens: list[int] = []
        with Client(self.address) as client:
            for event in client.generate(list(prompt), max_tokens=max_tokens, ignore_eos=True):
                if isinstance(event, AnswerEnd):
                    return tokens, event.usage.stats
                if not tokens:
                    then()
                tokens += event.token_ids
        raise AssertionError("no end")

    def epoch(self, worker: str) -> str:
        """Empty while nobody serves there."""
        known = workers_at(self.address).get(worker)
        return known.epoch if known is not None else ""

    def pids(self, worker: str) -> list[int]:
        """Of both ranks."""
        return [worker_pid(self.home, name) for name in (worker, f"{worker}/1")]


def wait_until(what: Callable[[], bool], log: Path, limit_s: float = 90.0) -> None:
    until_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.1)


@contextmanager
def serving(settings: str, *options: str) -> Iterator[Served]:
    # Ray puts sockets below this path, and their paths are limited to 107 bytes.
    home = Path("/tmp") / f"slip-{os.getpid()}-{time.monotonic_ns() % 100_000}"
    home.mkdir()
    config = home / "cluster.toml"
    config.write_text(settings)
    part = Part(
        home / "serve.log",
        *("serve", "--config", str(config), "--listen", "127.0.0.1:0", *options),
        env=environment(home),
    )
    try:
        yield Served(home, part, part.wait_for(r"ready on (\S+)")[1])
    finally:
        part.kill()
        subprocess.run(["rm", "-rf", str(home)], check=True)


@pytest.fixture(scope="module")
def alone() -> Models:
    return load_models(WorkerConfig(role="aggregated", pair=PairSpec(name="tiny"), dtype="float64"))


def golden(alone: Models, prompt: list[int], max_tokens: int) -> tuple[list[int], RequestStats | None]:
    """What one rank says, and in which steps."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    [outcome] = run_aggregated(alone, [prompt], sampling, max_seq_len=MAX_SEQ_LEN, dtype="float64")
    return outcome.tokens, outcome.stats


def test_two_ranks_answer_through_the_gateway_as_one_does_and_end_with_it(alone: Models) -> None:
    with serving(AGGREGATED) as served:
        assert served.ask(PROMPT, MAX_TOKENS) == golden(alone, PROMPT, MAX_TOKENS)
        assert workers_at(served.address).keys() == {"aggregated-0"}
        assert held_at(served.address) == []
        pids = served.pids("aggregated-0")
        assert served.part.end() == 0
        wait_until(lambda: gone(pids), served.part.log)


def test_two_context_ranks_feed_a_generation_worker_of_one(alone: Models) -> None:
    with serving(SPLIT) as served:
        tokens, stats = served.ask(PROMPT, MAX_TOKENS)
        said, one = golden(alone, PROMPT, MAX_TOKENS)
        assert tokens == said
        assert stats is not None
        assert one is not None
        assert (stats.decode_steps, stats.accepted_by_position) == (
            one.decode_steps,
            one.accepted_by_position,
        )
        generation = workers_at(served.address)["generation-0"]
        assert generation.prompt_tokens_computed == 0
        assert generation.kv_bytes_target == SHIPPED_TOKENS * TARGET_BYTES
        assert generation.kv_bytes_draft == SHIPPED_TOKENS * DRAFT_BYTES
        assert held_at(served.address) == []


@pytest.mark.soak
def test_generation_ranks_that_keep_requests_apart_answer_as_one_does(alone: Models) -> None:
    prompts = [PROMPT, PROMPT[::-1], PROMPT[3:]]
    with serving(APART) as served:
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(lambda prompt: served.ask(prompt, MAX_TOKENS), prompts))
        for prompt, (tokens, stats) in zip(prompts, found, strict=True):
            said, one = golden(alone, prompt, MAX_TOKENS)
            assert tokens == said
            assert stats is not None
            assert one is not None
            assert stats.accepted_by_position == one.accepted_by_position
        generation = workers_at(served.address)["generation-0"]
        assert generation.prompt_tokens_computed == 0
        assert generation.kv_bytes_target == len(prompts) * SHIPPED_TOKENS * TARGET_BYTES
        assert held_at(served.address) == []


@dataclass(frozen=True)
class Loss:
    """A rank of a worker that is lost once the worker computes, or once the first tokens have come."""

    worker: str
    rank: int
    sent: signal.Signals
    streaming: bool


def lose_and_answer(served: Served, loss: Loss, prompt: Sequence[int], said: list[int]) -> None:
    before, pids = served.epoch(loss.worker), served.pids(loss.worker)
    began_s = time.monotonic()
    if loss.streaming:
        tokens, _ = served.ask(prompt, len(said), then=lambda: os.kill(pids[loss.rank], loss.sent))
    else:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(served.ask, prompt, len(said))
            wait_until(lambda: workers_at(served.address)[loss.worker].running > 0, served.part.log)
            os.kill(pids[loss.rank], loss.sent)
            tokens, _ = asked.result()
    print(f"{loss}: answered after {time.monotonic() - began_s:.1f} s")
    assert tokens == said
    assert served.epoch(loss.worker) not in ("", before)
    wait_until(lambda: gone(pids), served.part.log)
    wait_until(lambda: held_at(served.address) == [], served.part.log)


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
LOSSES = [Loss("aggregated-0", rank, sent, True) for rank in (1, 0) for sent in (KILL, STOP)]
SPLIT_LOSSES = [
    Loss("context-0", 1, KILL, False),
    Loss("context-0", 1, STOP, False),
    Loss("context-0", 0, KILL, False),
    Loss("context-0", 0, STOP, False),
    Loss("generation-0", 1, KILL, False),
    Loss("generation-0", 1, STOP, False),
    Loss("generation-0", 1, KILL, True),
    Loss("generation-0", 1, STOP, True),
    Loss("generation-0", 0, KILL, True),
    Loss("generation-0", 0, STOP, True),
]


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("settings", "losses", "prompt"),
    [(AGGREGATED, LOSSES, PROMPT), (PAIR, SPLIT_LOSSES, LONG_PROMPT)],
    ids=["aggregated", "split"],
)
def test_a_group_falls_as_a_whole_and_another_one_goes_on_with_the_stream(
    alone: Models, settings: str, losses: list[Loss], prompt: list[int]
) -> None:
    """Whichever rank is lost, and however: no rank of the old group stays, and no token is lost or said twice."""
    said, _ = golden(alone, prompt, LONG)
    with serving(settings) as served:
        for loss in losses:
            lose_and_answer(served, loss, prompt, said)


@pytest.mark.chaos
def test_an_error_in_a_rank_ends_all_of_them_and_the_stream_goes_on(alone: Models) -> None:
    said, _ = golden(alone, PROMPT, LONG)
    with serving(AGGREGATED, "--host-factory", "tests.cluster.failing_worker:FailingHost") as served:
        before, pids = served.epoch("aggregated-0"), served.pids("aggregated-0")
        assert served.ask(PROMPT, LONG, then=(served.home / ORDER).touch)[0] == said
        assert served.epoch("aggregated-0") not in ("", before)
        wait_until(lambda: gone(pids), served.part.log)
        assert "the engine failed: MemoryError: no memory is left" in served.part.log.read_text()
        assert held_at(served.address) == []


@pytest.mark.chaos
def test_a_first_rank_that_waits_for_a_device_ends_with_the_rank_that_the_device_waits_for(
    alone: Models,
) -> None:
    said, _ = golden(alone, PROMPT, LONG)
    with serving(AGGREGATED, "--host-factory", "tests.cluster.failing_worker:StuckHost") as served:
        pids, order = served.pids("aggregated-0"), served.home / ORDER

        def stick() -> None:
            order.touch()
            wait_until(lambda: not order.exists(), served.part.log)
            os.kill(pids[1], signal.SIGKILL)

        assert served.ask(PROMPT, LONG, then=stick)[0] == said
        assert gone(pids)
        assert "the process of worker aggregated-0 has died" in served.part.log.read_text()


@pytest.mark.chaos
@pytest.mark.parametrize(("context", "generation"), [(TP2, DP2), (DP2, TP4)])
def test_roles_of_any_ranks_feed_each_other(alone: Models, context: str, generation: str) -> None:
    settings = f"{COMMON}\n[context]\n{context}\n[generation]\n{generation}\n"
    prompts = [PROMPT[:length] + LONG_PROMPT[:length] for length in (10, 16, 23, 30)]
    with serving(settings) as served, ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: served.ask(prompt, MAX_TOKENS), prompts))
        for prompt, (tokens, stats) in zip(prompts, answers, strict=True):
            said, one = golden(alone, prompt, MAX_TOKENS)
            assert tokens == said
            assert stats is not None
            assert one is not None
            assert stats.accepted_by_position == one.accepted_by_position
        assert workers_at(served.address)["generation-0"].prompt_tokens_computed == 0
        wait_until(lambda: held_at(served.address) == [], served.part.log)


@pytest.mark.chaos
def test_a_kept_group_outlives_its_supervisor_whole_and_is_rolled_whole(alone: Models) -> None:
    said, _ = golden(alone, PROMPT, MAX_TOKENS)
    head = RayHead()
    registry = f"127.0.0.1:{free_ports(1)[0]}"
    env = environment(head.home, RAY_ADDRESS=head.address, PATH=head.env["PATH"])
    config = head.home / "kept.toml"
    config.write_text(AGGREGATED)
    parts: list[Part] = []

    def part(*arguments: str) -> Part:
        log = head.home / f"part-{len(parts)}.log"
        parts.append(Part(log, *arguments, "--config", str(config), env=env))
        return parts[-1]

    def keep(*options: str) -> Part:
        started = part("workers", "--registry", registry, "--keep-workers", *options)
        started.wait_for("workers ready")
        return started

    try:
        first = keep()
        gateway = part("gateway", "--attach", registry, "--listen", "127.0.0.1:0")
        served = Served(head.home, gateway, gateway.wait_for(r"ready on (\S+) after")[1])
        assert served.ask(PROMPT, MAX_TOKENS)[0] == said
        before, pids = served.epoch("aggregated-0"), served.pids("aggregated-0")
        first.kill()  # no goodbye
        second = keep()
        assert "found serving" in second.log.read_text()
        time.sleep(3)  # Ray cleans up behind a driver
        assert served.ask(PROMPT, MAX_TOKENS)[0] == said
        assert (served.epoch("aggregated-0"), served.pids("aggregated-0")) == (before, pids)
        assert second.end() == 0
        keep("--max-batch", "3")
        wait_until(lambda: served.epoch("aggregated-0") not in ("", before), second.log)
        assert served.ask(PROMPT, MAX_TOKENS)[0] == said
        wait_until(lambda: gone(pids), second.log)
    finally:
        for each in parts:
            each.kill()
        head.stop()


def gone(pids: list[int]) -> bool:
    """Whether none of these processes lives; Ray may not have looked after one that is dead yet."""
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return False
        except OSError:
            continue
    return True
