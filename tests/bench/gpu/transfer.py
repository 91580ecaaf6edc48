"""Ships the KV of one prompt from one GPU to another in every way that is worth comparing.

    python -m tests.bench.gpu.transfer [--tokens 8192] [--rounds 8] [--devices 0 1]

The prompt: 36 layers, 8 KV heads x 128, bf16, in pages of 64 tokens that interleave all layers (9 MiB), in random order
on both sides. Two processes. The limit is a plain peer copy of as many bytes, measured in the same rounds. Ways:

    port          our path, from `finish` with the grant in hand to `Landed` on the other side: pages written, tags
                  written and looked at, the handoff delivered
    port, whole   the same from `open` on: asking for the grant included
    nixl          one NIXL write of the same descriptors, nothing around it; as one batch of CUDA copies (what our path
                  uses) and copy by copy
    per layer     one descriptor per layer and K or V of each page, as pools with a tensor per layer need them
    contiguous    pages that lie side by side on both sides, so that NIXL makes one descriptor of them, or of 256 MiB

A figure is the median round; the best is printed too. Every way's bytes are compared with what was sent.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import torch

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from kvmanager.layout import KvGeometry
from tests.bench.gpu.figures import median, report
from transceiver.endpoint import Identity
from transceiver.formats import Copy
from transceiver.nixl import NixlTransport
from transceiver.port import Delivered, Landed, Pages, ReceiveSpec, SendSpec, TransferEvent
from transceiver.pump import Pump
from transceiver.transport import Inbound, PageMove, Write, WriteId
from transceiver.wire import TARGET, Fingerprint, Handoff, Hello, Pools, Region, Verify, decode_hello, encode

GEOMETRY = KvGeometry(num_layers=36, num_kv_heads=8, head_dim=128, page_size=64, element_bytes=2)
PLANE_BYTES = GEOMETRY.page_bytes // GEOMETRY.num_layers // 2
PIECE_PAGES = (256 << 20) // GEOMETRY.page_bytes
BATCH_SWITCH = "NIXL_UCX_SGL_ENABLE"
GOAL, AIM = 0.75, 0.9


def device_of(number: int) -> torch.device:
    """Host memory below 0, to try the bench without a GPU."""
    return torch.device("cuda", number) if number >= 0 else torch.device("cpu")


def wait_for(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class Side:
    """One process's pool, page 0 left out as the ledger does, and what is in it."""

    def __init__(self, device: int, num_pages: int) -> None:
        self.device = device_of(device)
        if device >= 0:
            torch.cuda.set_device(self.device)
        self.pool = torch.zeros((num_pages, GEOMETRY.page_bytes), dtype=torch.uint8, device=self.device)
        generator = torch.Generator().manual_seed(7)
        content = torch.randint(
            0, 1 << 30, (GEOMETRY.page_bytes // 4,), dtype=torch.int32, generator=generator
        )
        self.content = content.to(self.device)
        self.region = Region(
            self.pool.data_ptr(),
            self.pool.numel(),
            GEOMETRY.page_bytes,
            num_pages,
            device if device >= 0 else None,
        )
        self.pools = Pools(self.region)

    def fill(self, pages: tuple[PageId, ...]) -> None:
        """Every page differs from every other."""
        for position, page in enumerate(pages):
            self.pool[page].view(torch.int32).copy_(self.content + position)
        wait_for(self.device)

    def holds(self, pages: tuple[PageId, ...]) -> bool:
        return all(
            torch.equal(self.pool[page].view(torch.int32), self.content + position)
            for position, page in enumerate(pages)
        )

    def clear(self) -> None:
        self.pool.zero_()
        wait_for(self.device)

    def fingerprint(self, verify: Verify) -> Fingerprint:
        return Fingerprint(target_model="bench", target_dtype="bfloat16", target=GEOMETRY, verify=verify)

    def hello(self, transport: NixlTransport, epoch: WorkerEpoch) -> Hello:
        return Hello(
            epoch=epoch,
            role="bench",
            fingerprint=self.fingerprint("off"),
            pools=self.pools,
            transport=transport.name,
            metadata=transport.metadata(),
        )


class Watched:
    """A transport that notes when writes were posted and when they were seen to be over."""

    def __init__(self, inner: NixlTransport) -> None:
        self._inner = inner
        self.begun_s = self.posted_s = self.ended_s = 0.0
        self.fresh = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def write(self, write: Write) -> None:
        if self.fresh:
            self.begun_s, self.fresh = time.monotonic(), False
        self._inner.write(write)
        self.posted_s = time.monotonic()

    def poll(self, now_s: float) -> Inbound:
        inbound = self._inner.poll(now_s)
        if inbound.ended:
            self.ended_s = time.monotonic()
        return inbound


@dataclass
class Worker:
    """A port over the pool, and when its last event came, by the clock that all processes share."""

    side: Side
    port: Pump
    transport: Watched
    rung_s: float = 0.0
    rung: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def over(cls, side: Side, verify: Verify) -> Worker:
        epoch = WorkerEpoch(uuid.uuid4().hex)
        made: list[Watched] = []

        def make() -> Watched:
            made.append(Watched(NixlTransport(epoch, side.pools)))
            return made[0]

        port = Pump(Identity(epoch, "bench", side.fingerprint(verify)), side.pools, make)  # type: ignore[arg-type]
        worker = cls(side, port, made[0])
        port.wake_on_event(worker._ring)
        return worker

    def _ring(self) -> None:
        self.rung_s = time.monotonic()
        self.rung.set()

    def wait(self) -> TransferEvent:
        """Asleep until then, as an engine's host is: whoever polls here takes the interpreter from the transfer."""
        while not (events := self.port.poll(0.0)):
            self.rung.wait()
            self.rung.clear()
        return events[0]


def receive(conn: Connection, device: int, num_pages: int) -> None:
    """The peer's process: ("raw",) and ("port", verify) → hello, ("expect", spec), ("landed",) → when,
    ("holds", pages), ("clear",), ("end",).
    """
    side = Side(device, num_pages)
    raw: list[NixlTransport] = []
    worker: Worker | None = None
    conn.send("ready")
    while True:
        if not conn.poll(0.002):
            for transport in raw:
                transport.poll(0.0)  # connections come up by polling
            continue
        command, *arguments = conn.recv()
        answer: object = None
        if command == "end":
            break
        if command == "raw":
            epoch = WorkerEpoch(uuid.uuid4().hex)
            raw.append(NixlTransport(epoch, side.pools))
            answer = encode(side.hello(raw[-1], epoch))
        elif command == "port":
            worker = Worker.over(side, *arguments)
            answer = worker.port.hello()
        elif command == "expect" and worker is not None:
            worker.port.expect(*arguments)
        elif command == "landed" and worker is not None:
            event = worker.wait()
            answer = worker.rung_s if isinstance(event, Landed) else event
        elif command == "holds":
            answer = side.holds(*arguments)
        elif command == "clear":
            side.clear()
        conn.send(answer)
    if worker is not None:
        worker.port.close()
    conn.send(None)


@dataclass
class Bench:
    side: Side
    conn: Connection
    peer_device: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    parts: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def ask(self, *command: object) -> object:
        self.conn.send(command)
        return self.conn.recv()

    def raw(self, batch: bool) -> tuple[NixlTransport, Hello]:
        os.environ[BATCH_SWITCH] = "1" if batch else "0"
        packed = self.ask("raw")
        assert isinstance(packed, bytes)
        theirs = decode_hello(packed)
        transport = NixlTransport(WorkerEpoch(uuid.uuid4().hex), self.side.pools)
        transport.add_peer(theirs)
        return transport, theirs

    def meet(self, verify: Verify) -> tuple[Worker, WorkerEpoch]:
        os.environ[BATCH_SWITCH] = "1"
        hello = self.ask("port", verify)
        assert isinstance(hello, bytes)
        worker = Worker.over(self.side, verify)
        return worker, worker.port.connect(hello)

    def peer_copy(self, size: int) -> float:
        source = self.side.pool.flatten()[:size]
        if not hasattr(self, "_there"):
            self._there = torch.empty(size, dtype=torch.uint8, device=device_of(self.peer_device))
        there = self._there[:size]
        wait_for(self.side.device, there.device)
        start_s = time.perf_counter()
        there.copy_(source, non_blocking=True)
        wait_for(self.side.device)  # whose stream it runs on
        return time.perf_counter() - start_s

    def write(self, transport: NixlTransport, theirs: Hello, **what: tuple[object, ...]) -> float:
        write = Write(write=WriteId(1), peer=theirs.epoch, **what)  # type: ignore[arg-type]
        start_s = time.perf_counter()
        transport.write(write)
        while not (ended := transport.poll(0.0).ended):
            pass
        took_s = time.perf_counter() - start_s
        if ended[0].failure is not None:
            raise SystemExit(f"a NIXL write failed: {ended[0].failure}")
        return took_s

    def ship(
        self,
        worker: Worker,
        peer: WorkerEpoch,
        source: tuple[PageId, ...],
        destination: tuple[PageId, ...],
        *,
        granted: bool,
    ) -> float:
        """Seconds to `Landed`: from `finish`, or where nothing is granted yet from `open`."""
        transfer, num_tokens = TransferId(uuid.uuid4().hex), len(source) * GEOMETRY.page_size
        pages = Pages(destination)
        spec = ReceiveSpec(transfer=transfer, num_tokens=num_tokens, destination=pages, ttl_s=30)
        sending = SendSpec(
            transfer=transfer,
            peer=peer,
            num_tokens=num_tokens,
            source=Pages(source),
            destination=pages,
            ttl_s=30,
        )
        handoff = Handoff(num_tokens=num_tokens, first_token=0)
        self.ask("expect", spec)
        start_s = time.monotonic()
        worker.port.open(sending)
        if granted:
            time.sleep(0.01)
            start_s = time.monotonic()
        worker.transport.fresh = True
        worker.port.finish(spec.transfer, handoff)
        if not isinstance(event := worker.wait(), Delivered):
            raise SystemExit(f"the transfer broke: {event}")
        landed_s = self.ask("landed")
        if not isinstance(landed_s, float):
            raise SystemExit(f"the transfer broke: {landed_s}")
        if granted:
            seen = worker.transport
            for name, seconds in (
                ("finish to post", seen.begun_s - start_s),
                ("posting", seen.posted_s - seen.begun_s),
                ("copying, until seen", seen.ended_s - seen.posted_s),
                ("seen to landed", landed_s - seen.ended_s),
            ):
                self.parts[name].append(seconds)
        return landed_s - start_s

    def timed(self, name: str, way: Callable[[], float], pages: tuple[PageId, ...] | None = None) -> None:
        if pages is not None:
            self.ask("clear")
        self.seconds[name].append(way())
        if pages is not None and not self.ask("holds", pages):
            raise SystemExit(f"{name}: the bytes that arrived are not those sent")


def planes(
    ours: Region, theirs: Region, source: tuple[PageId, ...], destination: tuple[PageId, ...]
) -> tuple[Copy, ...]:
    """A descriptor per layer and K or V of each page."""
    return tuple(
        Copy(
            ours.address + here * ours.page_bytes + offset,
            theirs.address + there * theirs.page_bytes + offset,
            PLANE_BYTES,
        )
        for here, there in zip(source, destination, strict=True)
        for offset in range(0, GEOMETRY.page_bytes, PLANE_BYTES)
    )


def random_pages(count: int, num_pages: int, seed: int) -> tuple[PageId, ...]:
    order = np.random.default_rng(seed).permutation(num_pages - 1)[:count]
    return tuple(PageId(1 + int(page)) for page in order)


def straight(count: int) -> tuple[PageId, ...]:
    return tuple(PageId(1 + page) for page in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--devices", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--slow-rounds", type=int, default=2, help="rounds of the ways that take long")
    options = parser.parse_args()
    count = options.tokens // GEOMETRY.page_size
    num_pages = 2 * count + 1
    spawn = multiprocessing.get_context("spawn")
    conn, theirs = spawn.Pipe()
    process = spawn.Process(target=receive, args=(theirs, options.devices[1], num_pages), daemon=True)
    process.start()
    bench = Bench(Side(options.devices[0], num_pages), conn, options.devices[1])
    assert conn.recv() == "ready"
    measure(bench, count, num_pages, options.rounds, options.slow_rounds)
    bench.ask("end")
    process.join()
    show(bench, options.tokens, count * GEOMETRY.page_bytes)


def measure(bench: Bench, count: int, num_pages: int, rounds: int, slow_rounds: int) -> None:
    size = count * GEOMETRY.page_bytes
    source, destination = random_pages(count, num_pages, 1), random_pages(count, num_pages, 2)
    run = straight(count)
    worker, peer = bench.meet("tag")
    batched, copied = bench.raw(batch=True), bench.raw(batch=False)
    order = np.argsort(np.array(destination))  # as our path sorts them
    scattered = PageMove(TARGET, tuple(source[i] for i in order), tuple(destination[i] for i in order))
    region = bench.side.region
    bench.side.fill(source)
    for number in range(rounds + 1):
        slow = number <= slow_rounds
        bench.timed("peer copy", partial(bench.peer_copy, size))
        for name, granted in (("port, whole", False), ("port", True)):
            bench.timed(
                name, partial(bench.ship, worker, peer, source, destination, granted=granted), destination
            )
        for name, (transport, theirs) in (("batch", batched), ("copy by copy", copied)):
            way = partial(bench.write, transport, theirs, moves=(scattered,))
            bench.timed(f"nixl, {name}", way, destination)
            if slow:
                layers = planes(region, theirs.pools.target, source, destination)
                bench.timed(
                    f"per layer, {name}", partial(bench.write, transport, theirs, copies=layers), destination
                )
        if number == 0:
            bench.seconds.clear()  # the first round sets everything up
            bench.parts.clear()
    bench.side.fill(run)
    transport, theirs = batched
    one = (PageMove(TARGET, run, run),)
    cuts = [run[first : first + PIECE_PAGES] for first in range(0, count, PIECE_PAGES)]
    pieces = tuple(PageMove(TARGET, cut, cut) for cut in cuts)
    for _ in range(rounds):
        bench.timed("contiguous, one", partial(bench.write, transport, theirs, moves=one), run)
        bench.timed("contiguous, 256 MiB", partial(bench.write, transport, theirs, moves=pieces), run)
        bench.timed("peer copy", partial(bench.peer_copy, size))
    worker.port.close()


def show(bench: Bench, num_tokens: int, size: int) -> None:
    limit = size / median(bench.seconds["peer copy"]) / 1e9
    print(
        f"{size >> 20} MiB of KV ({num_tokens} tokens), pages of {GEOMETRY.page_bytes >> 20} MiB in random order"
    )
    print(f"{'way':<26} {'ms':>9} {'best':>9} {'GB/s':>8} {'of peer copy':>13}")
    for name, seconds in bench.seconds.items():
        middle = median(seconds)
        print(
            f"{name:<26} {middle * 1e3:>9.3f} {min(seconds) * 1e3:>9.3f} {size / middle / 1e9:>8.1f} "
            f"{size / middle / 1e9 / limit:>13.3f}"
        )
    print(
        "our path, piece by piece: "
        + ", ".join(f"{k} {median(v) * 1e6:.0f} us" for k, v in bench.parts.items())
    )
    for name, seconds in bench.seconds.items():
        report(f"KV transfer, {num_tokens} tokens", name, size / median(seconds) / 1e9, "GB/s", limit)
    reached = size / median(bench.seconds["port"]) / 1e9 / limit
    print(f"our path reaches {reached:.3f} of the peer copy (goal {GOAL}, aim {AIM})")


if __name__ == "__main__":
    main()
