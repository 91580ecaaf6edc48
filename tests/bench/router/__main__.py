"""What a router costs: ours beside smg, vllm-router and sglang-router, in front of the same mock workers, in one run.

    make bench-router                                       # installs the peers into .venv-peers
    .venv/bin/python -m tests.bench.router --peer smg=PATH_TO_VENV --peer vllm-router=PATH ... [--seconds 3]

Systems run one after the other, each alone with its mocks. The router is pinned to one core; load generator and mocks
share another one. Per row and shape (see workload.py): latency at concurrency 1, 16 and 64, of which "added" is p50 or
p99 minus the same of a client that speaks the same protocol straight to a mock; requests per second; streamed tokens
per second. One JSON line per measurement, then tables with ratios: above 1 ours is better. A peer without an
environment is listed as absent. The rows `direct ...` are the load generator's and the mocks' own ceiling.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.serve import load_tokenizer
from tests.bench.hf_directory import write_tokenizer
from tests.bench.router.load import Sample, measure
from tests.bench.router.loop import run
from tests.bench.router.routers import PEERS, ROWS, Ports, Row, make_clients
from tests.bench.router.workload import SHAPES, Workload, make_workload
from workers.pairs import resolve_pair

_START_S = 60.0
Figures = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What a router costs, beside peers, with mock workers.")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=VENV", help=", ".join(PEERS))
    parser.add_argument("--peers-under", type=Path, help="a directory with one environment per peer")
    parser.add_argument("--rows", help="only rows whose name contains one of these words, comma separated")
    parser.add_argument("--shapes", default="unary,stream,burst")
    parser.add_argument("--concurrency", default="1,16,64")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured time of each cell")
    parser.add_argument("--rounds", type=int, default=1, help="figures are medians over rounds")
    parser.add_argument("--router-core", type=int, default=0)
    parser.add_argument("--load-core", type=int, default=1)
    parser.add_argument("--profile", type=Path, help="write cProfile's figures of our gateway there")
    parser.add_argument("--json", type=Path, help="write the JSON lines there too")
    arguments = parser.parse_args(argv)
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed: one for the router, one for everything else")
    environments = _environments(parser, arguments)
    words = arguments.rows.split(",") if arguments.rows else [""]
    rows = [row for row in ROWS if any(word in row.name for word in words) or row.name.startswith("direct")]
    os.sched_setaffinity(0, {arguments.load_core})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no process of ours may outlive the bench
    results: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="bench-router-") as scratch:
        model = Path(scratch) / "model"
        write_tokenizer(resolve_pair("smollm2").target_path, model)
        tokenizer = load_tokenizer("smollm2")
        for name in arguments.shapes.split(","):
            workload = make_workload(SHAPES[name], tokenizer)
            file = workload.save(Path(scratch) / f"{name}.json")
            levels = [int(level) for level in arguments.concurrency.split(",")]
            for number in range(arguments.rounds):
                for row in rows:
                    for figures in _measure_row(row, workload, file, model, levels, environments, arguments):
                        figures |= {"round": number}
                        print(json.dumps(figures), flush=True)
                        results.append(figures)
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(entry) + "\n" for entry in results))
    _print_tables(results, rows)
    _print_verdict(results)
    return 0


def _environments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, Path]:
    found: dict[str, Path] = {}
    if arguments.peers_under:
        found = {name: arguments.peers_under / name for name in PEERS}
    for entry in arguments.peer:
        name, _, path = entry.partition("=")
        if name not in PEERS or not path:
            parser.error(f"--peer {entry}: give NAME=VENV with one of {', '.join(PEERS)}")
        found[name] = Path(path)
    present = {name: path for name, path in found.items() if (path / "bin" / "python").exists()}
    for name in PEERS:
        if name not in present:
            where = f"nothing at {found[name]}" if name in found else "no --peer names it"
            print(json.dumps({"peer": name, "absent": where}), flush=True)
    return present


def _measure_row(
    row: Row,
    workload: Workload,
    file: Path,
    model: Path,
    levels: Sequence[int],
    environments: dict[str, Path],
    arguments: argparse.Namespace,
) -> Iterator[Figures]:
    base: Figures = {"row": row.name, "shape": workload.shape.name}
    if row.peer and row.peer not in environments:
        yield base | {"absent": row.peer}
        return
    ports = Ports(*_free_ports(5))
    with contextlib.ExitStack() as stack:
        mock = stack.enter_context(
            _Process(
                _mock_command(row, file, model, ports), arguments.load_core, file.with_suffix(".mock.log")
            )
        )
        for port in [ports.first] + [ports.second] * row.pair:
            _wait_port(port, mock, f"the mock of {row.name}")
        router = None
        if row.command is not None:
            bin_directory = str(environments[row.peer] / "bin") if row.peer else ""
            command = list(row.command(ports, bin_directory, model))
            if row.ours and arguments.profile:
                command += ["--profile", str(arguments.profile)]
            router = stack.enter_context(
                _Process(command, arguments.router_core, file.with_suffix(".router.log"))
            )
            _wait_port(ports.router, router, row.name)
            trouble = _wait_answers(ports.router, workload, router)
            if trouble:
                yield base | {"failed": trouble}
                return
        for level in levels:
            cpu_s = _cpu_s(router.pid) if router is not None else 0.0
            began_s = time.perf_counter()
            sample: Sample = run(
                measure(
                    workload, make_clients(row, ports), level, arguments.seconds, min(1.0, arguments.seconds)
                )
            )
            took_s = time.perf_counter() - began_s
            figures = base | {"concurrency": level} | _figures(sample, workload)
            if router is not None:
                used_s = _cpu_s(router.pid) - cpu_s
                figures["router_cpu"] = round(used_s / took_s, 3)
                served = max(1, sample.num_ended)
                figures["cpu_ms_per_request"] = round(1e3 * used_s / served, 4)
            yield figures


def _figures(sample: Sample, workload: Workload) -> Figures:
    if not sample.total_s:
        return {"requests": 0, "failed": sample.example or "no answer in the measured time"}
    requests_s = len(sample.total_s) / sample.seconds
    figures: Figures = {
        "requests": len(sample.total_s),
        "errors": sample.num_failed,
        "p50_ms": _percentile_ms(sample.total_s, 50),
        "p99_ms": _percentile_ms(sample.total_s, 99),
        "first_p50_ms": _percentile_ms(sample.first_s, 50),
        "first_p99_ms": _percentile_ms(sample.first_s, 99),
        "requests_per_s": round(requests_s, 1),
        "tokens_per_s": round(requests_s * workload.shape.num_tokens),
    }
    if sample.num_failed:
        figures["example"] = sample.example
    return figures


def _percentile_ms(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 3)


def _mock_command(row: Row, file: Path, model: Path, ports: Ports) -> list[str]:
    own = [sys.executable, "-m"]
    match row.mock:
        case "http":
            # Both legs of a pair may share a process: they share a core anyway.
            second = [str(ports.second)] if row.pair else []
            return [*own, "tests.bench.router.mock_http", str(file), str(ports.first), *second]
        case "vllm":
            second = [str(ports.second)] if row.pair else []
            return [*own, "tests.bench.router.mock_vllm", str(file), str(model), str(ports.first), *second]
        case "worker":
            second = [str(ports.second)] if row.pair else []
            return [*own, "tests.bench.router.mock_worker", str(file), str(ports.first), *second]


class _Process:
    """A command on one core, with what it says."""

    def __init__(self, command: Sequence[str], core: int, log: Path) -> None:
        self._log = log
        environment = os.environ | {"RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["taskset", "-c", str(core), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ended(self) -> str:
        """How it ended and its last words; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"ended with {code}: {self.said()}"

    def said(self) -> str:
        return self._log.read_bytes()[-1500:].decode("utf-8", "replace")


def _wait_port(port: int, process: _Process, what: str) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        if process.ended():
            raise SystemExit(f"{what} {process.ended()}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.05)
    raise SystemExit(f"{what} did not listen on port {port}: {process.said()}")


def _wait_answers(port: int, workload: Workload, process: _Process) -> str:
    """Ask until an answer comes: routers listen before they know their workers. Returns what keeps one from it."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        workload.http_body(),
        {"content-type": "application/json"},
    )
    trouble, until_s = "", time.monotonic() + _START_S
    while time.monotonic() < until_s:
        try:
            with urllib.request.urlopen(request, timeout=5.0) as response:
                response.read()
            return ""
        except OSError as error:
            trouble = repr(error)
            if hasattr(error, "read"):
                trouble += error.read()[:300].decode("utf-8", "replace")
        if process.ended():
            return process.ended()
        time.sleep(0.2)
    return f"{trouble}; {process.said()}"


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children so far (taskset becomes the command itself)."""
    total = 0.0
    for process in [pid, *_children(pid)]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _children(pid: int) -> list[int]:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [child for name in found for child in (int(name), *_children(int(name)))]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _medians(results: Sequence[Figures]) -> dict[tuple[str, str, int], Figures]:
    """By (row, shape, concurrency)."""
    groups: dict[tuple[str, str, int], list[Figures]] = {}
    for entry in results:
        if "p50_ms" in entry:
            groups.setdefault((entry["row"], entry["shape"], entry["concurrency"]), []).append(entry)
    return {
        key: {
            name: statistics.median(entry[name] for entry in group)
            for name in group[0]
            if isinstance(group[0][name], int | float) and all(name in entry for entry in group)
        }
        for key, group in groups.items()
    }


def _print_tables(results: Sequence[Figures], rows: Sequence[Row]) -> None:
    medians = _medians(results)
    for shape in dict.fromkeys(entry["shape"] for entry in results if "shape" in entry):
        levels = sorted({level for _, name, level in medians if name == shape})
        for level in levels:
            print(
                f"\n{shape}, concurrency {level} (added: ms over the direct row of the same client protocol)"
            )
            print(
                f"{'':24}{'added p50':>11}{'added p99':>11}{'first p50':>11}{'requests/s':>12}{'tokens/s':>11}"
                f"{'errors':>8}{'CPU':>6}{'CPU ms/request':>16}"
            )
            for row in rows:
                figures = medians.get((row.name, shape, level))
                if figures is None:
                    why = [
                        (entry.get("absent") and "absent") or entry.get("failed", "")
                        for entry in results
                        if (entry.get("row"), entry.get("shape")) == (row.name, shape)
                    ]
                    print(f"{row.name:24}  {str(next(iter(why), ''))[:120]}")
                    continue
                base = medians.get((row.baseline, shape, level), {})
                added = [
                    figures[name] - base[name] if row.command is not None and name in base else figures[name]
                    for name in ("p50_ms", "p99_ms", "first_p50_ms")
                ]
                print(
                    f"{row.name:24}{added[0]:11.3f}{added[1]:11.3f}{added[2]:11.3f}"
                    f"{figures['requests_per_s']:12.1f}{figures['tokens_per_s']:11.0f}{figures['errors']:8.0f}"
                    f"{figures.get('router_cpu', 0.0):6.2f}{figures.get('cpu_ms_per_request', 0.0):16.3f}"
                )
            _print_ratios(medians, rows, shape, level)


def _print_ratios(
    medians: dict[tuple[str, str, int], Figures], rows: Sequence[Row], shape: str, level: int
) -> None:
    """Ours over each peer's row of the same kind; above 1 ours is better, below 1 we lose."""
    for peer in rows:
        theirs = medians.get((peer.name, shape, level))
        if not peer.peer or theirs is None:
            continue
        for mine in rows:
            figures = medians.get((mine.name, shape, level))
            if not mine.ours or figures is None or mine.pair != peer.pair:
                continue
            base, own_base = (medians.get((row.baseline, shape, level), {}) for row in (peer, mine))
            their_added = theirs["p50_ms"] - base.get("p50_ms", 0.0)
            my_added = figures["p50_ms"] - own_base.get("p50_ms", 0.0)
            added = their_added / my_added if my_added > 0 else float("nan")
            print(
                f"  {mine.name} over {peer.name}: added p50 {added:.2f}, "
                f"requests/s {figures['requests_per_s'] / theirs['requests_per_s']:.2f}, "
                f"tokens/s {figures['tokens_per_s'] / theirs['tokens_per_s']:.2f}, "
                f"CPU {theirs['cpu_ms_per_request'] / max(figures['cpu_ms_per_request'], 1e-6):.2f}"
            )


def _print_verdict(results: Sequence[Figures]) -> None:
    """The two goals, as one JSON line."""
    medians = _medians(results)
    verdict: dict[str, float] = {}
    base = medians.get(("direct http", "unary", 1))
    mine = medians.get(("slipstream http", "unary", 1))
    if base and mine:
        verdict["added_p50_ms_at_1"] = round(mine["p50_ms"] - base["p50_ms"], 3)
    streamed = [
        figures["tokens_per_s"]
        for (row, shape, _), figures in medians.items()
        if row.startswith("slipstream") and shape == "burst"
    ]
    if streamed:
        verdict["most_streamed_tokens_per_s"] = max(streamed)
    print(json.dumps(verdict))


if __name__ == "__main__":
    sys.exit(main())
