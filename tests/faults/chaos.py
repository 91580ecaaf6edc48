"""Requests at a steady rate while workers and links fail: `python -m tests.faults.chaos`.

Context and generation workers, each a process on a host (network namespace) of its own, KV over NIXL between them; the
gateway and the supervisor are in this process, and nobody else starts a worker. Every few seconds something happens to
one of them: it is killed, stopped for a while, drained for a while, or its link is cut for a while. The supervisor
fills the place of a killed one, and of one that was stopped for longer than it may be silent.

Each request must end in its golden text or in a clear error, none later than its deadline. There may be an error only
where all workers of a role were kept from serving at some moment of the request's life. When all is over no worker may
hold anything of it, nor the gateway, and no process that lived long enough may have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Literal

from cluster.answers import AnswerChunk, AnswerRequest, TokenPrompt
from cluster.config import ClusterConfig
from cluster.errors import RequestError
from cluster.gateway import Gateway, GatewaySettings
from cluster.link import LinkState, LinkTimes, WorkerLink
from cluster.prompt_sets import builtin_prompts
from cluster.routing import WithoutContext
from cluster.supervisor import Supervisor, policy_of
from kvmanager.ids import WorkerEpoch
from tests.cluster.ray_head import Host
from tests.faults import network
from tests.faults.memory import Line
from tests.faults.places import Memory, Outages, Place, Places
from tests.workers.split_pair import run_aggregated
from workers.assembly import load_models
from workers.config import PairSpec, WorkerConfig
from workers.pairs import resolve_pair
from workers.request import Role, SamplingParams
from workers.tokenizer import Tokenizer

Deed = Literal["kill", "stop", "drain", "cut"]
LASTS_S: dict[Deed, tuple[float, float]] = {"kill": (0, 0), "stop": (1, 10), "drain": (2, 4), "cut": (1, 6)}
PROMPT_TOKENS = (250, 16, 120, 40)  # at most; some short ones are computed where they are decoded
SHARED_EVERY = 5
DEADLINE_S = 60.0
LATE_S = 5.0
QUIET_S = 60.0  # leases, deadlines and restarts are over by then
START_S = 180.0
HEALTH_INTERVAL_S = 0.5
GATEWAY = "gateway"
SETTLE_S = 15.0  # a process has its caches and arenas by then
LEAST_REQUESTS = 150
TOLERATED_BYTES = 8 * 2**20
CLEAR = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})
FIGURES = (
    "running",
    "waiting",
    "slots_in_use",
    "draft_slots_in_use",
    "target_pages_in_use",
    "draft_pages_in_use",
    "leases",
    "transfers",
    "quarantined_transfers",
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`last`: how likely a misfortune that would meet the last worker of a role does so; it is never killed then.

    `most_live`: no further request while so many are. On a machine that is too slow for `rate` it lowers it.
    """

    pair: str = "tiny"
    requests: int = 1500
    rate: float = 4.0
    every_s: float = 3.0
    most_live: int = 24
    last: float = 0.1
    workers: int = 2
    links: bool = True
    seed: int = 0
    max_tokens: int = 60
    local_prefill_tokens: int = 32
    without_context: WithoutContext = "refuse"
    replay_wait_s: float = 10.0
    heartbeat_timeout_s: float = 2.0
    silence_limit_s: float = 8.0


@dataclass
class Result:
    """All lists but `excused` must be empty. `excused` are clear errors of requests that nobody could have served."""

    outcomes: Counter[str] = field(default_factory=Counter)
    deeds: Counter[str] = field(default_factory=Counter)
    replays: dict[str, int] = field(default_factory=dict)
    paths: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)  # processes, by why
    suspected: int = 0  # workers that served and were thought not to
    took_s: list[float] = field(default_factory=list)
    memory: dict[str, Line] = field(default_factory=dict)
    excused: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)

    @property
    def grown(self) -> list[str]:
        return [f"{name}: {line}" for name, line in self.memory.items() if line.grows(TOLERATED_BYTES)]

    @property
    def good(self) -> bool:
        return not (self.errors or self.wrong or self.late or self.held or self.grown)


Asked = tuple[AnswerRequest, list[int]]
"""A request and its golden tokens."""


class Run:
    """One run's workers, gateway and what is known of them."""

    def __init__(self, plan: Plan, hosts: list[Host]) -> None:
        self.plan = plan
        self.chance = random.Random(plan.seed)
        self.result = Result()
        roles: list[Role] = ["context"] * plan.workers + ["generation"] * plan.workers
        self.places = [
            Place(f"{role}-{number}", role, plan.pair, host)
            for number, (role, host) in enumerate(zip(roles, hosts, strict=True))
        ]
        self.outages = Outages({place.name: place.role for place in self.places})
        self.memory = Memory()
        ids = itertools.count()
        self.gateway = Gateway(
            [],
            Tokenizer.from_path(resolve_pair(plan.pair).target_path),
            GatewaySettings(
                times=LinkTimes(0.2, plan.heartbeat_timeout_s),
                admission_ttl_s=30.0,
                local_prefill_tokens=plan.local_prefill_tokens,
                without_context=plan.without_context,
                replay_wait_s=plan.replay_wait_s,
            ),
            new_id=lambda: f"chaos-{next(ids)}",
            new_seed=lambda: 1,
        )
        config = ClusterConfig(
            context_workers=plan.workers,
            generation_workers=plan.workers,
            silence_limit_s=plan.silence_limit_s,
            startup_timeout_s=START_S,
        )
        self.supervisor = Supervisor(
            Places(self.places),
            {place.name: place.role for place in self.places},
            [],
            policy_of(config),
            self.gateway.assign,
            interval_s=HEALTH_INTERVAL_S,
        )

    async def play(self, asked: list[Asked]) -> Result:
        try:
            self.gateway.begin()
            self.supervisor.start()
            await self._all_serve()
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(self._wreck(group)), group.create_task(self._watch())]
                await self._ask_all(asked)
                for task in watching:
                    task.cancel()
            for place in self.places:
                place.mend()
            await self._all_serve()
            self.result.held = await self._held()
            self._add_up()
        finally:
            await self.supervisor.stop()
            await self.gateway.stop()
            await asyncio.gather(*(place.kill() for place in self.places))
        return self.result

    async def _all_serve(self) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(START_S):
            while not all(self.serves(place) for place in self.places):
                await asyncio.sleep(0.1)

    def link(self, place: Place) -> WorkerLink | None:
        """None while nobody serves there."""
        return next((link for link in self.gateway.links if link.worker.name == place.name), None)

    def epoch(self, place: Place) -> WorkerEpoch | None:
        link = self.link(place)
        return link.facts.epoch if link is not None and link.facts is not None else None

    def serves(self, place: Place) -> bool:
        """Whether requests can be sent there, in company of every other that they can be sent to."""
        link = self.link(place)
        if link is None or not link.trusted or link.draining:
            return False
        partners = [other for other in self.places if other.role != place.role and self.up(other)]
        pairs = [{self.epoch(place), self.epoch(partner)} for partner in partners]
        return all(pair in [{*known} for known in self.gateway.paired] for pair in pairs)

    def up(self, place: Place) -> bool:
        link = self.link(place)
        return link is not None and link.trusted and not self.outages.down(place.name)

    async def _ask_all(self, asked: list[Asked]) -> None:
        asking = []
        for number in range(self.plan.requests):
            request, tokens = asked[number % len(asked)]
            if number % SHARED_EVERY:  # most share nothing, so that most are shipped
                request = replace(request, cache_salt=str(number))
            while self.gateway.num_live >= self.plan.most_live:
                await asyncio.sleep(0.02)
            asking.append(asyncio.create_task(self._ask(request, tokens)))
            await asyncio.sleep(self.chance.expovariate(self.plan.rate))
        await asyncio.gather(*asking)

    async def _ask(self, request: AnswerRequest, golden: list[int]) -> None:
        began_s, token_ids, outcome = time.monotonic(), [], "complete"
        result = self.result
        try:
            async for event in self.gateway.generate(request, timeout_s=DEADLINE_S):
                if isinstance(event, AnswerChunk):
                    token_ids += event.token_ids
        except RequestError as error:
            outcome = error.code
            said = f"{error.code}: {error.message}"
            if error.code not in CLEAR:
                result.wrong.append(said)
            elif self.outages.nobody_left(began_s, time.monotonic()):
                result.excused.append(said)
            else:
                result.errors.append(said)
        result.outcomes[outcome] += 1
        if token_ids != (golden if outcome == "complete" else golden[: len(token_ids)]):
            result.wrong.append(f"{token_ids} instead of {golden}")
        took_s = time.monotonic() - began_s
        result.took_s.append(took_s)
        if took_s > DEADLINE_S + LATE_S:
            result.late.append(f"{took_s:.1f} s")

    async def _wreck(self, group: asyncio.TaskGroup) -> None:
        """One misfortune after the other; some last longer than it takes for the next to come."""
        deeds: list[Deed] = ["kill", "stop", "drain", *(["cut"] if self.plan.links else [])]  # type: ignore[list-item]
        while True:
            await asyncio.sleep(self.plan.every_s)
            place, deed = self.chance.choice(self.places), self.chance.choice(deeds)
            up = [p for p in self.places if p.role == place.role and not self.outages.down(p.name)]
            if place not in up:
                continue
            if len(up) == 1 and (deed == "kill" or self.chance.random() >= self.plan.last):
                continue
            self.result.deeds[deed] += 1
            group.create_task(self._do(place, deed))

    async def _do(self, place: Place, deed: Deed) -> None:
        epoch = self.epoch(place)
        self.outages.begin(place.name, time.monotonic())
        lasts_s = self.chance.uniform(*LASTS_S[deed])
        try:
            match deed:
                case "kill":
                    await place.kill()
                    while self.epoch(place) in (None, epoch):
                        await asyncio.sleep(0.1)
                case "stop":
                    place.send(signal.SIGSTOP)
                    await asyncio.sleep(lasts_s)
                case "drain":
                    with contextlib.suppress(RequestError):  # it may be thought to be gone just now
                        await self.gateway.drain(place.name, True)
                    await asyncio.sleep(lasts_s)
                case "cut":
                    network.cut(place.host)
                    await asyncio.sleep(lasts_s)
        finally:
            place.send(signal.SIGCONT)
            if deed == "cut":
                network.join(place.host)
        await asyncio.sleep(1.0)  # a heartbeat that was on its way may still fail
        while not self.serves(place):
            link = self.link(place)
            if link is not None and link.trusted and link.draining:
                with contextlib.suppress(RequestError):
                    await self.gateway.drain(place.name, False)
            await asyncio.sleep(0.1)
        self.outages.end(place.name, time.monotonic())

    async def _watch(self) -> None:
        """Memory, and workers that are thought to be gone."""
        thought = set()
        for tick in itertools.count():
            for place in self.places:
                link = self.link(place)
                if link is not None and link.trusted:
                    thought.discard(place.name)
                elif not self.outages.down(place.name) and place.name not in thought:
                    thought.add(place.name)
                    self.result.suspected += 1
            if tick % 10 == 0:
                now_s, ended = time.monotonic(), len(self.result.took_s)
                self.memory.note(GATEWAY, os.getpid(), now_s, ended)
                for place in self.places:
                    if not self.outages.down(place.name):  # one that still loads grows
                        self.memory.note(place.name, place.pid, now_s, ended)
            await asyncio.sleep(0.1)

    async def _held(self) -> list[str]:
        """What workers and the gateway hold once everything had its time to end."""
        until_s = time.monotonic() + QUIET_S
        while True:
            await asyncio.sleep(0.5)
            await self.gateway.refresh()
            held = [text for link in self.gateway.links for text in _held_by(link)]
            for name in ("_live", "_retiring", "_tasks"):
                if kept := getattr(self.gateway, name):
                    held.append(f"the gateway has {len(kept)} {name[1:]}")
            if not held or time.monotonic() > until_s:
                return held

    def _add_up(self) -> None:
        figures = self.gateway.figures
        self.result.replays = dict(figures.replays)
        for (_, _, why), count in self.supervisor.replaced.items():
            self.result.replaced[why] += count
        for (_, path), count in figures.outcomes.items():
            self.result.paths[path] += count
        self.result.memory = self.memory.lines(SETTLE_S, LEAST_REQUESTS)


def golden(plan: Plan) -> list[Asked]:
    """Requests, greedy and seeded, each with what an aggregated engine says to it alone."""
    models = load_models(WorkerConfig(role="aggregated", pair=PairSpec(name=plan.pair)))
    tokenizer = Tokenizer.from_path(models.pair.target_path)
    found = []
    for number, prompt in enumerate(builtin_prompts(8)):
        chat = [{"role": "user", "content": prompt.text}]
        limit = PROMPT_TOKENS[number % len(PROMPT_TOKENS)]
        token_ids = tuple(tokenizer.apply_chat_template(chat)[-limit:])
        temperature = 1.0 if number // 4 % 2 else 0.0
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


def _held_by(link: WorkerLink) -> list[str]:
    name, stats = link.worker.name, link.stats
    if link.state is not LinkState.READY or stats is None:
        return [f"{name} is {link.state.value}: {link.trouble}"]
    held = [f"{name} has {figure} {getattr(stats, figure)}" for figure in FIGURES if getattr(stats, figure)]
    return [*held, *([f"the gateway keeps {len(link.live)} requests on {name}"] if link.live else [])]


def _parsed() -> Plan:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in vars(Plan()).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=value)
        else:
            parser.add_argument(option, type=type(value), default=value)
    return Plan(**vars(parser.parse_args()))


def _report(result: Result, wall_s: float) -> None:
    took_s = sorted(result.took_s)
    print(f"ended     {dict(result.outcomes)} in {wall_s:.0f} s")
    print(f"took      p50 {took_s[len(took_s) // 2]:.1f} s, p99 {took_s[len(took_s) * 99 // 100]:.1f} s")
    print(f"deeds     {dict(result.deeds)}; workers wrongly suspected {result.suspected}")
    print(f"replaced  {dict(result.replaced)}")
    print(f"run again {result.replays}")
    print(f"paths     {dict(result.paths)}")
    print(f"excused   {len(result.excused)}: {dict(Counter(result.excused).most_common(5))}")
    for name, line in result.memory.items():
        print(f"memory    {name}: {line}")
    for name in ("errors", "wrong", "late", "held", "grown"):
        for line in getattr(result, name):
            print(f"{name.upper():9} {line}")


def main() -> int:
    plan, began_s = _parsed(), time.monotonic()
    with ExitStack() as stack:
        hosts = [Host()] * (2 * plan.workers)
        if plan.links:
            try:
                hosts = stack.enter_context(network.hosts(2 * plan.workers))
            except network.NotPermitted as error:
                print(f"cannot cut links: {error}; --no-links runs without", file=sys.stderr)
                return 2

        async def play() -> Result:
            return await Run(plan, hosts).play(golden(plan))

        result = asyncio.run(play())
    _report(result, time.monotonic() - began_s)
    return 0 if result.good else 1


if __name__ == "__main__":
    sys.exit(main())
