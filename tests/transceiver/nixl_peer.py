"""A receiving worker in a process of its own, driven over a pipe by the tests of the NIXL transport."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from kvmanager.ids import WorkerEpoch
from tests.transceiver.small_worker import FINGERPRINT, Memory
from transceiver.endpoint import Identity
from transceiver.port import ReceiveSpec, SendSpec, TransferEvent
from transceiver.pump import Pump, nixl_port
from transceiver.records import Timing
from transceiver.wire import Fingerprint

TIMING = Timing(lease_s=1.2, heartbeat_s=0.2)
NUM_PAGES = 64


@dataclass
class NixlWorker:
    memory: Memory
    port: Pump
    _unread: deque[TransferEvent] = field(default_factory=deque)

    def wait(self, timeout_s: float = 10.0) -> TransferEvent:
        """The next event."""
        give_up_s = time.monotonic() + timeout_s
        while not self._unread and time.monotonic() < give_up_s:
            self._unread.extend(self.port.poll(time.monotonic()))
            time.sleep(0.001)
        assert self._unread, "no event"
        return self._unread.popleft()


def start(name: str, fill_seed: int | None, fingerprint: Fingerprint = FINGERPRINT) -> NixlWorker:
    memory = Memory(NUM_PAGES, fill_seed, fingerprint)
    identity = Identity(WorkerEpoch(name), "any", fingerprint)
    return NixlWorker(memory, nixl_port(identity, memory.pools, timing=TIMING))


def serve(conn: Connection, name: str, fill_seed: int | None, fingerprint: Fingerprint) -> None:
    """Answer ("hello",), ("connect", bytes), ("expect" | "open", spec), ("push", t, n), ("finish", t, handoff),
    ("wait",) → event, ("pages", pool, ids) → bytes, ("fill", byte), ("check",), ("close",).
    """
    worker = start(name, fill_seed, fingerprint)
    port = worker.port
    while True:
        command, *arguments = conn.recv()
        answer: object = None
        match command, arguments:
            case "hello", []:
                answer = port.hello()
            case "connect", [bytes(hello)]:
                port.connect(hello)
            case "expect", [ReceiveSpec() as spec]:
                port.expect(spec)
            case "open", [SendSpec() as spec]:
                port.open(spec)
            case "push", [transfer, end_position]:
                port.push(transfer, end_position)
            case "finish", [transfer, handoff]:
                port.finish(transfer, handoff)
            case "wait", []:
                answer = worker.wait()
            case "pages", [str(pool), list(ids)]:
                answer = getattr(worker.memory, pool)[ids].tobytes()
            case "fill", [int(byte)]:
                worker.memory.target[:] = worker.memory.draft[:] = byte
            case "check", []:
                port.check()
                answer = port.stats()
            case "close", []:
                port.check()
                port.close()
                conn.send(None)
                return
            case _:
                raise ValueError(f"unknown command {command}")
        conn.send(answer)


class Peer:
    """A worker in another process, told what to do over a pipe."""

    def __init__(self, fill_seed: int | None = None, fingerprint: Fingerprint = FINGERPRINT) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.epoch = WorkerEpoch(uuid.uuid4().hex)
        self._conn, theirs = spawn.Pipe()
        arguments = (theirs, self.epoch, fill_seed, fingerprint)
        self.process = spawn.Process(target=serve, args=arguments, daemon=True)
        self.process.start()

    def tell(self, *command: object) -> None:
        self._conn.send(command)

    def hear(self) -> object:
        assert self._conn.poll(20), "no answer"
        return self._conn.recv()

    def ask(self, *command: object) -> object:
        self.tell(*command)
        return self.hear()

    def hello(self) -> bytes:
        packed = self.ask("hello")
        assert isinstance(packed, bytes)
        return packed

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join()

    def close(self) -> None:
        if self.process.is_alive():
            self.ask("close")
            self.process.join(10)
            assert self.process.exitcode == 0
