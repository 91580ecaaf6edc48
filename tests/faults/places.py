"""Where workers of a fault run live: a place keeps name and link, processes in it come and go as a supervisor says.

And what is known of a run from outside its workers: who was down when, and how much memory everyone took.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.actors import Health
from cluster.fleet import StartFailed, WorkerGone, WorkerSilent
from cluster.link import WorkerAddress
from cluster.readiness import stood_still_s
from cluster.worker_client import WorkerClient, WorkerUnreachable
from tests.cluster.ray_head import Host
from tests.faults import network
from tests.faults.memory import Line, fit
from workers.errors import WorkerRefused
from workers.request import Role

HEALTH_TIMEOUT_S = 2.0


class Place:
    """A worker's place. Each process in it listens at a port of its own."""

    def __init__(self, name: str, role: Role, pair: str, host: Host) -> None:
        self.name, self.role, self.host = name, role, host
        self._pair = pair
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the process that lives here, None when there is none."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> WorkerAddress:
        """Returns when it serves. Raises StartFailed."""
        command = (sys.executable, "-m", "tests.faults.worker", self.role, self.host.ip, self._pair)
        # All namespaces share one kernel, where UCX would find shared memory. Hosts of a cluster have none.
        apart = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"} if self.host.namespace else {}
        process = self._process = await asyncio.create_subprocess_exec(
            *self.host.command(*command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, **apart},
        )
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        if not address:
            raise StartFailed(f"the process of worker {self.name} died while starting")
        return WorkerAddress(self.name, self.role, address)

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    def mend(self) -> None:
        """Whatever was done to it is undone, but for its death."""
        if self.host.namespace:
            network.join(self.host)
        self.send(signal.SIGCONT)


class Places:
    """What a supervisor needs of a fleet, for processes without a Ray."""

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = {place.name: place for place in places}
        self._clients: dict[str, WorkerClient] = {}

    async def start(self, name: str, role: Role) -> WorkerAddress:
        worker = await self._places[name].start()
        self._clients[name] = WorkerClient(worker.address, gateway="")
        return worker

    async def health(self, name: str) -> Health:
        if self._places[name].pid is None:
            raise WorkerGone(f"the process of worker {name} has died")
        try:
            stats = await self._clients[name].stats(HEALTH_TIMEOUT_S)
        except WorkerUnreachable as error:
            raise WorkerSilent(str(error)) from error
        except WorkerRefused as refused:
            return Health(0, 0.0, refused.message)
        return Health(stats.running + stats.waiting, stood_still_s(stats))

    async def drain(self, name: str) -> None:
        await self._clients[name].drain(True, HEALTH_TIMEOUT_S)

    async def end(self, name: str) -> None:
        await self._places[name].kill()
        client = self._clients.pop(name, None)
        if client is not None:
            await client.close()


@dataclass
class Outages:
    """When each worker was kept from serving. Times on any one clock; an outage that goes on has no end."""

    roles: dict[str, Role]
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def begin(self, name: str, now_s: float) -> None:
        self.spans.setdefault(name, []).append((now_s, float("inf")))

    def end(self, name: str, now_s: float) -> None:
        began_s, _ = self.spans[name][-1]
        self.spans[name][-1] = (began_s, now_s)

    def down(self, name: str) -> bool:
        return bool(self.spans.get(name)) and self.spans[name][-1][1] == float("inf")

    def nobody_left(self, began_s: float, ended_s: float) -> bool:
        """Whether at some moment of this time all workers of one role were down."""
        for role in set(self.roles.values()):
            names = [name for name, its in self.roles.items() if its == role]
            # All are down at some moment if they are when one of them, or the time, begins.
            moments = [began_s, *(start for name in names for start, _ in self.spans.get(name, []))]
            for moment in moments:
                if began_s <= moment <= ended_s and all(self._down_at(name, moment) for name in names):
                    return True
        return False

    def _down_at(self, name: str, moment_s: float) -> bool:
        return any(start <= moment_s <= end for start, end in self.spans.get(name, []))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 when it is gone."""
    try:
        with open(f"/proc/{pid}/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@dataclass
class Memory:
    """Resident memory of processes by process id: (second, requests ended by then, bytes)."""

    names: dict[int, str] = field(default_factory=dict)
    samples: dict[int, list[tuple[float, int, int]]] = field(default_factory=dict)

    def note(self, name: str, pid: int | None, now_s: float, requests: int) -> None:
        if pid is not None and (size := resident_bytes(pid)):
            self.names[pid] = name
            self.samples.setdefault(pid, []).append((now_s, requests, size))

    def lines(self, settle_s: float, least: int) -> dict[str, Line]:
        """How memory went with requests, for each process that saw so many of them after its first `settle_s`."""
        found = {}
        for pid, samples in self.samples.items():
            settled = [(done, size) for at_s, done, size in samples if at_s >= samples[0][0] + settle_s]
            if len(settled) > 2 and settled[-1][0] - settled[0][0] >= least:
                found[self.names[pid] + (f" ({pid})" if pid != os.getpid() else "")] = fit(settled)
        return found
