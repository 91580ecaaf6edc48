"""Ships the KV of one prompt, 64 MiB, between two processes of this machine in every way that is worth comparing.

    .venv/bin/python -m tests.bench.kv_transfer [--mib 64] [--rounds 3] [--no-ray]

All ways take turns in one run, so drift of the machine hits all of them; a figure is the best round. Slipstream's own
ways have two figures: the writes alone, staging and tags included, as the plain copies are measured, and the whole
transfer, from `finish` with the grant in hand to the receiver's acknowledgement, landed pages checked as `verify` says.
"plain NIXL" is the agent's own copy of as many bytes, whichever of one, 4 or 16
descriptors was fastest. Ray: put into the object store here, get there, copied into the pool.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from kvmanager.layout import KvGeometry
from transceiver.endpoint import Endpoint, Identity
from transceiver.formats import Copy
from transceiver.nixl import NixlTransport
from transceiver.port import Delivered, Pages, ReceiveSpec, SendSpec
from transceiver.transport import Write, WriteId
from transceiver.wire import Fingerprint, Handoff, Pools, Region, Verify, decode_hello

LAYERS, HEADS, HEAD_DIM, BYTES = 32, 8, 64, 2
PAGE_SIZE = 16
VERIFIES: tuple[Verify, ...] = ("tag", "checksum")
REPEATS = 8
GOAL = 0.8


def geometry(page_size: int) -> KvGeometry:
    return KvGeometry(
        num_layers=LAYERS, num_kv_heads=HEADS, head_dim=HEAD_DIM, page_size=page_size, element_bytes=BYTES
    )


PAGE_BYTES = geometry(PAGE_SIZE).page_bytes  # 1 MiB


def aligned(size_bytes: int) -> np.ndarray:
    raw = np.zeros(size_bytes + 4096, dtype=np.uint8)
    skip = -raw.ctypes.data % 4096
    return raw[skip : skip + size_bytes]


@dataclass
class Worker:
    endpoint: Endpoint
    transport: NixlTransport
    memory: np.ndarray
    write_s: float = (
        0.0  # inside writes and what prepares them; between host memories both end when they return
    )

    @classmethod
    def over(cls, memory: np.ndarray, page_size: int, verify: Verify) -> Worker:
        shape = geometry(page_size)
        pools = Pools(
            Region(memory.ctypes.data, memory.nbytes, shape.page_bytes, memory.nbytes // shape.page_bytes)
        )
        epoch = WorkerEpoch(uuid.uuid4().hex)
        print_ = Fingerprint(target_model="bench", target_dtype="bfloat16", target=shape, verify=verify)
        transport = NixlTransport(epoch, pools)
        worker = cls(Endpoint(Identity(epoch, "bench", print_), pools, transport), transport, memory)
        worker._time(transport, "write")
        worker._time(worker.endpoint._annex, "prepare")
        return worker

    def _time(self, owner: object, name: str) -> None:
        call = getattr(owner, name)

        def timed(action: object) -> None:
            start_s = time.perf_counter()
            call(action)
            self.write_s += time.perf_counter() - start_s

        setattr(owner, name, timed)


def receive(conn: Connection, size_bytes: int) -> None:
    """The peer's process: ("worker", page size, verify) → hello, ("expect", spec), ("sum",), ("end",)."""
    memory = aligned(size_bytes)
    worker: Worker | None = None
    while True:
        if conn.poll(0 if worker is not None else 1):
            command, *arguments = conn.recv()
            if command == "end":
                break
            if command == "worker":
                if worker is not None:
                    worker.endpoint.close()
                worker = Worker.over(memory, *arguments)
                conn.send(worker.endpoint.hello())
            elif command == "sum":
                total = int(memory.sum(dtype=np.uint64))
                memory[:] = 0  # before the answer, or it would wipe out the next round
                conn.send(total)
            elif worker is not None:
                worker.endpoint.expect(*arguments)
                conn.send(None)
        if worker is not None:
            worker.endpoint.poll(time.monotonic())
            time.sleep(0.0001)


class Bench:
    def __init__(self, size_bytes: int) -> None:
        self.size = size_bytes
        self.source = aligned(size_bytes)
        self.source[:] = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
        self.sum = int(self.source.sum(dtype=np.uint64))
        spawn = multiprocessing.get_context("spawn")
        self.conn, theirs = spawn.Pipe()
        self.process = spawn.Process(target=receive, args=(theirs, size_bytes), daemon=True)
        self.process.start()

    def ask(self, *command: object) -> Any:
        self.conn.send(command)
        return self.conn.recv()

    def arrived(self) -> None:
        if self.ask("sum") != self.sum:
            raise RuntimeError("the bytes that arrived are not those sent")

    def memcpy(self) -> float:
        copy = aligned(self.size)
        copy[:] = 0
        start_s = time.perf_counter()
        np.copyto(copy, self.source)
        return time.perf_counter() - start_s

    def meet(self, here: int, there: int, verify: Verify) -> tuple[Worker, WorkerEpoch]:
        worker = Worker.over(self.source, here, verify)
        hello = self.ask("worker", there, verify)
        peer = worker.endpoint.connect(hello)
        self.theirs = decode_hello(hello).pools.target.address
        for _ in range(50):  # the link comes up
            worker.endpoint.poll(time.monotonic())
            time.sleep(0.001)
        return worker, peer

    def plain(self, worker: Worker, peer: WorkerEpoch, copies: list[tuple[int, int, int]]) -> float:
        """One write of the transport, descriptor by descriptor. Copies are offsets here and there, and a size."""
        base, there = self.source.ctypes.data, self.theirs
        made = tuple(Copy(base + ours, there + theirs, size) for ours, theirs, size in copies)
        start_s = time.perf_counter()
        worker.transport.write(Write(WriteId(1 << 40), peer, made))
        while not (ended := worker.transport.poll(0.0).ended):
            pass
        took_s = time.perf_counter() - start_s
        if ended[0].failure is not None:
            raise SystemExit(f"a plain copy failed: {ended[0].failure}")
        return took_s

    def ship(self, worker: Worker, peer: WorkerEpoch, here: int, there: int, pieces: int = 1) -> float:
        """One whole transfer by pages 0, 1, 2, ..., or with `pieces` > 1 in as many runs, in mixed order."""
        tokens = self.size // PAGE_BYTES * PAGE_SIZE
        source, destination = runs(tokens // here, pieces), runs(tokens // there, pieces)
        transfer = TransferId(uuid.uuid4().hex)
        spec = ReceiveSpec(transfer=transfer, num_tokens=tokens, destination=Pages(destination), ttl_s=60)
        self.ask("expect", spec)
        worker.endpoint.open(
            SendSpec(
                transfer=transfer,
                peer=peer,
                num_tokens=tokens,
                source=Pages(source),
                destination=Pages(destination),
                ttl_s=60,
            )
        )
        granted_s = time.monotonic() + 0.02
        while time.monotonic() < granted_s:
            worker.endpoint.poll(time.monotonic())
        worker.write_s = 0.0
        start_s = time.perf_counter()
        worker.endpoint.finish(transfer, Handoff(num_tokens=tokens, first_token=0))
        while not (events := worker.endpoint.poll(time.monotonic())):
            pass
        took_s = time.perf_counter() - start_s
        if not isinstance(events[0], Delivered):
            raise SystemExit(f"the transfer broke: {events[0]}")
        return took_s

    def end(self) -> None:
        self.conn.send(("end",))
        self.process.join()


def runs(num_pages: int, pieces: int) -> tuple[PageId, ...]:
    each = num_pages // pieces
    order = np.random.default_rng(pieces).permutation(pieces)
    return tuple(PageId(int(piece) * each + page) for piece in order for page in range(each))


def descriptors(size: int, count: int) -> list[tuple[int, int, int]]:
    each = size // count
    return [(index * each, index * each, each) for index in range(count)]


def scattered(size: int, each: int) -> list[tuple[int, int, int]]:
    """Pieces that lie in one order here and in another there, so that none continues the one before."""
    count = size // each
    order = np.random.default_rng(1).permutation(count)
    return [(index * each, int(place) * each, each) for index, place in enumerate(order)]


def ray_rounds(source: np.ndarray, rounds: int) -> list[float]:
    """Put here, get and copy there; an actor stands for the other worker."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home
        ray.init(num_cpus=1, object_store_memory=512 << 20, include_dashboard=False, log_to_driver=False)
        try:

            @ray.remote(num_cpus=0)
            class Receiver:
                def __init__(self, size: int) -> None:
                    self.memory = np.zeros(size, dtype=np.uint8)

                def take(self, data: np.ndarray) -> None:
                    np.copyto(self.memory, data)

            receiver = Receiver.remote(source.nbytes)
            seconds: list[float] = []
            for _ in range(rounds + 1):
                start_s = time.perf_counter()
                ray.get(receiver.take.remote(ray.put(source)))
                seconds.append(time.perf_counter() - start_s)
            return seconds[1:]
        finally:
            ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-ray", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.mib << 20)
    table = Table(bench)
    for _ in range(options.rounds):
        table.round()
    best = table.best
    if not options.no_ray:
        best["Ray's object store"] = min(ray_rounds(bench.source, options.rounds * REPEATS))
    bench.end()
    report(bench.size, best)


class Table:
    """The best seconds of every way."""

    def __init__(self, bench: Bench) -> None:
        self.best: dict[str, float] = {}
        self._bench = bench

    def round(self) -> None:
        """Every way, some times over; each pair of workers meets anew."""
        worker, peer = self._pair(PAGE_SIZE, "off")
        for _ in range(REPEATS):
            self._equal_pages(worker, peer)
        worker.endpoint.close()
        for verify in VERIFIES:
            worker, peer = self._pair(PAGE_SIZE, verify)
            for _ in range(REPEATS):
                self._ship(f"merged, {verify}", worker, peer, PAGE_SIZE, PAGE_SIZE)
            worker.endpoint.close()
        worker, peer = self._pair(2 * PAGE_SIZE, "off")
        for _ in range(REPEATS):
            self._ship("staged, 16 to 32", worker, peer, PAGE_SIZE, 2 * PAGE_SIZE)
        worker.endpoint.close()

    def _equal_pages(self, worker: Worker, peer: WorkerEpoch) -> None:
        bench, size = self._bench, self._bench.size
        self._note("memcpy, one process", bench.memcpy())
        for count in (1, 4, 16):
            copies = descriptors(size, count)
            self._measure(f"plain NIXL, {count} descriptors", bench.plain, worker, peer, copies)
        plane = PAGE_BYTES // LAYERS // 2
        self._measure("NIXL, per layer and K|V", bench.plain, worker, peer, scattered(size, plane))
        self._measure("NIXL, per page", bench.plain, worker, peer, scattered(size, PAGE_BYTES))
        self._ship("merged, one run", worker, peer, PAGE_SIZE, PAGE_SIZE)
        self._ship("merged, 8 runs", worker, peer, PAGE_SIZE, PAGE_SIZE, 8)

    def _pair(self, there: int, verify: Verify) -> tuple[Worker, WorkerEpoch]:
        worker, peer = self._bench.meet(PAGE_SIZE, there, verify)
        self._bench.plain(worker, peer, descriptors(self._bench.size, 1))  # the first write of a pair is slow
        self._bench.arrived()
        return worker, peer

    def _note(self, name: str, seconds: float) -> None:
        self.best[name] = min(self.best.get(name, float("inf")), seconds)

    def _measure(self, name: str, way: Callable[..., float], *arguments: object) -> None:
        self._note(name, way(*arguments))
        self._bench.arrived()

    def _ship(self, name: str, worker: Worker, *arguments: object) -> None:
        self._measure(f"{name}, whole", self._bench.ship, worker, *arguments)
        self._note(f"{name}, writes", worker.write_s)


def report(size: int, best: dict[str, float]) -> None:
    plain = min(seconds for name, seconds in best.items() if name.startswith("plain NIXL"))
    memcpy = best["memcpy, one process"]
    print(f"{size >> 20} MiB of KV, pages of {PAGE_BYTES >> 20} MiB, between two processes")
    print(f"{'way':<28} {'ms':>8} {'GB/s':>7} {'of memcpy':>10} {'of plain NIXL':>14}")
    for name, seconds in best.items():
        print(
            f"{name:<28} {seconds * 1e3:>8.2f} {size / seconds / 1e9:>7.2f} {memcpy / seconds:>10.2f}"
            f" {plain / seconds:>14.2f}"
        )
    merged = best["merged, one run, whole"]
    for verify in ("tag", "checksum"):
        cost_ms = (best[f"merged, {verify}, whole"] - merged) * 1e3
        print(f"verify = {verify}: {cost_ms:+.2f} ms ({cost_ms / merged / 10:+.1f} %)")
    reached = plain / best["merged, one run, writes"]
    print(
        f"merged runs reach {reached:.2f} of the best plain NIXL copy (goal: {GOAL}); whole: {plain / merged:.2f}"
    )
    print(json.dumps({"kv_transfer": {"bytes": size, "seconds": best, "merged_of_plain": reached}}))


if __name__ == "__main__":
    main()
