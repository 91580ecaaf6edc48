"""Two GPUs under open-loop load: one context and one generation worker, against two workers that do both.

    python -m tests.bench.gpu.load [--rates 1 2 4 6] [--seconds 10] [--prompt 4096] [--answer 256] [--png FILE]

Requests arrive as a Poisson process, whatever the workers do; prompts of random tokens (nothing is cached), answers of
a fixed length. The target is 8B-shaped with random weights and no drafter: what it says is noise, what it costs is not.
Each worker is an engine host in a process of its own with one GPU; this process is client and router, in one clock.
Two aggregated replicas take requests in turn. Both arrangements see the same arrivals.

    TTFT      from a request's arrival until its first token is here
    ITL       between a request's tokens, all gaps of all requests
    goodput   requests per second of those that met both: TTFT <= --slo-ttft-s, mean ITL <= --slo-itl-s

A request that is refused or fails counts as one that met nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import queue
import statistics
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import numpy as np

from kvmanager.ids import RequestId
from tests.bench.gpu.figures import report
from workers.request import (
    PrefillRequest,
    Reservation,
    ReserveRequest,
    SamplingParams,
    SubmitRequest,
    TokenFrame,
)

Arrangement = Literal["split", "aggregated"]
ROLES: dict[Arrangement, tuple[str, str]] = {
    "split": ("context", "generation"),
    "aggregated": ("aggregated", "aggregated"),
}
TTL_S = 120.0
QUANTILES = (0.5, 0.99)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is asked of every worker."""

    prompt: int
    answer: int
    max_batch: int
    chunk: int
    vocab_size: int


@dataclass
class Life:
    """One request: when it arrived, and when its tokens were here."""

    arrived_s: float
    worker: int = 0
    tokens_s: list[float] = field(default_factory=list)
    ended_s: float | None = None
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.arrived_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.tokens_s, self.tokens_s[1:], strict=False)]

    def meets(self, ttft_s: float, itl_s: float) -> bool:
        if self.error or self.ended_s is None or not self.tokens_s:
            return False
        return self.ttft_s <= ttft_s and statistics.fmean(self.gaps_s or [0.0]) <= itl_s


@dataclass(frozen=True)
class Point:
    """One arrangement at one rate. Quantiles as in QUANTILES; `offered` and `goodput` in requests per second."""

    rate: float
    offered: float
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    goodput: float
    failed: int


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Seconds from the start, ascending; one at least."""
    random = np.random.default_rng(seed)
    times, now = [], 0.0
    while (now := now + float(random.exponential(1.0 / rate))) < seconds or not times:
        times.append(min(now, seconds))
    return times


def summarize(lives: Sequence[Life], rate: float, seconds: float, slo: tuple[float, float]) -> Point:
    """Goodput counts over the time in which requests arrived."""
    answered = [life for life in lives if life.tokens_s]
    ttfts = [life.ttft_s for life in answered] or [float("nan")]
    gaps = [gap for life in answered for gap in life.gaps_s] or [float("nan")]
    good = sum(life.meets(*slo) for life in lives)
    failed = sum(bool(life.error) or life.ended_s is None for life in lives)
    return Point(
        rate,
        len(lives) / seconds,
        tuple(float(np.quantile(ttfts, q)) for q in QUANTILES),
        tuple(float(np.quantile(gaps, q)) for q in QUANTILES),
        good / seconds,
        failed,
    )


# a worker's process


def serve(conn: Connection, device: int, shape: Shape) -> None:
    """("role", role) → hello; ("connect", hello); ("reserve" | "prefill" | "submit", request) → ("answer", id, result);
    ("computed",) → when; ("end",). Token frames come as ("frame", frame) by themselves.
    """
    if device >= 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(device)  # before anything looks for devices
    from tests.bench.gpu.worker import start

    asyncio.run(_serve(conn, lambda role: start(role, device, shape)))


async def _serve(conn: Connection, start) -> None:  # type: ignore[no-untyped-def]
    lock = threading.Lock()
    host = None

    def send(*message: object) -> None:
        with lock:
            conn.send(message)

    async def answer(kind: str, request) -> None:  # type: ignore[no-untyped-def]
        try:
            result: object = await getattr(host, kind)(request)
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        send("answer", kind, request.request_id, result)

    tasks: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()
    while True:
        command, *arguments = await loop.run_in_executor(None, conn.recv)
        if command in ("role", "end") and host is not None:
            host.stop()
            host = None
        if command == "end":
            return
        if command == "role":
            host, computed_s = start(*arguments)
            host.set_frame_sink(lambda frame: send("frame", frame))
            host.start()
            send("hello", host.facts.hello)
        elif command == "connect" and host is not None:
            host.connect(*arguments)
            send("connected")
        elif command == "computed":
            send("computed", computed_s())
        else:
            task = asyncio.create_task(answer(command, *arguments))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


# the client


class Client:
    """Two workers' processes, and the requests that are under way."""

    def __init__(self, devices: Sequence[int], shape: Shape) -> None:
        self.shape = shape
        self.inbox: queue.SimpleQueue[tuple[int, tuple[object, ...], float]] = queue.SimpleQueue()
        self.conns: list[Connection] = []
        self.processes = []
        spawn = multiprocessing.get_context("spawn")
        for number, device in enumerate(devices):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, device, shape), daemon=True)
            process.start()
            self.conns.append(ours)
            self.processes.append(process)
            threading.Thread(target=self._read, args=(number, ours), daemon=True).start()
        self.lives: dict[RequestId, Life] = {}
        self.prompts: dict[RequestId, tuple[int, ...]] = {}
        self.sampling = SamplingParams(max_tokens=shape.answer, ignore_eos=True, draft_tokens=0)

    def _read(self, number: int, conn: Connection) -> None:
        try:
            while True:
                message = conn.recv()
                self.inbox.put((number, message, time.monotonic()))
        except (EOFError, OSError):
            self.inbox.put((number, ("gone",), time.monotonic()))

    def arrange(self, arrangement: Arrangement) -> None:
        self.arrangement = arrangement
        hellos: dict[int, object] = {}
        for conn, role in zip(self.conns, ROLES[arrangement], strict=True):
            conn.send(("role", role))
        while len(hellos) < 2:
            number, message = self._expect("hello")
            hellos[number] = message[1]
        if arrangement == "split":
            self.conns[0].send(("connect", hellos[1]))
            self._expect("connected")

    def _expect(self, word: str) -> tuple[int, tuple[object, ...]]:
        number, message, _ = self.inbox.get(timeout=300)
        if message[0] != word:
            raise SystemExit(f"worker {number} says {message[0]}, not {word}")
        return number, message

    def play(self, offsets_s: Sequence[float], seed: int) -> list[Life]:
        """Let requests arrive so long from now, and wait until all of them have ended."""
        random = np.random.default_rng(seed)
        prompts = [
            tuple(random.integers(0, self.shape.vocab_size, self.shape.prompt).tolist()) for _ in offsets_s
        ]
        requests = [RequestId(uuid.uuid4().hex) for _ in offsets_s]
        self.prompts = dict(zip(requests, prompts, strict=True))
        start_s = time.monotonic() + 0.05
        self.lives = {
            request: Life(start_s + offset) for request, offset in zip(requests, offsets_s, strict=True)
        }
        give_up_s = start_s + offsets_s[-1] + TTL_S
        waiting = list(self.lives)
        while waiting or any(life.ended_s is None for life in self.lives.values()):
            now_s = time.monotonic()
            while waiting and self.lives[waiting[0]].arrived_s <= now_s:
                self._ask(waiting.pop(0), len(self.lives) - len(waiting))
            if now_s > give_up_s:
                break
            until_s = self.lives[waiting[0]].arrived_s if waiting else now_s + 0.1
            try:
                number, message, when_s = self.inbox.get(timeout=max(until_s - now_s, 0.0001))
            except queue.Empty:
                continue
            self._hear(number, message, when_s)
        return list(self.lives.values())

    def _ask(self, request: RequestId, number: int) -> None:
        if self.arrangement == "aggregated":
            worker = number % 2
            self.lives[request].worker = worker
            submit = SubmitRequest(
                request_id=request, prompt_token_ids=self.prompts[request], sampling=self.sampling
            )
            self.conns[worker].send(("submit", submit))
            return
        reserve = ReserveRequest(
            request_id=request,
            num_prompt_tokens=self.shape.prompt,
            sampling=self.sampling,
            ttl_s=TTL_S,
        )
        self.conns[1].send(("reserve", reserve))

    def _hear(self, number: int, message: tuple[object, ...], when_s: float) -> None:
        match message:
            case ("frame", TokenFrame(outputs=outputs)):
                for output in outputs:
                    life = self.lives[output.request_id]
                    life.tokens_s += [when_s] * len(output.token_ids)
                    if output.finish_reason is not None:
                        life.ended_s = when_s
                        life.error = life.error or output.error
            case ("answer", "reserve", request, Reservation() as reservation):
                prefill = PrefillRequest(
                    request_id=RequestId(str(request)),
                    prompt_token_ids=self.prompts[RequestId(str(request))],
                    sampling=self.sampling,
                    reservation=reservation,
                    ttl_s=TTL_S,
                )
                self.conns[0].send(("prefill", prefill))
            case ("answer", _, request, str(error)):
                life = self.lives[RequestId(str(request))]
                life.error, life.ended_s = error, when_s
            case ("answer", *_):
                pass
            case _:
                raise SystemExit(f"worker {number} says {message[0]}")

    def computed_s(self) -> float:
        """When the context worker's transfer thread saw the last chunk's forward finish."""
        self.conns[0].send(("computed",))
        while True:
            match self.inbox.get(timeout=60):
                case (0, ("computed", float(seen_s)), _):
                    return seen_s
                case (_, ("answer", *_), _):
                    pass
                case (number, message, _):
                    raise SystemExit(f"worker {number} says {message[0]}, not when it was done")

    def end(self) -> None:
        for conn in self.conns:
            conn.send(("end",))
        for process in self.processes:
            process.join(20)


def load_points(path: Path | None) -> dict[str, list[Point]]:
    """Of an earlier run, so that arrangements may be measured one by one."""
    if path is None or not path.exists():
        return {}
    saved = json.loads(path.read_text())
    return {
        name: [
            Point(**{**one, "ttft_s": tuple(one["ttft_s"]), "itl_s": tuple(one["itl_s"])}) for one in series
        ]
        for name, series in saved.items()
    }


def save_points(points: dict[str, list[Point]], path: Path) -> None:
    path.write_text(
        json.dumps({name: [asdict(point) for point in series] for name, series in points.items()})
    )


def draw(points: dict[str, list[Point]], slo: tuple[float, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, ((ttft, itl), (good, failed)) = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for (name, series), color in zip(points.items(), ("tab:blue", "tab:orange"), strict=False):
        rates = [point.rate for point in series]
        for index, (quantile, style) in enumerate(zip(QUANTILES, ("-", "--"), strict=True)):
            label = f"{name}, p{quantile * 100:g}"
            ttft.plot(rates, [p.ttft_s[index] for p in series], style, marker="o", color=color, label=label)
            itl.plot(
                rates, [p.itl_s[index] * 1e3 for p in series], style, marker="o", color=color, label=label
            )
        good.plot(rates, [p.goodput for p in series], marker="o", color=color, label=name)
        offered = [p.offered for p in series]
        failed.plot(rates, [p.failed for p in series], marker="o", color=color, label=name)
    good.plot(rates, offered, ":", color="black", label="all requests")
    ttft.axhline(slo[0], linestyle=":", color="black")
    itl.axhline(slo[1] * 1e3, linestyle=":", color="black")
    for axes, title, unit in (
        (ttft, "TTFT", "s"),
        (itl, "ITL", "ms"),
        (good, "goodput", "requests/s within the SLO"),
        (failed, "requests that failed", ""),
    ):
        axes.set_title(title)
        axes.set_ylabel(unit)
        axes.set_xlabel("requests/s")
        axes.set_ylim(bottom=0)
        axes.legend()
    drawing.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 2.0, 4.0, 6.0])
    parser.add_argument("--seconds", type=float, default=10.0, help="in which requests arrive, for each rate")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--slo-ttft-s", type=float, default=1.0)
    parser.add_argument("--slo-itl-s", type=float, default=0.03)
    parser.add_argument("--devices", type=int, nargs=2, default=(0, 1), help="-1 -1: the tiny pair on CPUs")
    parser.add_argument("--only", choices=list(ROLES), help="one arrangement")
    parser.add_argument("--points", type=Path, help="keep all points here, beside those of earlier runs")
    parser.add_argument("--png", type=Path, help="all curves in one PNG")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    shape = Shape(
        prompt=options.prompt,
        answer=options.answer,
        max_batch=options.max_batch,
        chunk=options.chunk,
        vocab_size=150_000 if options.devices[0] >= 0 else 200,
    )
    slo = (options.slo_ttft_s, options.slo_itl_s)
    client = Client(options.devices, shape)
    points = load_points(options.points)
    measured: list[Arrangement] = [name for name in ROLES if options.only in (None, name)]
    for arrangement in measured:
        client.arrange(arrangement)
        client.play([0.0, 0.2, 0.4, 0.6], seed=99)  # everything has run once
        points[arrangement] = []
        for seed, rate in enumerate(options.rates):
            lives = client.play(arrivals(rate, options.seconds, seed), seed)
            point = summarize(lives, rate, options.seconds, slo)
            points[arrangement].append(point)
            errors = sorted({life.error for life in lives if life.error})
            print(
                f"{arrangement:<11} {rate:>5.1f}/s: TTFT {point.ttft_s[0]:.3f} / {point.ttft_s[1]:.3f} s, "
                f"ITL {point.itl_s[0] * 1e3:.1f} / {point.itl_s[1] * 1e3:.1f} ms, "
                f"goodput {point.goodput:.2f}/s, {point.failed} of {len(lives)} failed {errors[:2]}",
                flush=True,
            )
    client.end()
    if options.points is not None:
        save_points(points, options.points)
    for arrangement in measured:
        for point in points[arrangement]:
            for quantile, ttft_s, itl_s in zip(QUANTILES, point.ttft_s, point.itl_s, strict=True):
                report(f"load, TTFT: {arrangement} p{quantile * 100:g}", point.rate, ttft_s, "s", slo[0])
                report(
                    f"load, ITL: {arrangement} p{quantile * 100:g}",
                    point.rate,
                    itl_s * 1e3,
                    "ms",
                    slo[1] * 1e3,
                )
            report(f"load, goodput: {arrangement}", point.rate, point.goodput, "requests/s", point.offered)
    if options.png is not None:
        draw(points, slo, options.png)


if __name__ == "__main__":
    main()
