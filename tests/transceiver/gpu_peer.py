"""A receiving worker with pools on a device, in a process of its own, for the tests between two GPUs."""

from __future__ import annotations

import multiprocessing
import time
import uuid
from multiprocessing.connection import Connection

import numpy as np

from kvmanager.ids import PageId, WorkerEpoch
from kvmanager.layout import KvGeometry
from transceiver import cuda
from transceiver.endpoint import Identity
from transceiver.port import ReceiveSpec, TransferEvent, TransferPort
from transceiver.pump import Pump, nixl_port
from transceiver.wire import Fingerprint, Pools, Region

TARGET = KvGeometry(num_layers=4, num_kv_heads=2, head_dim=64, page_size=16, element_bytes=2)
DRAFT = KvGeometry(num_layers=1, num_kv_heads=2, head_dim=64, page_size=16, element_bytes=2)
NUM_PAGES = 64
FINGERPRINT = Fingerprint(
    target_model="t",
    target_dtype="bfloat16",
    target=TARGET,
    draft_model="d",
    draft_dtype="bfloat16",
    draft=DRAFT,
    draft_mode="mirrored",
    verify="tag",
)


class DevicePools:
    """Target and draft pool, each an allocation of its own."""

    def __init__(self, device: int) -> None:
        self.target = cuda.DeviceMemory(device, NUM_PAGES * TARGET.page_bytes)
        self.draft = cuda.DeviceMemory(device, NUM_PAGES * DRAFT.page_bytes)
        self.pools = Pools(
            Region(self.target.address, self.target.size_bytes, TARGET.page_bytes, NUM_PAGES, device),
            Region(self.draft.address, self.draft.size_bytes, DRAFT.page_bytes, NUM_PAGES, device),
        )

    def fill(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for memory in (self.target, self.draft):
            memory.load(random.integers(0, 256, memory.size_bytes, dtype=np.uint8))

    def pages(self, pool: str, ids: tuple[PageId, ...]) -> bytes:
        memory = self.target if pool == "target" else self.draft
        return memory.read().reshape(NUM_PAGES, -1)[list(ids)].tobytes()

    def port(self) -> Pump:
        return nixl_port(Identity(WorkerEpoch(uuid.uuid4().hex), "any", FINGERPRINT), self.pools)


def wait(port: TransferPort, timeout_s: float = 20.0) -> TransferEvent:
    give_up_s = time.monotonic() + timeout_s
    while time.monotonic() < give_up_s:
        if events := port.poll(time.monotonic()):
            return events[0]
        time.sleep(0.0005)
    raise AssertionError("no event")


def serve(conn: Connection, device: int) -> None:
    """("hello",), ("expect", spec), ("wait",) → event, ("pages", pool, ids) → bytes, ("close",)."""
    pools = DevicePools(device)
    port = pools.port()
    while True:
        command, *arguments = conn.recv()
        answer: object = None
        match command, arguments:
            case "hello", []:
                answer = port.hello()
            case "expect", [ReceiveSpec() as spec]:
                port.expect(spec)
            case "wait", []:
                answer = wait(port)
            case "pages", [str(pool), tuple(ids)]:
                answer = pools.pages(pool, ids)
            case "close", []:
                port.check()
                port.close()
                conn.send(None)
                return
            case _:
                raise ValueError(f"unknown command {command}")
        conn.send(answer)


class GpuPeer:
    def __init__(self, device: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._conn, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, device), daemon=True)
        self._process.start()

    def ask(self, *command: object) -> object:
        self._conn.send(command)
        assert self._conn.poll(60), "no answer"
        return self._conn.recv()

    def close(self) -> None:
        self.ask("close")
        self._process.join(20)
        assert self._process.exitcode == 0
