"""`slipstream serve` with Ray and worker processes of their own: it serves, and it leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.client import Client
from cluster.errors import RequestError
from tests.cluster.parts import workers_at

pytestmark = pytest.mark.ray

FAKE = "tests.cluster.fake_worker:FakeHost"
REFUSING = "tests.cluster.fake_worker:RefusingHost"
START_TIMEOUT_S = 90.0


def environment(home: Path) -> dict[str, str]:
    """A home and a place for files of its own: no other Ray's token is found, and what is left over is seen."""
    return {
        **os.environ,
        "HOME": str(home),
        "TMPDIR": str(home),
        "RAY_AUTH_MODE": "disabled",
        "COLUMNS": "120",
    }


def processes_of(home: Path, session: int) -> list[str]:
    """Living processes of a session, or with this home in environment or arguments (some leave the session)."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            traces = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            state, _, _, its_session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state != "Z" and (int(its_session) == session or str(home).encode() in traces):
            found.append(f"{process.name} {(process / 'cmdline').read_bytes()[:80]!r}")
    return found


class Served:
    """A running `slipstream serve` of one aggregated fake worker."""

    def __init__(self, home: Path, host_factory: str) -> None:
        self.home = home
        self.log = home / "serve.log"
        command = [
            sys.executable,
            "-m",
            "cluster",
            "serve",
            "--mode",
            "aggregated",
            "--listen",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--host-factory", host_factory],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(home),
                cwd=Path(__file__).parents[2],
                start_new_session=True,
            )

    def wait_for(self, pattern: str) -> re.Match[str]:
        until_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until_s:
            match = re.search(pattern, self.log.read_text())
            if match is not None:
                return match
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def assert_gone(self, but: str = "nothing") -> None:
        """Every process ends soon; those whose command line contains `but` may take their time."""
        until_s = time.monotonic() + 15
        while (left := self.living(but)) and time.monotonic() < until_s:
            time.sleep(0.1)
        assert left == []

    def living(self, but: str = "nothing") -> list[str]:
        return [found for found in processes_of(self.home, self.process.pid) if but not in found]


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    # Ray puts sockets below this path, and their paths are limited to 107 bytes.
    home = Path("/tmp") / f"slip-{os.getpid()}-{time.monotonic_ns() % 100_000}"
    home.mkdir()
    served = Served(home, getattr(request, "param", FAKE))
    yield served
    if served.process.poll() is None:
        served.process.kill()
        served.process.wait()
    subprocess.run(["rm", "-rf", str(home)], check=True)


def test_it_answers_and_ends_cleanly_on_ctrl_c_with_a_request_in_flight(served: Served) -> None:
    address = served.wait_for(r"ready on (\S+)").group(1)
    door = served.wait_for(r"OpenAI: (\S+)/v1").group(1)
    for path in ("/ready", "/v1/models", "/metrics"):
        with urllib.request.urlopen(door + path, timeout=10) as answer:
            assert answer.status == 200
    with Client(address) as client:
        # The fake worker's tokens are bytes; the gateway's tokenizer is the built-in pair's.
        events = client.generate([104, 105], max_tokens=50)
        first = next(events)
        assert first.text
        assert (
            len(processes_of(served.home, served.process.pid)) > 5
        )  # what must be gone afterwards is seen now
        os.killpg(served.process.pid, signal.SIGINT)  # a terminal sends Ctrl-C to the whole group
        try:
            for _ in events:
                pass
        except RequestError as error:
            assert error.code == "UNAVAILABLE"  # noqa: PT017 (either way of ending is right)
    assert served.process.wait(timeout=30) == 0
    served.assert_gone()
    assert [path.name for path in served.home.iterdir() if path.name.startswith("slipstream-")] == []
    assert not (served.home / ".ray" / "auth_token").exists()


@pytest.mark.parametrize("served", [REFUSING], indirect=True)
def test_a_worker_that_may_not_start_is_named_with_its_reason(served: Served) -> None:
    assert served.process.wait(timeout=START_TIMEOUT_S) == 1
    log = served.log.read_text()
    assert "worker aggregated-0 refused to start: tensor lm_head.weight is missing" in log
    assert "FAILED_PRECONDITION, field pair" in log
    assert "Traceback" not in log
    served.assert_gone()


def test_sigterm_while_starting_leaves_no_process(served: Served) -> None:
    served.wait_for(r"ray +ready")
    served.process.send_signal(signal.SIGTERM)
    served.process.wait(timeout=60)
    served.assert_gone()


def test_a_killed_worker_is_replaced_and_sigkill_leaves_no_worker_and_no_ray(served: Served) -> None:
    address = served.wait_for(r"ready on (\S+)").group(1)
    before = workers_at(address)["aggregated-0"]
    [note] = served.home.rglob("slipstream-workers-*/*.json")
    os.kill(int(note.stem), signal.SIGKILL)
    until_s = time.monotonic() + START_TIMEOUT_S
    while (now := workers_at(address).get("aggregated-0")) is None or now.epoch in ("", before.epoch):
        assert time.monotonic() < until_s, served.log.read_text()
        time.sleep(0.05)
    with Client(address) as client:
        assert list(client.generate([104, 105], max_tokens=4))
    served.process.kill()
    served.process.wait(timeout=10)
    served.assert_gone(but="Agent")  # Ray's agents look for their raylet every few seconds only
