"""Workers that outlive their supervisor on a Ray that runs already: found again, and rolled when they must change."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.client import Client
from tests.cluster.parts import Part, environment, worker_pid, workers_at
from tests.cluster.ray_head import RayHead, free_ports

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(240)]

SLOW = "tests.cluster.slow_worker:SlowHost"
CONFIG = """
mode = "aggregated"
aggregated_workers = 2
pair = "tiny"
[placement]
role_label = "role"
cpus = 0.5
"""
NAMES = {"aggregated-0", "aggregated-1"}


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    head = RayHead(labels="role=aggregated")
    yield head
    head.stop()
    assert head.processes() == []


class Kept:
    """`slipstream workers --keep-workers` on a Ray, and a gateway attached to it."""

    def __init__(self, head: RayHead) -> None:
        self.head = head
        self.registry = f"127.0.0.1:{free_ports(1)[0]}"
        self.env = environment(head.home, RAY_ADDRESS=head.address, PATH=head.env["PATH"])
        self.parts: list[Part] = []

    def start(self, *options: str, ready: str = "workers ready") -> Part:
        part = self.part("workers", *options, "--registry", self.registry, "--keep-workers")
        part.wait_for(ready)
        return part

    def part(self, command: str, *options: str) -> Part:
        config = self.head.home / "kept.toml"
        config.write_text(CONFIG)
        factory = ("--host-factory", SLOW) if command == "workers" else ()
        part = Part(
            self.head.home / f"{command}-{len(self.parts)}.log",
            *(command, "--config", str(config), *options, *factory),
            env=self.env,
        )
        self.parts.append(part)
        return part


@pytest.fixture
def kept(head: RayHead) -> Iterator[Kept]:
    kept = Kept(head)
    yield kept
    for part in kept.parts:
        part.kill()


def epochs(gateway: str) -> dict[str, str]:
    return {name: worker.epoch for name, worker in workers_at(gateway).items()}


def test_workers_outlive_their_supervisor_and_the_next_one_finds_and_rolls_them(kept: Kept) -> None:
    first = kept.start()
    part = kept.part("gateway", "--attach", kept.registry, "--listen", "127.0.0.1:0")
    gateway = part.wait_for(r"ready on (\S+) after").group(1)
    before = epochs(gateway)
    assert before.keys() == NAMES

    texts: list[str] = []

    def read() -> None:
        with Client(gateway) as client:
            texts.extend(event.text for event in client.generate([104, 105], max_tokens=60))

    reader = threading.Thread(target=read)
    reader.start()
    while not texts:
        time.sleep(0.01)
    first.kill()  # no goodbye, and a stream under way
    second = kept.start()
    assert "found serving" in second.log.read_text()
    reader.join(timeout=60)
    assert not reader.is_alive()
    assert len(texts) > 1
    assert epochs(gateway) == before

    os.kill(worker_pid(kept.head.home, "aggregated-1"), signal.SIGKILL)
    until_s = time.monotonic() + 90
    while (now := epochs(gateway)).keys() != NAMES or now["aggregated-1"] in ("", before["aggregated-1"]):
        assert time.monotonic() < until_s, second.log.read_text()
        time.sleep(0.1)
    assert now["aggregated-0"] == before["aggregated-0"]
    before = now

    refused = kept.part("workers", "--registry", f"127.0.0.1:{free_ports(1)[0]}", "--keep-workers")
    assert refused.process.wait(timeout=90) == 1
    assert "another process keeps the workers of namespace 'slipstream'" in refused.log.read_text()

    assert second.end() == 0  # as a pod that is replaced: its workers stay
    assert epochs(gateway) == before
    kept.start("--max-batch", "3")
    seen: list[dict[str, str]] = []
    until_s = time.monotonic() + 90
    while not seen or not {*seen[-1].values()}.isdisjoint(before.values()) or seen[-1].keys() != NAMES:
        assert time.monotonic() < until_s, seen
        seen.append(epochs(gateway))
        with Client(gateway) as client:  # one of them serves at any moment
            assert list(client.generate([104, 105], max_tokens=2))
        time.sleep(0.1)


def test_what_is_not_kept_ends_with_its_supervisor(kept: Kept, head: RayHead) -> None:
    def actors() -> set[str]:
        return {line.split()[0] for line in head.actors()}

    others = actors()
    config = Path(head.home / "owned.toml")
    config.write_text('mode = "aggregated"\npair = "tiny"\nray_namespace = "another"\n')
    part = Part(
        head.home / "owned.log",
        *("workers", "--config", str(config), "--registry", "127.0.0.1:0", "--host-factory", SLOW),
        env=kept.env,
    )
    kept.parts.append(part)
    part.wait_for("workers ready")
    assert len(actors() - others) == 1
    assert part.end() == 0
    until_s = time.monotonic() + 30
    while actors() - others:
        assert time.monotonic() < until_s
        time.sleep(0.1)
