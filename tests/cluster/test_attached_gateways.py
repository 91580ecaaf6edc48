"""Gateways and workers as processes of their own, on a local Ray, with a real model pair: any of them may die."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.client import Client
from cluster.errors import RequestError
from cluster.rpc.v1 import admin_pb2
from tests.cluster.parts import Part, environment, held_at, worker_pid, workers_at
from tests.cluster.ray_head import free_ports
from tests.workers.split_pair import run_aggregated
from workers.assembly import load_models
from workers.config import PairSpec, WorkerConfig
from workers.request import SamplingParams

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

MAX_TOKENS = 60
LONG = 400
ENDLESS = 1900  # seconds of steps, on any machine: such a request is under way when what it waits for happens
PROMPTS = tuple(tuple(range(start, start + 20)) for start in (40, 90, 140, 190))
CONFIG = """
pair = "tiny"
generation_workers = 2
max_batch = 4
max_seq_len = 2048
draft_tokens = 0
silence_limit_s = 3
heartbeat_timeout_s = 2
num_threads = 1
drain_s = 60
"""


@dataclass
class Cluster:
    home: Path
    workers: Part
    registry: str
    metrics: str
    parts: list[Part] = field(default_factory=list)

    def gateway(self) -> tuple[Part, str, float]:
        """A new gateway, its address, and the seconds that it took to become ready."""
        log = self.home / f"gateway-{len(self.parts)}.log"
        part = Part(
            log,
            *("gateway", "--config", str(self.home / "cluster.toml")),
            *("--attach", self.registry, "--listen", "127.0.0.1:0"),
            env=environment(self.home),
        )
        self.parts.append(part)
        ready = part.wait_for(r"ready on (\S+) after (\S+) s")
        return part, ready[1], float(ready[2])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Ray puts sockets below this path, and their paths are limited to 107 bytes.
    home = Path("/tmp") / f"slip-{os.getpid()}-{time.monotonic_ns() % 100_000}"
    home.mkdir()
    config = home / "cluster.toml"
    config.write_text(CONFIG)
    registry, metrics = (f"127.0.0.1:{port}" for port in free_ports(2))
    workers = Part(
        home / "workers.log",
        *("workers", "--config", str(config), "--registry", registry, "--metrics", metrics),
        env=environment(home),
    )
    cluster = Cluster(home, workers, registry, metrics)
    try:
        workers.wait_for("workers ready")
        yield cluster
        for part in cluster.parts:
            part.kill()
        assert workers.end() == 0
    finally:
        for part in (*cluster.parts, workers):
            part.kill()
        subprocess.run(["rm", "-rf", str(home)], check=True)


@pytest.fixture(scope="module")
def golden() -> dict[tuple[int, ...], list[int]]:
    """What one engine says to each prompt alone."""
    models = load_models(WorkerConfig(role="aggregated", pair=PairSpec(name="tiny")))
    sampling = SamplingParams(max_tokens=LONG, ignore_eos=True, draft_tokens=0)
    return {prompt: run_aggregated(models, [prompt], sampling)[0].tokens for prompt in PROMPTS}


class Asking:
    """A request on a thread. `tokens` are those that came; `error` is how it failed, if it did."""

    def __init__(self, address: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        self.tokens: list[int] = []
        self.error: RequestError | None = None
        self._thread = threading.Thread(target=self._run, args=(address, prompt, max_tokens))
        self._thread.start()

    def _run(self, address: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        try:
            with Client(address) as client:
                for event in client.generate(list(prompt), max_tokens=max_tokens, ignore_eos=True):
                    self.tokens += getattr(event, "token_ids", ())
        except RequestError as error:
            self.error = error

    def begun(self) -> Asking:
        wait_until(lambda: bool(self.tokens), "no token came")
        return self

    def over(self) -> list[int]:
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        return self.tokens

    def answer(self) -> list[int]:
        """As `over`, of a request that must not fail."""
        tokens = self.over()
        assert self.error is None, self.error
        return tokens


def wait_until(true: Callable[[], bool], otherwise: str, timeout_s: float = 60.0) -> None:
    until_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < until_s, otherwise
        time.sleep(0.05)


def all_ready(address: str) -> bool:
    """All three workers, and the context worker may ship to both others."""
    workers = workers_at(address)
    return (
        len(workers) == 3
        and all(worker.state == admin_pb2.WORKER_STATE_READY for worker in workers.values())
        and len(workers["context-0"].peers.names) == 2
    )


def test_two_gateways_serve_the_same_workers_at_once(
    cluster: Cluster, golden: dict[tuple[int, ...], list[int]]
) -> None:
    addresses = [cluster.gateway()[1] for _ in range(2)]
    asked = [
        (prompt, Asking(address, prompt, MAX_TOKENS))
        for prompt in PROMPTS * 2
        for address in addresses  # 16 requests for 8 slots: the workers let the others wait
    ]
    for prompt, asking in asked:
        assert asking.answer() == golden[prompt][:MAX_TOKENS]
    assert all(workers_at(address).keys() == workers_at(addresses[0]).keys() for address in addresses)
    wait_until(lambda: not held_at(addresses[0]), "the workers still hold something")


def test_a_gateway_that_is_ended_finishes_its_streams(
    cluster: Cluster, golden: dict[tuple[int, ...], list[int]]
) -> None:
    part, address, _ = cluster.gateway()
    asked = [(prompt, Asking(address, prompt, LONG).begun()) for prompt in PROMPTS[:2]]
    assert part.end() == 0
    for prompt, asking in asked:
        assert asking.answer() == golden[prompt]


def test_a_killed_gateways_requests_are_cancelled_and_another_finds_all_workers_within_5_s(
    cluster: Cluster, golden: dict[tuple[int, ...], list[int]]
) -> None:
    other = cluster.gateway()[1]
    killed, address, _ = cluster.gateway()
    lost = [Asking(address, prompt, ENDLESS).begun() for prompt in PROMPTS]
    kept = Asking(other, PROMPTS[0], LONG).begun()
    killed.kill()
    new, again, seconds = cluster.gateway()
    wait_until(lambda: all_ready(again), "it has not found all workers", timeout_s=5.0 - seconds)
    maps = Path(f"/proc/{new.process.pid}/maps").read_text()
    assert not [library for library in ("/torch/", "/ray/") if library in maps]  # what makes it this quick
    assert Asking(again, PROMPTS[1], MAX_TOKENS).answer() == golden[PROMPTS[1]][:MAX_TOKENS]
    assert kept.answer() == golden[PROMPTS[0]]  # the other gateway's stream did not notice
    for asking in lost:
        asking.over()
        assert asking.error is not None
        assert asking.error.code == "UNAVAILABLE"
    wait_until(lambda: not held_at(again), "a page or a slot of the dead gateway's is leaked")


def test_a_killed_worker_is_replaced_and_no_stream_is_cut(
    cluster: Cluster, golden: dict[tuple[int, ...], list[int]]
) -> None:
    addresses = [cluster.gateway()[1] for _ in range(2)]
    before = workers_at(addresses[0])
    asked = [
        (prompt, Asking(address, prompt, LONG).begun())
        for address, prompt in zip(addresses, PROMPTS[:2], strict=True)
    ]
    busy = [name for name, worker in workers_at(addresses[0]).items() if worker.running]
    os.kill(worker_pid(cluster.home, busy[0]), signal.SIGKILL)
    for prompt, asking in asked:
        assert asking.answer() == golden[prompt]
    wait_until(lambda: all(all_ready(address) for address in addresses), "it was not replaced")
    now = workers_at(addresses[1])
    assert {name for name in now if now[name].epoch != before[name].epoch} == {busy[0]}
    wait_until(lambda: not held_at(addresses[0]), "a page or a slot is leaked")


def test_a_stopped_worker_is_ended_and_replaced(
    cluster: Cluster, golden: dict[tuple[int, ...], list[int]]
) -> None:
    address = cluster.gateway()[1]
    before = workers_at(address)["context-0"].epoch
    stopped = worker_pid(cluster.home, "context-0")
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: not Path(f"/proc/{stopped}").exists(), "it was not ended")
    wait_until(lambda: all_ready(address), "it was not replaced")
    assert workers_at(address)["context-0"].epoch != before
    assert Asking(address, PROMPTS[2], MAX_TOKENS).answer() == golden[PROMPTS[2]][:MAX_TOKENS]
    metrics = subprocess.run(
        ["curl", "-sf", f"http://{cluster.metrics}/metrics"], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r'replacements_total\{reason="silent",role="context",worker="context-0"\} 1', metrics)


def test_a_machines_own_drain_lets_its_streams_finish(
    cluster: Cluster, golden: dict[tuple[int, ...], list[int]]
) -> None:
    address = cluster.gateway()[1]
    asking = Asking(address, PROMPTS[3], LONG).begun()
    drained = Part(
        cluster.home / "drain.log", "drain", "--here", "--wait", "30", env=environment(cluster.home)
    )
    assert asking.answer() == golden[PROMPTS[3]]
    assert drained.process.wait(timeout=40) == 0
    for name in ("context-0", "generation-0", "generation-1"):
        assert f"{name} is drained" in drained.log.read_text()
    with Client(address) as client:
        with pytest.raises(RequestError, match="draining"):
            list(client.generate(list(PROMPTS[0]), max_tokens=2))
        for name in ("context-0", "generation-0", "generation-1"):
            client.undrain(name)
        assert list(client.generate(list(PROMPTS[0]), max_tokens=2))
