"""A context and a generation engine in one process, joined by the loopback transport, under a clock of our own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvmanager.ids import RequestId, WorkerEpoch
from kvmanager.ledger import LedgerUsage
from tests.device import copy_memory
from transceiver.endpoint import Endpoint, Identity
from transceiver.loopback import Faults, LoopbackHub, LoopbackTransport
from transceiver.port import TransferPort
from transceiver.records import Timing
from transceiver.wire import Pools
from workers.aggregated import AggregatedEngine
from workers.assembly import Assembly, Models, build
from workers.config import FixedPages, KvBudget, PairSpec, WorkerConfig
from workers.context import ContextEngine
from workers.engine import Computed, ContextDone, Emitted, Engine, EngineEvent, Granted, Refused
from workers.errors import WorkerRefused
from workers.generation import GenerationEngine
from workers.request import (
    PrefillRequest,
    RequestStats,
    Reservation,
    ReserveRequest,
    Role,
    SamplingParams,
    SubmitRequest,
    TokenLogprob,
)

TICK_S = 0.01


def config(
    role: Role,
    *,
    pages: int | None = None,
    max_batch: int = 8,
    max_seq_len: int = 512,
    chunk: int = 32,
    **more: object,
) -> WorkerConfig:
    """A small worker: page size 16, 512 positions."""
    kv: dict[str, KvBudget] = {} if pages is None else {"kv": FixedPages(num_target_pages=pages)}
    fields = {"pair": PairSpec(name="tiny"), **kv, **more}
    return WorkerConfig(
        role=role,
        max_batch=max_batch,
        max_seq_len=max_seq_len,
        chunk_tokens=chunk,
        **fields,  # type: ignore[arg-type]
    )


@dataclass
class Outcome:
    """What became of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    error: str = ""
    refused: WorkerRefused | None = None
    stats: RequestStats | None = None
    context_done: bool = False
    reservation: Reservation | None = None

    @property
    def over(self) -> bool:
        return self.finish is not None or self.refused is not None


def account(outcomes: Sequence[Outcome]) -> list[tuple[list[int], int, tuple[int, ...]]]:
    """Tokens, decode steps, and acceptances by draft position, of those that were answered."""
    return [
        (each.tokens, each.stats.decode_steps, each.stats.accepted_by_position)
        for each in outcomes
        if each.stats is not None
    ]


def run_aggregated(
    models: Models, prompts: Sequence[Sequence[int]], sampling: SamplingParams, **options: object
) -> list[Outcome]:
    """Golden answers: all prompts through one aggregated engine, batched; its ledgers are checked and left empty."""
    assembly = build(config("aggregated", **options), models)  # type: ignore[arg-type]
    return answers(assembly.engine, prompts, sampling)


def answers(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Outcome]:
    """All prompts through this aggregated engine, batched."""
    assert isinstance(engine, AggregatedEngine)
    outcomes = {RequestId(str(index)): Outcome() for index in range(len(prompts))}
    for request_id, prompt in zip(outcomes, prompts, strict=True):
        engine.submit(SubmitRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling))
    with torch.inference_mode():
        while not engine.idle:
            _record(engine.step(0.0), outcomes)
            engine.check()
    assert engine.ledger.usage().slots_in_use == engine.ledger.usage().target_pages_in_use == 0
    return list(outcomes.values())


class SplitPair:
    """Both engines. `ask` starts a request; `run` ticks until every request is over and every lease has ended."""

    def __init__(
        self,
        models: Models,
        *,
        context: WorkerConfig | None = None,
        generation: WorkerConfig | None = None,
        context_models: Models | None = None,
        faults: Faults | None = None,
        seed: int = 0,
        timing: Timing | None = None,
    ) -> None:
        self.hub = LoopbackHub(seed=seed, faults=faults, move=copy_memory)
        self._ids = itertools.count()
        self._timing = timing
        self._builds = {
            "context": (context or config("context"), context_models or models),
            "generation": (generation or config("generation"), models),
        }
        self._assemblies: dict[str, Assembly] = {}
        self._dead: list[WorkerEpoch] = []
        self._start("context")
        self._start("generation")
        self._introduce()
        self.outcomes: dict[RequestId, Outcome] = {}
        self.prompts: dict[RequestId, tuple[int, ...]] = {}
        self.sampling: dict[RequestId, SamplingParams] = {}
        self.salts: dict[RequestId, str] = {}
        self._reserved: set[RequestId] = set()  # whom the present generation worker, or context worker, knows
        self._prefilling: set[RequestId] = set()
        self.now_s = 0.0
        self.baseline = self.usage()

    def _port(self, identity: Identity, pools: Pools) -> TransferPort:
        transport = LoopbackTransport(self.hub, identity.epoch, pools)
        return Endpoint(identity, pools, transport, self._timing)

    def _start(self, role: Role) -> None:
        self._assemblies[role] = assembly = build(*self._builds[role], self._port)
        if isinstance(assembly.engine, ContextEngine):
            self.context = assembly.engine
        else:
            assert isinstance(assembly.engine, GenerationEngine)
            self.generation = assembly.engine

    def _introduce(self) -> None:
        port = self._assemblies["context"].port
        assert port is not None
        port.connect(self._assemblies["generation"].facts.hello)

    def restart(self, role: Role, *, told: bool) -> None:
        """The worker dies with all it holds, and another takes its place.

        `told`: the survivor learns of it at once, not by `tell_of_deaths`.
        """
        epoch = self._assemblies[role].facts.epoch
        self.hub.crash(epoch)
        self._dead.append(epoch)
        if told:
            self.tell_of_deaths()
        self._start(role)
        self._introduce()
        if role == "generation":
            for request_id in [r for r in self._reserved if not self.outcomes[r].over]:
                self.outcomes[request_id].finish = "lost"
                if told:
                    self.context.cancel(request_id)
            self._reserved.clear()
        elif told:
            for request_id in [r for r in self._prefilling if not self.outcomes[r].tokens]:
                self.generation.cancel(request_id)
        self._prefilling.clear()

    def tell_of_deaths(self) -> None:
        """What a gateway does when it meets a worker's next incarnation."""
        for assembly in self._assemblies.values():
            assert assembly.port is not None
            for epoch in self._dead:
                assembly.port.disconnect(epoch)

    def usage(self) -> tuple[LedgerUsage, LedgerUsage]:
        return self.context.ledger.usage(), self.generation.ledger.usage()

    def ask(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        ttl_s: float = 30.0,
        *,
        salt: str = "",
        position_multiple: int = 1,
        age_s: float = 0.0,
        local_prefill_tokens: int = 0,
    ) -> RequestId:
        request_id = RequestId(f"r{next(self._ids)}")
        self.outcomes[request_id] = Outcome()
        self.prompts[request_id] = tuple(prompt)
        self.sampling[request_id] = sampling
        self.salts[request_id] = salt
        self._reserved.add(request_id)
        self.generation.reserve(
            ReserveRequest(
                request_id=request_id,
                num_prompt_tokens=len(prompt),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                ttl_s=ttl_s,
                cache_salt=salt,
                position_multiple=position_multiple,
                age_s=age_s,
                local_prefill_tokens=local_prefill_tokens,
            ),
            self.now_s,
        )
        return request_id

    def tick(self, *, context: bool = True, generation: bool = True) -> None:
        """One step of each engine that is alive, then every check."""
        self.now_s += TICK_S
        with torch.inference_mode():
            if generation:
                events = self.generation.step(self.now_s)
                _record(events, self.outcomes)
                for event in events:
                    if isinstance(event, Granted) and isinstance(event.admitted, Reservation):
                        self._prefill(event.request_id, event.admitted)
            if context:
                _record(self.context.step(self.now_s), self.outcomes)
        self.context.check()
        self.generation.check()

    def _prefill(self, request_id: RequestId, reservation: Reservation) -> None:
        self._prefilling.add(request_id)
        self.outcomes[request_id].reservation = reservation
        request = PrefillRequest(
            request_id=request_id,
            prompt_token_ids=self.prompts[request_id],
            sampling=self.sampling[request_id],
            reservation=reservation,
            ttl_s=30.0,
            cache_salt=self.salts[request_id],
        )
        try:
            self.context.prefill(request, self.now_s)
        except WorkerRefused as refused:
            self.outcomes[request_id].refused = refused
            self.generation.cancel(request_id)

    def run(self, max_ticks: int = 20_000) -> None:
        for _ in range(max_ticks):
            if all(outcome.over for outcome in self.outcomes.values()) and self.usage() == self.baseline:
                return
            self.tick()
        raise AssertionError(f"not over after {max_ticks} ticks: {self.outcomes} {self.usage()}")


def _record(events: list[EngineEvent], outcomes: dict[RequestId, Outcome]) -> None:
    for event in events:
        match event:
            case Emitted(output):
                outcome = outcomes[output.request_id]
                assert outcome.finish is None, "tokens after the end of a request"
                outcome.tokens.extend(output.token_ids)
                outcome.logprobs.extend(output.logprobs)
                outcome.finish = output.finish_reason
                outcome.error = output.error
                outcome.stats = output.stats
            case Refused(request_id, error):
                outcomes[request_id].refused = error
            case Computed():
                pass
            case ContextDone(request_id, _):
                outcomes[request_id].context_done = True
            case Granted():
                pass
