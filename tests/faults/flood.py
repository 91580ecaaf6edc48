"""Bursts of long prompts that their clients give up, and many short ones: `python -m tests.faults.flood`.

One context and one generation worker with the tiny pair and a gateway, each a process of its own, KV over NIXL. S01:
`rounds` times `clients` streams with prompts of `prompt_tokens` tokens begin at once and are cancelled at random
moments; then one probe must answer within `probe_s`, and nobody may hold anything. Then `short` small requests must
leave the resident memory of every process where it was: after `warm_up` of them its least-squares slope must be zero.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from cluster.answers import TokenPrompt
from cluster.client import AsyncClient
from cluster.config import ClusterConfig
from cluster.errors import RequestError
from tests.faults.local_cluster import RunningCluster, local_cluster, settled
from tests.faults.memory import Line, fit

SETTLE_S = 30.0
TOLERATED_BYTES = 1 << 20  # over all short requests together
CHANNELS = 8
VOCABULARY = 256


@dataclass
class Plan:
    """`warm_up` outlasts what fills once: rings of 1,024 timelines, 4,096 remembered transfers, prefix cache."""

    rounds: int = 4
    clients: int = 300
    prompt_tokens: int = 2048
    cancel_within_s: float = 10.0
    probe_s: float = 5.0
    short: int = 10_000
    warm_up: int = 6_000
    at_once: int = 16
    seed: int = 0


@dataclass
class Result:
    outcomes: Counter[str] = field(default_factory=Counter)
    probes_s: list[float] = field(default_factory=list)
    lines: dict[str, Line] = field(default_factory=dict)
    short_s: float = 0.0
    failures: list[str] = field(default_factory=list)


async def run(plan: Plan) -> Result:
    result, chance = Result(), random.Random(plan.seed)
    config = ClusterConfig(
        pair="tiny",
        listen="127.0.0.1:0",
        max_seq_len=plan.prompt_tokens + 64,
        max_batch=16,
        num_threads=1,
        max_live_requests=2 * plan.clients,
    )
    with tempfile.TemporaryDirectory() as directory:
        async with local_cluster(Path(directory), config) as cluster, contextlib.AsyncExitStack() as stack:
            clients = [AsyncClient(cluster.gateways[0].told["grpc"]) for _ in range(CHANNELS)]
            for client in clients:
                stack.push_async_callback(client.close)
            for _ in range(plan.rounds):
                await _burst(plan, clients, chance, result)
            if plan.short:
                await _short(plan, cluster, clients, chance, result)
            result.failures += cluster.complaints()
    return result


async def _burst(plan: Plan, clients: list[AsyncClient], chance: random.Random, result: Result) -> None:
    async def one(client: AsyncClient, prompt: TokenPrompt, patience_s: float) -> str:
        try:
            async with asyncio.timeout(patience_s):
                await client.complete(prompt, max_tokens=32, ignore_eos=True)
        except TimeoutError:
            return "left"
        except RequestError as error:
            return error.code
        return "complete"

    asking = [
        one(
            clients[number % len(clients)],
            _prompt(chance, plan.prompt_tokens),
            chance.uniform(0.0, plan.cancel_within_s),
        )
        for number in range(plan.clients)
    ]
    result.outcomes.update(await asyncio.gather(*asking))
    began_s = time.monotonic()
    try:
        text, end = await clients[0].complete("Are you there?", max_tokens=8, ignore_eos=True, timeout_s=60.0)
    except RequestError as error:
        result.failures.append(f"the probe ended in {error.code}: {error.message}")
        return
    result.probes_s.append(time.monotonic() - began_s)
    if result.probes_s[-1] >= plan.probe_s:
        result.failures.append(f"the probe took {result.probes_s[-1]:.2f} s")
    if end.usage.output_tokens != 8:
        result.failures.append(f"the probe got {end.usage.output_tokens} tokens of 8: {text!r}")
    result.failures += await settled(clients[0], SETTLE_S)


async def _short(
    plan: Plan, cluster: RunningCluster, clients: list[AsyncClient], chance: random.Random, result: Result
) -> None:
    done = 0
    samples: dict[str, list[tuple[float, float]]] = {process.name: [] for process in cluster.processes}
    num = plan.warm_up + plan.short
    prompts = iter([_prompt(chance, chance.randint(1, 24)) for _ in range(num)])
    began_s = time.monotonic()

    async def ask(client: AsyncClient) -> None:
        nonlocal done
        for prompt in prompts:
            try:
                await client.complete(prompt, max_tokens=4, ignore_eos=True, timeout_s=60.0)
                result.outcomes["short"] += 1
            except RequestError as error:
                result.failures.append(f"a short request ended in {error.code}: {error.message}")
                return
            done += 1
            if done > plan.warm_up and done % 50 == 0:
                for name, rss_bytes in cluster.memory().items():
                    samples[name].append((done, rss_bytes))

    await asyncio.gather(*(ask(clients[number % len(clients)]) for number in range(plan.at_once)))
    result.short_s = time.monotonic() - began_s
    for name, points in samples.items():
        if len(points) >= 3:
            result.lines[name] = line = fit(points)
            if line.grows(TOLERATED_BYTES):
                result.failures.append(f"the memory of {name} grows: {line}")
    result.failures += await settled(clients[0], SETTLE_S)


def _prompt(chance: random.Random, num_tokens: int) -> TokenPrompt:
    return TokenPrompt(tuple(chance.randrange(VOCABULARY) for _ in range(num_tokens)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in vars(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    plan = Plan(**vars(parser.parse_args()))
    result = asyncio.run(run(plan))
    print(f"ended   {dict(result.outcomes)}")
    print(
        f"probes  {', '.join(f'{probe_s:.2f} s' for probe_s in result.probes_s)} (limit {plan.probe_s:g} s)"
    )
    if result.short_s:
        print(f"short   {(plan.short + plan.warm_up) / result.short_s:.0f} requests/s")
    for name, line in result.lines.items():
        print(f"memory  {name}: {line}")
    for failure in result.failures:
        print(f"FAILED  {failure}")
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
