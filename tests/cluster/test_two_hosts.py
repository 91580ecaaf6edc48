"""Context and generation worker on two hosts (network namespaces): KV goes from address to address, links may fail."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.answers import AnswerEnd
from cluster.client import Client
from cluster.errors import RequestError
from cluster.rpc.v1 import admin_pb2
from tests.cluster.ray_head import Host, RayHead, free_ports
from tests.faults import network

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not network.permitted(), reason="makes network namespaces"),
]

CONFIG = "deploy/examples/two-machines.toml"
PROMPTS = ("hello", "one two three four", "The quick brown fox jumps over the lazy dog. " * 6)

Answer = tuple[str, int, int]
"""Text, decode steps, decode tokens: what must not depend on where it was computed."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with network.hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def address(hosts: list[Host]) -> Iterator[str]:
    """A cluster submitted as a job: gateway, context worker and generation worker on a host each."""
    head = RayHead("a-token-of-this-test", hosts[0], num_cpus=0)
    try:
        for host, role in zip(hosts[1:], ("context", "generation"), strict=True):
            # All share one kernel, where UCX would find shared memory. Hosts of a cluster have none.
            tcp = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
            head.add_node(host, "--num-cpus=1", f"--labels=slipstream/role={role}", **tcp)
        submitted = head.run("slipstream", "submit", "--address", head.dashboard, "--config", CONFIG)
        serving = re.search(r"serving on (\S+) as job (\S+)", submitted.stdout)
        assert serving is not None, submitted.stdout + submitted.stderr
        yield serving[1]
    finally:
        head.stop()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What one worker that does both answers on this machine."""
    home = Path("/tmp") / f"slip-{os.getpid()}-{time.monotonic_ns() % 100_000}"
    home.mkdir()
    log = home / "serve.log"
    [port] = free_ports(1)
    with log.open("w") as output:
        serve = subprocess.Popen(
            [
                *(sys.executable, "-m", "cluster", "serve", "--config", CONFIG, "--mode", "aggregated"),
                *("--listen", f"127.0.0.1:{port}"),
            ],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "HOME": str(home), "TMPDIR": str(home), "RAY_AUTH_MODE": "disabled"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until_s = time.monotonic() + 90
        while "ready on" not in log.read_text():
            assert serve.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.1)
        return [answer(f"127.0.0.1:{port}", prompt) for prompt in PROMPTS]
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.wait(timeout=60)
        shutil.rmtree(home, ignore_errors=True)


def answer(address: str, prompt: str) -> Answer:
    with Client(address) as client:
        text = ""
        for event in client.generate(
            [("user", prompt)], max_tokens=32, ignore_eos=True, draft_tokens=4, timeout_s=60
        ):
            text += event.text
    assert isinstance(event, AnswerEnd)
    stats = event.usage.stats
    assert stats is not None
    return text, stats.decode_steps, stats.decode_tokens


def workers(address: str) -> dict[str, admin_pb2.Worker]:
    with Client(address) as client:
        return {worker.name: worker for worker in client.cluster_state().workers}


def sent_bytes(host: Host) -> int:
    done = subprocess.run(host.command("cat", "/proc/net/dev"), check=True, capture_output=True, text=True)
    [line] = [line for line in done.stdout.splitlines() if "eth0" in line]
    return int(line.split(":")[1].split()[8])


def test_answers_and_acceptance_equal_those_of_one_machine_and_kv_crosses_the_network(
    hosts: list[Host], address: str, expected: list[Answer]
) -> None:
    placed = {name: worker.address.split(":")[0] for name, worker in workers(address).items()}
    assert placed == {"context-0": hosts[1].ip, "generation-0": hosts[2].ip}
    before = sent_bytes(hosts[1])
    assert [answer(address, prompt) for prompt in PROMPTS] == expected
    shipped = sent_bytes(hosts[1]) - before
    until_s = time.monotonic() + 10
    while not (counted := workers(address)["context-0"]).kv_bytes_draft and time.monotonic() < until_s:
        time.sleep(0.2)
    assert counted.kv_bytes_draft > 0
    assert shipped > counted.kv_bytes_target + counted.kv_bytes_draft


def test_a_link_that_is_cut_and_healed_costs_requests_at_most_and_never_their_tokens(
    hosts: list[Host], address: str, expected: list[Answer]
) -> None:
    outcomes: list[Answer | str] = []
    stop = threading.Event()

    def ask() -> None:
        for number in itertools.cycle(range(len(PROMPTS))):
            if stop.is_set():
                return
            try:
                outcomes.append((*answer(address, PROMPTS[number]), number))
            except RequestError as error:
                outcomes.append(error.code)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(1.0)
    network.cut(hosts[2])
    time.sleep(5.0)
    network.join(hosts[2])
    time.sleep(1.0)
    stop.set()
    asking.join(timeout=120)
    assert not asking.is_alive()
    for outcome in outcomes:
        if isinstance(outcome, str):
            assert outcome in ("UNAVAILABLE", "DEADLINE_EXCEEDED")
        else:
            assert outcome[0] == expected[outcome[-1]][0]

    until_s = time.monotonic() + 60
    while True:
        try:
            healed = [answer(address, prompt) for prompt in PROMPTS]
            break
        except RequestError:
            assert time.monotonic() < until_s
            time.sleep(0.5)
    assert healed == expected
    until_s = time.monotonic() + 60  # what a cut transfer held is free when its lease is over
    while (
        left := [w.slots_in_use + w.draft_slots_in_use + w.transfers for w in workers(address).values()]
    ) != [0, 0]:
        assert time.monotonic() < until_s, left
        time.sleep(0.5)
