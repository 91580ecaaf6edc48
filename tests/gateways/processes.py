"""`slipstream serve` and smg as processes of a test's own: own home, own ports, own files, ended by their ids."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster.ray_head import free_ports
from tests.cluster.test_real_processes import environment

ROOT = Path(__file__).parents[2]
PEERS = Path(os.environ.get("SLIPSTREAM_PEERS", ROOT / ".venv-peers"))
START_TIMEOUT_S = 180.0


class Process:
    """A process group with one log. A context manager: it ends everything that it started."""

    def __init__(self, name: str, command: list[str], interrupt: signal.Signals = signal.SIGINT) -> None:
        # A short path: Ray puts sockets below it, whose paths are limited to 107 bytes.
        self.home = Path("/tmp") / f"slip-{os.getpid()}-{time.monotonic_ns() % 100_000}"
        self.home.mkdir()
        self.log = self.home / f"{name}.log"
        self._interrupt = interrupt
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(self.home),
                cwd=ROOT,
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, self._interrupt)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        print(f"--- {self.log.name}\n{self.log.read_text()[-4000:]}")  # shown when a test fails
        shutil.rmtree(self.home, ignore_errors=True)


class Served(Process):
    """`slipstream serve` of a configuration file. `doors` names the doors in vLLM's protocol to open."""

    def __init__(self, toml: str, doors: tuple[str, ...] = ()) -> None:
        path = Path("/tmp") / f"slip-{os.getpid()}-{time.monotonic_ns() % 100_000}.toml"
        path.write_text(toml)
        options = [part for door in doors for part in (f"--vllm-{door}", "127.0.0.1:0")]
        command = [sys.executable, "-m", "cluster", "serve", "--config", str(path)]
        super().__init__("serve", [*command, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *options])
        try:
            self.address = self.wait_for(r"ready on (\S+)").group(1)
            self.http = self.wait_for(r"OpenAI: (\S+)/v1").group(1)
            self.engines = {
                door: self.wait_for(rf"vLLM engine protocol, {door}: (\S+)").group(1) for door in doors
            }
        except BaseException:
            self.__exit__(None, None, None)
            raise
        finally:
            path.unlink()


class Smg(Process):
    """`smg launch` in prefill/decode mode. It takes model and tokenizer from the workers."""

    def __init__(self, prefill: str, decode: str) -> None:
        port, metrics = free_ports(2)
        self.http = f"http://127.0.0.1:{port}"
        self.metrics_url = f"http://127.0.0.1:{metrics}/metrics"
        super().__init__(
            "smg",
            [
                *(str(PEERS / "bin" / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)),
                *("--pd-disaggregation", "--prefill", prefill, "--decode", decode),
                *("--policy", "round_robin", "--disable-retries"),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
            ],
            signal.SIGTERM,
        )
        try:
            self.wait_for(r"Successfully loaded tokenizer")
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def metrics(self) -> dict[str, float]:
        """Its counters by name and labels."""
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
            if name
        }
