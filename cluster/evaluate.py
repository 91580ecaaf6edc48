"""Runs the same prompts through every mode of one cluster and compares what came out.

    workers start ──▶ per mode: inject its fault, ask all prompts, see every ledger empty ──▶ report

Two gateways stand in front of the workers, one for the split pair and one for the aggregated worker, so that a mode
is a choice of door and nothing in the serving path knows that it is being evaluated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from cluster.client import AsyncClient
from cluster.config import ClusterConfig
from cluster.gates import GateSettings, failures
from cluster.gateway import Gateway
from cluster.link import WorkerAddress
from cluster.local import LocalCluster
from cluster.measure import AskSettings, ask_all
from cluster.modes import EvaluationCluster, Mode
from cluster.prompt_sets import EvalPrompt
from cluster.reference import Bounds, Reference, bounds
from cluster.report import Answer, ModeReport, summarize
from cluster.serve import load_tokenizer, running_gateway
from cluster.service import Door
from workers.request import Role
from workers.tokenizer import Tokenizer

_DRAIN_S = 10.0
_DRAIN_POLL_S = 0.05


class Progress(Protocol):
    """Where an evaluation says how far it is."""

    def starting(self, worker: str, stage: str) -> None: ...

    def mode(self, mode: Mode, num_prompts: int) -> None: ...

    def text(self, index: int, text: str) -> None: ...

    def answered(self, index: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """Everything an evaluation is asked to do. `prompts` keep their order in all modes.

    `reference` is what is known of this pair and length of answers, greedy, with all drafts verified and any
    token drafted.
    """

    cluster: EvaluationCluster
    modes: Sequence[Mode]
    prompts: Sequence[EvalPrompt]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    min_al: float | None = None
    reference: Reference | None = None
    reference_accuracy: float | None = None

    @property
    def bounds(self) -> Bounds | None:
        """What these prompts must reach; None when that is not known."""
        plain = self.cluster.draft_tokens == "full" and not self.cluster.draft_vocab
        if self.reference is None or self.temperature or not plain:
            return None
        return bounds(self.reference, self.prompts)

    @property
    def gates(self) -> GateSettings:
        return GateSettings(
            exact_tokens=self.cluster.dtype in ("float32", "float64"),
            sequential=self.cluster.concurrency == 1,
            min_al=self.min_al,
            reference=self.bounds,
            reference_accuracy=self.reference_accuracy,
            num_questions=sum(prompt.answer is not None for prompt in self.prompts),
        )


@dataclass(frozen=True)
class Evaluation:
    """Reports and answers in the order of the plan's modes, and the gates that failed."""

    plan: EvaluationPlan
    reports: dict[str, ModeReport]
    answers: dict[str, list[Answer]]
    failures: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        """The machine-readable result: one object, without the gates' sentences."""
        return {
            "pair": self.plan.cluster.pair,
            "prompts": len(self.plan.prompts),
            "max_tokens": self.plan.max_tokens,
            "dtype": self.plan.cluster.dtype,
            "concurrency": self.plan.cluster.concurrency,
            "draft_tokens": self.plan.cluster.draft_tokens,
            "draft_vocab": self.plan.cluster.draft_vocab,
            "reference": msgspec.to_builtins(self.plan.bounds),
            "modes": {mode: msgspec.to_builtins(report) for mode, report in self.reports.items()},
            "failures": self.failures,
        }


async def evaluate(plan: EvaluationPlan, progress: Progress) -> Evaluation:
    """Start a cluster, run every mode, stop the cluster. Raises what starting or a request raises."""
    config = plan.cluster.config(plan.modes)
    loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, config.pair))
    await asyncio.sleep(0)  # its thread starts before Ray blocks this one
    reports: dict[str, ModeReport] = {}
    answers: dict[str, list[Answer]] = {}
    try:
        async with (
            LocalCluster(config, report=progress.starting) as cluster,
            _doors(config, cluster, await loading) as doors,
        ):
            for mode in plan.modes:
                progress.mode(mode, len(plan.prompts))
                answers[mode.name], reports[mode.name] = await _run_mode(
                    plan, mode, cluster, doors[mode.split], progress
                )
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
    return Evaluation(plan, reports, answers, failures(reports, plan.gates))


@dataclass(frozen=True)
class _OpenDoor:
    gateway: Gateway
    client: AsyncClient
    roles: tuple[Role, ...]


@asynccontextmanager
async def _doors(
    config: ClusterConfig, cluster: LocalCluster, tokenizer: Tokenizer
) -> AsyncIterator[dict[bool, _OpenDoor]]:
    """A gRPC door per kind of mode, keyed by whether it is split."""
    aggregated = [worker for worker in cluster.workers if worker.role == "aggregated"]
    split = [worker for worker in cluster.workers if worker.role != "aggregated"]
    async with (
        _door(config, "split", split, tokenizer) as one,
        _door(config, "aggregated", aggregated, tokenizer) as two,
    ):
        yield {split: door for split, door in ((True, one), (False, two)) if door is not None}


@asynccontextmanager
async def _door(
    config: ClusterConfig, route: str, workers: Sequence[WorkerAddress], tokenizer: Tokenizer
) -> AsyncIterator[_OpenDoor | None]:
    if not workers:
        yield None
        return
    counts = {
        f"{role}_workers": sum(w.role == role for w in workers)
        for role in ("context", "generation", "aggregated")
    }
    own = msgspec.structs.replace(config, mode=route, **counts)
    async with running_gateway(own, workers, tokenizer) as gateway:
        door = Door(gateway)
        address = await door.start(config.listen)
        await door.serving(True)
        try:
            async with AsyncClient(address) as client:
                yield _OpenDoor(gateway, client, tuple(sorted({worker.role for worker in workers})))
        finally:
            await door.stop(0.5)


async def _run_mode(
    plan: EvaluationPlan, mode: Mode, cluster: LocalCluster, door: _OpenDoor, progress: Progress
) -> tuple[list[Answer], ModeReport]:
    settings = AskSettings(
        max_tokens=plan.max_tokens,
        concurrency=plan.cluster.concurrency,
        draft_tokens=None if mode.drafting else 0,
        temperature=plan.temperature,
        seed=plan.seed,
    )
    for role in door.roles:
        await cluster.inject(role, mode.fault.value)
    measured = await ask_all(door.client, plan.prompts, settings, progress.text, progress.answered)
    pages, slots = await _left_behind(door.gateway)
    for role in door.roles:
        await cluster.check(role)
    return measured.answers, summarize(measured.answers, measured.wall_s, pages, slots)


async def _left_behind(gateway: Gateway) -> tuple[int, int]:
    """(pages, slots) still in use, target and draft together, once the workers have had time to let go."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _DRAIN_S
    while True:
        await gateway.refresh()
        stats = [link.stats for link in gateway.links if link.stats is not None]
        pages = sum(s.target_pages_in_use + s.draft_pages_in_use for s in stats)
        slots = sum(s.slots_in_use + s.draft_slots_in_use + s.leases for s in stats)
        if pages + slots == 0 or loop.time() >= deadline_s:
            return pages, slots
        await asyncio.sleep(_DRAIN_POLL_S)
