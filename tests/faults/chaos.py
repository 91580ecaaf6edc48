"""Requests at a steady rate while workers are killed, stopped and drained: `python -m tests.faults.chaos`.

Two context and two generation workers with the tiny pair, each a process of its own, KV over NIXL between them; the
gateway is in this process. Every few seconds something happens to one worker. A killed one is started again at its
address, as another incarnation. Each request must end in its golden text or in a clear error, none later than its
deadline, and when all is over no worker may hold anything of it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import signal
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from cluster.answers import AnswerChunk, AnswerRequest, TokenPrompt
from cluster.errors import RequestError
from cluster.gateway import Gateway, GatewaySettings
from cluster.link import LinkState, LinkTimes, WorkerAddress
from cluster.prompt_sets import builtin_prompts
from tests.workers.split_pair import run_aggregated
from workers.assembly import load_models
from workers.config import PairSpec, WorkerConfig
from workers.pairs import resolve_pair
from workers.request import Role, SamplingParams
from workers.tokenizer import Tokenizer

ROLES: tuple[Role, ...] = ("context", "context", "generation", "generation")
STOPPED_S = 3.0
DRAINED_S = 2.0
DEADLINE_S = 60.0
QUIET_S = 45.0  # leases, deadlines and restarts are over by then
CLEAR = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})


@dataclass
class Plan:
    requests: int = 60
    rate: float = 3.0
    every_s: float = 4.0
    seed: int = 0
    max_tokens: int = 60


@dataclass
class Result:
    """`wrong` and `late` must be empty, and so must `held`: what workers still hold at the end.

    `errors` are clear ones. One worker of each role is always up, so that there should be none either.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    deeds: Counter[str] = field(default_factory=Counter)
    replays: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.errors or self.wrong or self.late or self.held)


class WorkerProcess:
    """A worker's place: its name and port outlive its incarnations."""

    def __init__(self, name: str, role: Role) -> None:
        self.name, self.role = name, role
        self.port = _free_port()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(self.name, self.role, f"127.0.0.1:{self.port}")

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.faults.worker",
            self.role,
            str(self.port),
            stdin=asyncio.subprocess.PIPE,
        )

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def killed(self) -> None:
        self.send(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()


async def run(plan: Plan) -> Result:
    chance, result = random.Random(plan.seed), Result()
    asked = _golden(plan)
    workers = [WorkerProcess(f"{role}-{number}", role) for number, role in enumerate(ROLES)]
    try:
        await asyncio.gather(*(worker.start() for worker in workers))
        ids = itertools.count()
        gateway = Gateway(
            [worker.address for worker in workers],
            Tokenizer.from_path(resolve_pair("tiny").target_path),
            GatewaySettings(times=LinkTimes(0.2, 1.0), admission_ttl_s=30.0),
            new_id=lambda: f"chaos-{next(ids)}",
            new_seed=lambda: 1,
        )
        try:
            await gateway.start(120.0)
            wrecking = asyncio.create_task(_wreck(plan, gateway, workers, chance, result))
            asking = []
            for number in range(plan.requests):
                request, text = asked[number % len(asked)]
                asking.append(asyncio.create_task(_ask(gateway, request, text, result)))
                await asyncio.sleep(chance.expovariate(plan.rate))
            await asyncio.gather(*asking)
            wrecking.cancel()
            await asyncio.gather(wrecking, return_exceptions=True)
            await _mend(workers)
            result.held = await _held(gateway)
            result.replays = dict(gateway.figures.replays)
        finally:
            await gateway.stop()
    finally:
        await asyncio.gather(*(worker.killed() for worker in workers))
    return result


def _golden(plan: Plan) -> list[tuple[AnswerRequest, list[int]]]:
    """Requests, greedy and seeded, each with what an aggregated engine says to it alone."""
    models = load_models(WorkerConfig(role="aggregated", pair=PairSpec(name="tiny")))
    tokenizer = Tokenizer.from_path(models.pair.target_path)
    found = []
    for number, prompt in enumerate(builtin_prompts(8)):
        chat = [{"role": "user", "content": prompt.text}]
        token_ids = tuple(tokenizer.apply_chat_template(chat)[-250:])
        temperature = 1.0 if number % 2 else 0.0
        sampling = SamplingParams(
            max_tokens=plan.max_tokens, ignore_eos=True, temperature=temperature, seed=number
        )
        request = AnswerRequest(
            prompt=TokenPrompt(token_ids),
            max_tokens=plan.max_tokens,
            ignore_eos=True,
            temperature=temperature,
            seed=number,
        )
        found.append((request, run_aggregated(models, [token_ids], sampling)[0].tokens))
    return found


async def _ask(gateway: Gateway, request: AnswerRequest, golden: list[int], result: Result) -> None:
    began_s, token_ids, outcome = time.monotonic(), [], "complete"
    try:
        async for event in gateway.generate(request, timeout_s=DEADLINE_S):
            if isinstance(event, AnswerChunk):
                token_ids += event.token_ids
    except RequestError as error:
        outcome = error.code
        (result.errors if error.code in CLEAR else result.wrong).append(f"{error.code}: {error.message}")
    result.outcomes[outcome] += 1
    if token_ids != (golden if outcome == "complete" else golden[: len(token_ids)]):
        result.wrong.append(f"{token_ids} instead of {golden}")
    if time.monotonic() - began_s > DEADLINE_S + 5.0:
        result.late.append(f"{time.monotonic() - began_s:.1f} s")


async def _wreck(
    plan: Plan, gateway: Gateway, workers: list[WorkerProcess], chance: random.Random, result: Result
) -> None:
    """One misfortune after the other, never to the last worker of a role."""
    while True:
        await asyncio.sleep(plan.every_s)
        worker, deed = chance.choice(workers), chance.choice(["kill", "stop", "drain"])
        link = next(link for link in gateway.links if link.worker.name == worker.name)
        ready = [other for other in gateway.links if other.trusted and other.worker.role == worker.role]
        if link not in ready or len(ready) < 2:
            continue  # one of them is still coming back
        result.deeds[deed] += 1
        match deed:
            case "kill":
                await worker.killed()
                await worker.start()
            case "stop":
                worker.send(signal.SIGSTOP)
                try:
                    await asyncio.sleep(STOPPED_S)
                finally:
                    worker.send(signal.SIGCONT)
            case _:
                await gateway.drain(worker.name, True)
                try:
                    await asyncio.sleep(DRAINED_S)
                finally:
                    await gateway.drain(worker.name, False)


async def _mend(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.send(signal.SIGCONT)
        if worker._process is None or worker._process.returncode is not None:
            await worker.start()


async def _held(gateway: Gateway) -> list[str]:
    """What workers hold once everything had its time to end."""
    until_s = time.monotonic() + QUIET_S
    while True:
        await asyncio.sleep(0.5)
        await gateway.refresh()
        held = []
        for link in gateway.links:
            stats = link.stats
            if link.state is not LinkState.READY or stats is None:
                held.append(f"{link.worker.name} is {link.state.value}: {link.trouble}")
                continue
            for figure in (
                "running",
                "waiting",
                "slots_in_use",
                "target_pages_in_use",
                "leases",
                "transfers",
            ):
                if getattr(stats, figure):
                    held.append(f"{link.worker.name} has {figure} {getattr(stats, figure)}")
        if not held or time.monotonic() > until_s:
            return held


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in vars(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    began_s = time.monotonic()
    result = asyncio.run(run(Plan(**vars(parser.parse_args()))))
    print(f"ended     {dict(result.outcomes)} in {time.monotonic() - began_s:.0f} s")
    print(f"done      {dict(result.deeds)}")
    print(f"run again {result.replays}")
    for name in ("errors", "wrong", "late", "held"):
        for line in getattr(result, name):
            print(f"{name.upper():9} {line}")
    return 0 if result.good else 1


if __name__ == "__main__":
    sys.exit(main())
