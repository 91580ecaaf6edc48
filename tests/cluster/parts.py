"""`slipstream workers` and `slipstream gateway` as processes of a test."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.client import Client
from cluster.rpc.v1 import admin_pb2

START_TIMEOUT_S = 90.0
CLONE = Path(__file__).parents[2]


class Part:
    """One process with its output. It is killed at the end, unless it has ended."""

    def __init__(
        self, log: Path, *arguments: str, env: Mapping[str, str], command: Sequence[str] = ()
    ) -> None:
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                list(command) or [sys.executable, "-m", "cluster", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=CLONE,
                start_new_session=True,
            )

    def wait_for(
        self, pattern: str, timeout_s: float = START_TIMEOUT_S, *, beside: Sequence[Part] = ()
    ) -> re.Match[str]:
        """Of its output. Fails, with what all of them said, when it takes too long or one of them ends before."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            match = re.search(pattern, self.log.read_text())
            if match is not None:
                return match
            if any(part.process.poll() is not None for part in (self, *beside)):
                break
            time.sleep(0.02)
        raise AssertionError("\n".join(part.log.read_text() for part in (self, *beside)))

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """As an operator ends it; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


def environment(home: Path, **changes: str) -> dict[str, str]:
    """A home and a place for files of its own: no other Ray's token is found, no other worker's note."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {
        **kept,
        "HOME": str(home),
        "TMPDIR": str(home),
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
        "OMP_WAIT_POLICY": "PASSIVE",
        "COLUMNS": "120",
        **changes,
    }


def workers_at(gateway: str) -> dict[str, admin_pb2.Worker]:
    """What a gateway knows of its workers, by name."""
    with Client(gateway) as client:
        return {worker.name: worker for worker in client.cluster_state().workers}


def held_at(gateway: str) -> list[str]:
    """What any worker still holds."""
    found = []
    for name, worker in workers_at(gateway).items():
        for figure in ("running", "waiting", "slots_in_use", "target_pages_in_use", "draft_pages_in_use"):
            if getattr(worker, figure):
                found.append(f"{name} has {figure} {getattr(worker, figure)}")
    return found


def worker_pid(home: Path, name: str) -> int:
    """The process of a worker, which says where it is in a note of its own."""
    for note in home.rglob("slipstream-workers-*/*.json"):
        if json.loads(note.read_text())["name"] == name and Path(f"/proc/{note.stem}").exists():
            return int(note.stem)
    raise AssertionError(f"no note of {name}")
