"""A Ray head of a test's own: own home, own ports, own files, and ended without touching any other Ray."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 90.0
START_ATTEMPTS = 3
TOO_SLOW = "The current node timed out during startup"  # Ray gives a busy machine 30 s, and asks nobody


def free_ports(count: int) -> list[int]:
    """Ports that nobody listened on a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@dataclass(frozen=True)
class Host:
    """Where processes run: this machine, or a network namespace of it, which is another machine to all of them."""

    ip: str = "127.0.0.1"
    namespace: str = ""

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command] if self.namespace else list(command)


class RayHead:
    """`ray start --head`, with authentication on when there is a token."""

    def __init__(self, token: str = "", host: Host = Host(), num_cpus: int = 2, labels: str = "") -> None:
        self.token = token
        self.host = host
        # A short path: Ray puts sockets below it, whose paths are limited to 107 bytes.
        self.home = Path("/tmp") / f"slip-{os.getpid()}-{time.monotonic_ns() % 100_000}"
        self.home.mkdir()
        gcs, dashboard, agent, agent_grpc, metrics, client = free_ports(6)
        self.address = f"{host.ip}:{gcs}"
        self.dashboard = f"http://{host.ip}:{dashboard}"
        binaries = Path(sys.executable).parent
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "HOME": str(self.home),
            "TMPDIR": str(self.home),
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token" if token else "disabled",
            "RAY_worker_niceness": "0",
            "COLUMNS": "120",
        }
        if token:
            self.env["RAY_AUTH_TOKEN"] = token
        self.log = self.home / "head.log"
        command = [
            *host.command(str(binaries / "ray"), "start", "--head", "--block"),
            *(f"--node-ip-address={host.ip}", f"--dashboard-host={host.ip}", "--disable-usage-stats"),
            *(f"--port={gcs}", f"--dashboard-port={dashboard}"),
            *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"),
            *(f"--metrics-export-port={metrics}", f"--ray-client-server-port={client}"),
            *((f"--labels={labels}",) if labels else ()),
            *(f"--num-cpus={num_cpus}", "--object-store-memory=80000000", f"--temp-dir={self.home / 'ray'}"),
        ]
        for _ in range(START_ATTEMPTS):
            self._launch(command)
            if self._started():
                return
            output = self.log.read_text()
            self._end_processes()
            if TOO_SLOW not in output:
                break
        self.stop()
        raise AssertionError(f"no Ray head: {output}")

    def _launch(self, command: list[str]) -> None:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=self.env, start_new_session=True
            )

    def _started(self) -> bool:
        until_s = time.monotonic() + START_TIMEOUT_S
        while "Ray runtime started" not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > until_s:
                return False
            time.sleep(0.1)
        return True

    def run(
        self,
        *command: str,
        host: Host | None = None,
        system: bool = False,
        timeout_s: float = 90.0,
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        """A command of this Python's `bin` (or the system's), run in the clone on the head's host as its user."""
        program = command[0] if system else Path(sys.executable).parent / command[0]
        return subprocess.run(
            (host or self.host).command(str(program), *command[1:]),
            env={**self.env, **env},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def add_node(self, host: Host, *arguments: str, **env: str) -> None:
        """A further node of this Ray, under an address of its own. Ends with the head."""
        [agent] = free_ports(1)
        for _ in range(START_ATTEMPTS):
            done = self.run(
                *("ray", "start", f"--address={self.address}", f"--node-ip-address={host.ip}"),
                *("--object-store-memory=80000000", "--disable-usage-stats"),
                *(f"--dashboard-agent-listen-port={agent}", *arguments),
                host=host,
                **env,
            )
            if TOO_SLOW not in done.stderr:
                break
        assert done.returncode == 0, done.stdout + done.stderr

    def ask(self, path: str, method: str = "GET") -> dict[str, Any]:
        """Ray's REST interface: cheaper than a process of its command line."""
        request = urllib.request.Request(self.dashboard + path, method=method)
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def driver(self) -> int:
        """The process id of the one driver."""
        [driver] = [line for line in self.processes() if "python\\x00-m\\x00cluster" in line]
        return int(driver.split()[0])

    def actors(self) -> list[str]:
        """Command lines of living worker actors of this Ray."""
        return [line for line in self.processes() if "WorkerActor" in line]

    def processes(self) -> list[str]:
        """Living processes with this head's home in their environment or command line."""
        found = []
        for process in Path("/proc").iterdir():
            if not process.name.isdigit():
                continue
            try:
                command = (process / "cmdline").read_bytes()
                traces = (process / "environ").read_bytes() + command
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z" and str(self.home).encode() in traces:
                found.append(f"{process.name} {command[:120]!r}")
        return found

    def stop(self) -> None:
        """At once: nothing of a test's Ray is worth a farewell. `ray stop` would end every Ray of this machine."""
        self._end_processes()
        shutil.rmtree(self.home, ignore_errors=True)

    def _end_processes(self) -> None:
        self.process.kill()
        self.process.wait()
        until_s = time.monotonic() + 15
        while (left := self.processes()) and time.monotonic() < until_s:
            for line in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line.split()[0]), signal.SIGKILL)
            time.sleep(0.05)
