"""A cluster of processes without Ray: one per worker, one for a gateway with both doors. Their memory can be watched.

    python -m tests.faults.local_cluster worker ROLE SETTINGS      SETTINGS: a ClusterConfig as JSON
    python -m tests.faults.local_cluster gateway WORKERS SETTINGS  WORKERS: a list of WorkerAddress as JSON

A process says in one line of JSON where it listens, and ends with its parent: its standard input closes then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec

from cluster.client import AsyncClient
from cluster.config import ClusterConfig, limit_threads
from cluster.link import WorkerAddress
from cluster.rpc.v1 import admin_pb2

START_TIMEOUT_S = 120.0
MOST_ROWS = 256  # a prompt's chunk; 16 requests of 8 tokens are fewer
HELD = (
    "running",
    "waiting",
    "slots_in_use",
    "draft_slots_in_use",
    "target_pages_in_use",
    "draft_pages_in_use",
)


@dataclass
class Process:
    """`log` is what it wrote to standard error."""

    name: str
    handle: asyncio.subprocess.Process
    log: Path
    told: dict[str, str] = field(default_factory=dict)

    @property
    def rss_bytes(self) -> int:
        """Resident memory now. Raises ProcessLookupError when it is gone."""
        try:
            status = Path(f"/proc/{self.handle.pid}/status").read_text()
        except OSError as error:
            raise ProcessLookupError(f"{self.name} is gone: {self.complaints()[-3:]}") from error
        for line in status.splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise ProcessLookupError(f"{self.name} has ended: {self.complaints()[-3:]}")

    def complaints(self) -> list[str]:
        """Lines of its log that tell of a bug: tracebacks and errors."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if "Traceback" in line or " ERROR " in line or "Error:" in line]


@dataclass
class RunningCluster:
    """`doors` by name of the gateway: grpc and http address."""

    workers: list[Process]
    gateways: list[Process]

    @property
    def processes(self) -> list[Process]:
        return [*self.workers, *self.gateways]

    def memory(self) -> dict[str, int]:
        """Resident bytes by process. Raises ProcessLookupError when one is gone."""
        return {process.name: process.rss_bytes for process in self.processes}

    def complaints(self) -> list[str]:
        return [f"{process.name}: {line}" for process in self.processes for line in process.complaints()]


@contextlib.asynccontextmanager
async def local_cluster(
    directory: Path, config: ClusterConfig, *more_gateways: ClusterConfig
) -> AsyncIterator[RunningCluster]:
    """Workers as `config` says, a gateway for it and one for each other configuration."""
    processes: list[Process] = []
    try:
        roles = config.worker_roles()
        names = [f"{role}-{roles[:number].count(role)}" for number, role in enumerate(roles)]
        workers = [
            await _spawn(directory, name, processes, "worker", role, _json(config))
            for name, role in zip(names, roles, strict=True)
        ]
        await asyncio.gather(*(_wait(worker) for worker in workers))
        addresses = json.dumps(
            [
                asdict(WorkerAddress(name, role, worker.told["address"]))
                for name, role, worker in zip(names, roles, workers, strict=True)
            ]
        )
        gateways = []
        for number, each in enumerate((config, *more_gateways)):
            gateways.append(
                await _spawn(directory, f"gateway-{number}", processes, "gateway", addresses, _json(each))
            )
        await asyncio.gather(*(_wait(gateway) for gateway in gateways))
        yield RunningCluster(workers, gateways)
    finally:
        for process in processes:
            if process.handle.returncode is None:
                process.handle.kill()
            await process.handle.wait()


async def held(client: AsyncClient) -> list[str]:
    """What workers hold; empty at the baseline."""
    state: admin_pb2.GetClusterStateResponse = await client.cluster_state()
    found = [f"{state.live_requests} requests are live"] if state.live_requests else []
    for worker in state.workers:
        if worker.state != admin_pb2.WORKER_STATE_READY:
            found.append(f"{worker.name} is not ready")
        for figure in (*HELD, "leases", "transfers"):
            if value := getattr(worker, figure):
                found.append(f"{worker.name} has {figure} {value}")
    return found


async def settled(client: AsyncClient, timeout_s: float) -> list[str]:
    """Wait until nothing is held, at most so long; what still is."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    while (found := await held(client)) and loop.time() < until_s:
        await asyncio.sleep(0.2)
    return found


async def _spawn(directory: Path, name: str, processes: list[Process], *arguments: str) -> Process:
    log = directory / f"{name}.log"
    with log.open("w") as stream:
        handle = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.faults.local_cluster",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stream,
        )
    process = Process(name, handle, log)
    processes.append(process)
    return process


async def _wait(process: Process) -> None:
    assert process.handle.stdout is not None
    async with asyncio.timeout(START_TIMEOUT_S):
        line = await process.handle.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.name} did not start:\n{process.log.read_text(errors='replace')}")
    process.told = json.loads(line)


def _json(config: ClusterConfig) -> str:
    return msgspec.json.encode(config).decode()


# the processes


async def _worker(role: str, config: ClusterConfig) -> None:
    from cluster.worker_server import WorkerServer
    from tests.faults.warm import compile_products
    from workers.host import EngineHost

    host = await asyncio.to_thread(EngineHost.load, config.worker_config(role))  # type: ignore[arg-type]
    compile_products(MOST_ROWS)
    server = WorkerServer(host)
    await _until_stdin_closes({"address": await server.start("127.0.0.1")})
    await server.stop()


async def _gateway(workers: list[WorkerAddress], config: ClusterConfig) -> None:
    from cluster.doors import Doors
    from cluster.serve import load_tokenizer, make_gateway

    gateway = make_gateway(config, workers, load_tokenizer(config.pair))
    doors = Doors(config, gateway)
    await gateway.start(config.startup_timeout_s)
    addresses = await doors.start()
    await doors.serving(True)
    await _until_stdin_closes({"grpc": addresses.grpc, "http": addresses.http})
    await gateway.stop()
    await doors.stop(0.5)


async def _until_stdin_closes(told: dict[str, str], stdin: IO[str] = sys.stdin) -> None:
    print(json.dumps(told), flush=True)
    await asyncio.to_thread(stdin.read)


def main(kind: str, what: str, settings: str) -> None:
    from cluster.logs import configure

    config = msgspec.json.decode(settings, type=ClusterConfig)
    configure(config.log_format, config.log_level)
    limit_threads(1)
    work: Any = (
        _worker(what, config)
        if kind == "worker"
        else _gateway(msgspec.json.decode(what, type=list[WorkerAddress]), config)
    )
    asyncio.run(work)


if __name__ == "__main__":
    main(*sys.argv[1:])
