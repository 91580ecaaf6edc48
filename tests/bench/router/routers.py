"""Every system of the bench: its mock workers, its own process, how a client speaks to it.

A peer's address on PyPI and the command that starts it are all that is known of it here. All of them serve one worker,
or one pair of workers where they split prefill and decode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.bench.router.load import (
    AnyClient,
    HttpClient,
    Loop,
    OwnWorker,
    our_grpc_client,
    vllm_grpc_client,
)

MockKind = Literal["http", "worker", "vllm"]
ClientKind = Literal["http", "grpc", "vllm", "worker"]

PEERS = ("smg", "vllm-router", "sglang-router")
"""Names on PyPI."""


@dataclass(frozen=True)
class Ports:
    """Where things of one row listen. `second` is the prefill or context worker of a pair."""

    first: int
    second: int
    router: int
    router_grpc: int
    metrics: int


@dataclass(frozen=True)
class Row:
    """One line of the table. `peer` names the environment that `command` needs; no command is the mock itself."""

    name: str
    mock: MockKind
    client: ClientKind
    peer: str = ""
    pair: bool = False
    command: Callable[[Ports, str, Path], Sequence[str]] | None = None
    """(ports, the peer's bin directory, a directory with the model's tokenizer)."""

    @property
    def baseline(self) -> str:
        """The row whose latency is no router's."""
        return "direct http" if self.client == "http" else "direct grpc"

    @property
    def ours(self) -> bool:
        return self.name.startswith("slipstream")


def _smg(arguments: Callable[[Ports, Path], list[str]]) -> Callable[[Ports, str, Path], list[str]]:
    def command(ports: Ports, bin_directory: str, model: Path) -> list[str]:
        return [
            f"{bin_directory}/smg",
            "launch",
            *("--host", "127.0.0.1", "--port", str(ports.router)),
            *("--policy", "round_robin", "--log-level", "error"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports.metrics)),
            *("--max-concurrent-requests", "-1", "--disable-retries", "--disable-circuit-breaker"),
            *arguments(ports, model),
        ]

    return command


def _vllm_router(arguments: Callable[[Ports], list[str]]) -> Callable[[Ports, str, Path], list[str]]:
    def command(ports: Ports, bin_directory: str, model: Path) -> list[str]:
        return [
            f"{bin_directory}/vllm-router",
            *("--host", "127.0.0.1", "--port", str(ports.router), "--log-level", "error"),
            *("--policy", "round_robin", "--prometheus-port", str(ports.metrics)),
            *arguments(ports),
        ]

    return command


def _sglang_router(ports: Ports, bin_directory: str, model: Path) -> list[str]:
    return [
        f"{bin_directory}/python",
        *("-m", "sglang_router.launch_router"),
        *("--host", "127.0.0.1", "--port", str(ports.router), "--log-level", "error"),
        *("--policy", "round_robin", "--prometheus-port", str(ports.metrics)),
        *("--worker-urls", f"http://127.0.0.1:{ports.first}"),
    ]


def _ours(pair: bool) -> Callable[[Ports, str, Path], list[str]]:
    def command(ports: Ports, bin_directory: str, model: Path) -> list[str]:
        workers = [f"aggregated=127.0.0.1:{ports.first}"]
        if pair:
            workers = [f"generation=127.0.0.1:{ports.first}", f"context=127.0.0.1:{ports.second}"]
        return [
            sys.executable,
            *("-m", "tests.bench.router.our_gateway", str(ports.router_grpc), str(ports.router)),
            *workers,
        ]

    return command


def _http(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _grpc(port: int) -> str:
    return f"grpc://127.0.0.1:{port}"


ROWS: tuple[Row, ...] = (
    Row("direct http", "http", "http"),
    Row("direct grpc", "vllm", "vllm"),
    Row("direct worker", "worker", "worker"),
    Row("slipstream http", "worker", "http", command=_ours(False)),
    Row("slipstream grpc", "worker", "grpc", command=_ours(False)),
    Row("slipstream http split", "worker", "http", pair=True, command=_ours(True)),
    Row("slipstream grpc split", "worker", "grpc", pair=True, command=_ours(True)),
    Row(
        "smg http",
        "http",
        "http",
        "smg",
        command=_smg(lambda ports, model: ["--backend", "vllm", "--worker-urls", _http(ports.first)]),
    ),
    Row(
        "smg grpc",
        "vllm",
        "http",
        "smg",
        command=_smg(
            lambda ports, model: [
                *("--backend", "vllm", "--worker-urls", _grpc(ports.first)),
                *("--model-path", str(model), "--tokenizer-path", str(model)),
            ]
        ),
    ),
    Row(
        "smg grpc split",
        "vllm",
        "http",
        "smg",
        pair=True,
        command=_smg(
            lambda ports, model: [
                "--pd-disaggregation",
                *("--prefill", _grpc(ports.second), "--decode", _grpc(ports.first)),
                *("--model-path", str(model), "--tokenizer-path", str(model)),
            ]
        ),
    ),
    Row(
        "vllm-router",
        "http",
        "http",
        "vllm-router",
        command=_vllm_router(lambda ports: ["--worker-urls", _http(ports.first)]),
    ),
    Row(
        "vllm-router split",
        "http",
        "http",
        "vllm-router",
        pair=True,
        command=_vllm_router(
            lambda ports: [
                "--vllm-pd-disaggregation",
                *("--prefill", _http(ports.second), "--decode", _http(ports.first)),
            ]
        ),
    ),
    Row("sglang-router", "http", "http", "sglang-router", command=_sglang_router),
)


def make_clients(row: Row, ports: Ports) -> Callable[[Loop, int], list[AnyClient]]:
    """How the load generator speaks to this row."""
    direct = row.command is None

    def make(loop: Loop, count: int) -> list[AnyClient]:
        match row.client:
            case "http":
                port = ports.first if direct else ports.router
                return [HttpClient(loop, port) for _ in range(count)]
            case "vllm":
                return [vllm_grpc_client(loop, ports.first) for _ in range(count)]
            case "grpc":
                return [our_grpc_client(loop, ports.router_grpc) for _ in range(count)]
            case "worker":
                worker = OwnWorker(loop, ports.first)
                return [worker.client() for _ in range(count)]

    return make
