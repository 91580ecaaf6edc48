"""S26: Ray's control store stands still for ten seconds. No token passes through it, so who serves must not notice."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.answers import AnswerChunk
from cluster.client import Client
from tests.cluster.parts import Part, environment, worker_pid, workers_at

pytestmark = [pytest.mark.ray, pytest.mark.chaos, pytest.mark.timeout(240)]

STOPPED_S = 10.0
SLOW = "tests.cluster.slow_worker:SlowHost"  # two tokens every 0.4 s
NAMES = {"aggregated-0", "aggregated-1"}
CONFIG = 'mode = "aggregated"\naggregated_workers = 2\npair = "tiny"\nlisten = "127.0.0.1:0"\n'


@pytest.fixture
def home() -> Iterator[Path]:
    # Ray puts sockets below this path, and their paths are limited to 107 bytes.
    home = Path("/tmp") / f"slip-{os.getpid()}-{time.monotonic_ns() % 100_000}"
    home.mkdir()
    yield home
    subprocess.run(["rm", "-rf", str(home)], check=True)


@pytest.fixture
def served(home: Path) -> Iterator[Part]:
    (home / "served.toml").write_text(CONFIG)
    part = Part(
        home / "serve.log",
        *("serve", "--config", str(home / "served.toml"), "--host-factory", SLOW),
        env=environment(home),
    )
    yield part
    part.kill()


def control_store(home: Path) -> int:
    """The process id of the control store of the Ray whose files are in this home."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if b"/gcs_server" in command.split(b"\0")[0] and str(home).encode() in command:
                found.append(int(process.name))
    [pid] = found
    return pid


def test_s26_streams_and_new_requests_go_on_while_rays_control_store_is_stopped(
    home: Path, served: Part
) -> None:
    address = served.wait_for(r"ready on (\S+)").group(1)
    before = {name: worker.epoch for name, worker in workers_at(address).items()}
    assert before.keys() == NAMES
    arrived_s: list[float] = []
    tokens: list[int] = []

    def read() -> None:
        with Client(address) as client:
            for event in client.generate([104, 105], max_tokens=60):
                if isinstance(event, AnswerChunk):
                    arrived_s.append(time.monotonic())
                    tokens.extend(event.token_ids)

    reader = threading.Thread(target=read)
    reader.start()
    while not tokens:
        time.sleep(0.01)
    store = control_store(home)
    stopped_s = time.monotonic()
    os.kill(store, signal.SIGSTOP)
    try:
        with Client(address) as client:
            assert list(client.generate([104, 105], max_tokens=4)), "new requests are served without it"
        time.sleep(max(0.0, stopped_s + STOPPED_S - time.monotonic()))
    finally:
        os.kill(store, signal.SIGCONT)
    went_on_s = time.monotonic()
    reader.join(timeout=60)
    assert not reader.is_alive()
    assert tokens == [104, 105] * 30
    while_stopped = [moment for moment in arrived_s if stopped_s < moment < went_on_s]
    assert len(while_stopped) >= 10, "tokens came while the store stood still"
    assert {name: worker.epoch for name, worker in workers_at(address).items()} == before

    os.kill(worker_pid(home, "aggregated-1"), signal.SIGKILL)  # and it is of use again: actors can be made
    until_s = time.monotonic() + 90
    while (worker := workers_at(address).get("aggregated-1")) is None or worker.epoch in (
        "",
        before["aggregated-1"],
    ):
        assert time.monotonic() < until_s, served.log.read_text()
        time.sleep(0.1)
    assert workers_at(address)["aggregated-0"].epoch == before["aggregated-0"]
    assert served.end() == 0
