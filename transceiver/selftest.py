"""The start-up self-test: two processes of this machine ship pages over NIXL, and UCX says which transport it chose.

`run` starts `python -m transceiver.selftest` with UCX's own protocol report switched on; that process starts
its peer, ships the same pages a few times, and prints one line of JSON. The pages lie in host memory, or on two
devices, which may be one and the same. A slow answer is an answer: UCX falls back to TCP in silence when it cannot
reach the peer's memory (isolated PID namespaces, a thread without a CUDA context), so the caller compares
`gigabytes_per_s` with a floor, and `transport` with what it hoped for.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from kvmanager.layout import KvGeometry
from transceiver import cuda
from transceiver.endpoint import Identity
from transceiver.errors import SelfTestFailed
from transceiver.port import Delivered, Landed, Pages, ReceiveSpec, SendSpec, TransferEvent, TransferPort
from transceiver.pump import nixl_port
from transceiver.wire import Fingerprint, Handoff, Pools, Region

_PAGE_BYTES = 1 << 20
_GEOMETRY = KvGeometry(num_layers=32, num_kv_heads=8, head_dim=64, page_size=16, element_bytes=2)
_ROUNDS = 4
_MARK = "transceiver-selftest "


class SelfTest(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. `transport` is UCX's own word for how it writes the peer's memory, "unknown" if it told none.

    `gigabytes_per_s` is the best round from open to delivered; `memcpy_gigabytes_per_s` a plain copy in one
    process, between the two devices if pages lie on devices. The first round, connecting included, takes `first_s`.
    """

    transport: str
    num_bytes: int
    gigabytes_per_s: float
    memcpy_gigabytes_per_s: float
    first_s: float


def run(
    num_bytes: int = 64 << 20,
    floor_gigabytes_per_s: float = 0.0,
    timeout_s: float = 60.0,
    devices: tuple[int, int] | None = None,
) -> SelfTest:
    """`devices`: from which to which; None is host memory.

    Raises SelfTestFailed when nothing arrives, when bytes differ, and when the link is slower than the floor.
    """
    environment = {**os.environ, "UCX_PROTO_INFO": "y", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    command = [sys.executable, "-m", "transceiver.selftest", str(num_bytes), *map(str, devices or ())]
    try:
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SelfTestFailed(
            f"two local processes did not ship {num_bytes} bytes within {timeout_s} s"
        ) from error
    lines = ran.stdout.splitlines()
    report = next((line.removeprefix(_MARK) for line in lines if line.startswith(_MARK)), None)
    if ran.returncode != 0 or report is None:
        tail = " | ".join(ran.stderr.strip().splitlines()[-3:])
        raise SelfTestFailed(f"the self-test process ended with status {ran.returncode}: {tail}")
    measured = msgspec.json.decode(report, type=SelfTest)
    memory = "host memory" if devices is None else "cuda memory"
    measured = msgspec.structs.replace(measured, transport=chosen_transport(lines, memory))
    if measured.gigabytes_per_s < floor_gigabytes_per_s:
        raise SelfTestFailed(
            f"{measured.gigabytes_per_s:.2f} GB/s over {measured.transport}; "
            f"the floor is {floor_gigabytes_per_s:.2f} GB/s"
        )
    return measured


def chosen_transport(ucx_report: Sequence[str], memory: str = "host memory") -> str:
    """How UCX writes large pages from and to such memory of another process, from its UCX_PROTO_INFO=y tables.

    A table looks like this; `self` tables are an agent's way to itself and do not count:

        | <agent> intra-node cfg#1                                 |
        | remote memory write by ucp_put* from host memory to host |
        | Range  | Description | Config                            |
        | 0..inf | zero-copy   | cma/memory                        |
    """
    between_processes = write = False
    chosen = "unknown"
    for line in ucx_report:
        if "cfg#" in line:
            between_processes, write = " self cfg#" not in line, False
        elif "remote memory write" in line:
            # "from host memory to host", "from cuda/GPU0 to cuda", with words between: the kind is in both places
            write = between_processes and (memory == "host memory") == ("cuda" not in line)
        elif write and (row := re.search(r"\|\s*\S+\.\.inf\s*\|[^|]*\|\s*(\S[^|]*?)\s*\|", line)):
            chosen = row.group(1)
            write = False
    return chosen


class _Memory:
    """Pages in host memory, or on a device. Page 0 is nobody's, as in every pool, and the rest is what is shipped."""

    def __init__(self, num_pages: int, device: int | None) -> None:
        self.host = np.zeros((num_pages + 1, _PAGE_BYTES), dtype=np.uint8)
        self.held = None if device is None else cuda.DeviceMemory(device, self.host.nbytes)
        address = self.host.ctypes.data if self.held is None else self.held.address
        self.region = Region(address, self.host.nbytes, _PAGE_BYTES, num_pages + 1, device)

    def fill(self, seed: int | None) -> None:
        if seed is None:
            self.host[:] = 0
        else:
            self.host[1:] = np.random.default_rng(seed).integers(0, 256, self.host[1:].shape, dtype=np.uint8)
        if self.held is not None:
            self.held.load(self.host)

    def sum(self) -> int:
        read = self.host if self.held is None else self.held.read().reshape(self.host.shape)
        return int(read[1:].sum(dtype=np.uint64))

    def copy_s(self, device: int | None) -> float:
        """Seconds that a plain copy takes, to a device if there is one."""
        if self.held is None or device is None:
            return min(_copy_s(self.host) for _ in range(3))
        there = cuda.DeviceMemory(device, self.host.nbytes)
        seconds = min(self.held.copy_s(there) for _ in range(4))
        there.free()
        return seconds


def main(num_bytes: int, devices: tuple[int, int] | None = None) -> SelfTest:
    """The sender's process."""
    num_pages = max(num_bytes // _PAGE_BYTES, 1)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    here, there = devices or (None, None)
    peer = spawn.Process(target=_receive, args=(theirs, num_pages, there), daemon=True)
    peer.start()
    pages = Pages(tuple(PageId(1 + page) for page in range(num_pages)))
    memory = _Memory(num_pages, here)
    memory.fill(0)
    size, total = num_pages * _PAGE_BYTES, memory.sum()
    copy_s = memory.copy_s(there)
    port = _port("sender", memory)
    seconds: list[float] = []
    receiver = port.connect(ours.recv())
    for _ in range(_ROUNDS):
        transfer = TransferId(uuid.uuid4().hex)
        ours.send(transfer)
        ours.recv()
        start_s = time.perf_counter()
        num_tokens = num_pages * _GEOMETRY.page_size
        port.open(
            SendSpec(
                transfer=transfer,
                peer=receiver,
                num_tokens=num_tokens,
                source=pages,
                destination=pages,
                ttl_s=30,
            )
        )
        port.finish(transfer, Handoff(num_tokens=num_tokens, first_token=0))
        if not isinstance(_wait(port), Delivered):
            raise SelfTestFailed("the transfer broke")
        seconds.append(time.perf_counter() - start_s)
        if ours.recv() != total:
            raise SelfTestFailed("the bytes that arrived are not those sent")
    ours.send(None)
    peer.join()
    port.close()
    return SelfTest(
        transport="unknown",
        num_bytes=size,
        gigabytes_per_s=size / min(seconds[1:]) / 1e9,
        memcpy_gigabytes_per_s=size / copy_s / 1e9,
        first_s=seconds[0],
    )


def _receive(conn: Connection, num_pages: int, device: int | None) -> None:
    memory = _Memory(num_pages, device)
    pages = Pages(tuple(PageId(1 + page) for page in range(num_pages)))
    port = _port("receiver", memory)
    conn.send(port.hello())
    while (transfer := conn.recv()) is not None:
        memory.fill(None)
        num_tokens = num_pages * _GEOMETRY.page_size
        port.expect(ReceiveSpec(transfer=transfer, num_tokens=num_tokens, destination=pages, ttl_s=30))
        conn.send("expecting")
        if not isinstance(_wait(port), Landed):
            raise SelfTestFailed("the transfer broke")
        conn.send(memory.sum())
    port.close()


def _port(role: str, memory: _Memory) -> TransferPort:
    assert _GEOMETRY.page_bytes == _PAGE_BYTES
    fingerprint = Fingerprint(target_model="self-test", target_dtype="bfloat16", target=_GEOMETRY)
    return nixl_port(Identity(WorkerEpoch(uuid.uuid4().hex), role, fingerprint), Pools(memory.region))


def _wait(port: TransferPort) -> TransferEvent:
    while True:
        events = port.poll(time.monotonic())
        if events:
            return events[0]
        time.sleep(0.00005)


def _copy_s(memory: np.ndarray) -> float:
    copy = np.empty_like(memory)
    copy[:] = 0
    start_s = time.perf_counter()
    np.copyto(copy, memory)
    return time.perf_counter() - start_s


if __name__ == "__main__":
    count, *between = map(int, sys.argv[1:])
    measured = main(count, (between[0], between[1]) if between else None)
    print(_MARK + msgspec.json.encode(measured).decode(), flush=True)
