"""Which workers run on this machine: a note for each of their processes, so that the machine's own end can drain them.

A worker writes its address into a file of the temporary directory once it serves, and removes it when it stops; what a
killed worker leaves behind names an address that nobody answers at. `drain` talks to the workers themselves, so it
needs no gateway, no token and no name: it is what a pod runs before it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cluster.worker_client import WorkerClient, WorkerUnreachable
from workers.errors import WorkerRefused
from workers.request import WorkerStats

_CALL_TIMEOUT_S = 5.0
_POLL_INTERVAL_S = 0.2
# Every gateway has heard of the drain by then (their heartbeats are a second apart): nothing is on its way any more.
_HEARD_S = 3.0


class _Noted(msgspec.Struct, frozen=True):
    name: str
    address: str


@dataclass(frozen=True)
class Note:
    """One worker of this machine, or one of a worker's further ranks: the address is the worker's."""

    name: str
    address: str
    path: Path

    @classmethod
    def write(cls, name: str, address: str) -> Note:
        folder = _folder()
        path = folder / f"{os.getpid()}.json"
        while True:
            folder.mkdir(mode=0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another worker has just removed the empty folder
                path.write_bytes(msgspec.json.encode(_Noted(name, address)))
                return cls(name, address, path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others are in it
            self.path.parent.rmdir()


@dataclass(frozen=True)
class Drained:
    """What a worker still has after the wait; 0 for one that is empty, or gone."""

    name: str
    address: str
    left: int


def notes() -> list[Note]:
    """Of all processes of workers of this user that did not say goodbye."""
    found = []
    for path in sorted(_folder().glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            noted = msgspec.json.decode(path.read_bytes(), type=_Noted)
            found.append(Note(noted.name, noted.address, path))
    return found


async def drain(
    wait_s: float,
    *,
    heard_s: float = _HEARD_S,
    report: Callable[[str], None] = lambda text: None,
) -> list[Drained]:
    """Drain every worker of this machine and wait until each is empty, at most `wait_s`."""
    workers = {note.address: note for note in reversed(notes())}
    return list(
        await asyncio.gather(
            *(_drain(note, time.monotonic(), wait_s, heard_s, report) for note in workers.values())
        )
    )


async def _drain(
    note: Note, began_s: float, wait_s: float, heard_s: float, report: Callable[[str], None]
) -> Drained:
    client = WorkerClient(note.address, gateway="")
    left = 0
    try:
        await client.drain(True, _CALL_TIMEOUT_S)
        report(f"{note.name} at {note.address} is draining")
        while True:
            stats = await client.stats(_CALL_TIMEOUT_S)
            left = _held(stats)
            waited_s = time.monotonic() - began_s
            if waited_s >= wait_s or (left == 0 and waited_s >= heard_s):
                break
            await asyncio.sleep(_POLL_INTERVAL_S)
    except (WorkerUnreachable, WorkerRefused):
        left = 0  # gone, or broken: there is nothing to wait for
    finally:
        await client.close()
    return Drained(note.name, note.address, left)


def _held(stats: WorkerStats) -> int:
    """Requests, and transfers whose pages the other side still reads."""
    return stats.running + stats.waiting + stats.transfers


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"slipstream-workers-{os.getuid()}"
