"""The gateway: the life of every request, from a client's words to the last token. No sockets of its own.

    generate ── check, tokenize ──▶ route ──▶ reserve at G ──▶ prefill at C ─┐          (split)
                                      └─────▶ submit ────────────────────────┤          (aggregated)
    client ◀── chunks ── assemble ◀── outputs by request ◀── frames of links ┘

A prompt can be computed before anybody asks for its answer: `hold` leaves it on a context worker, and `generate` with
what `hold` returned ships it from there.

One task per request walks the legs; the tokens come through the link of the decoding worker, whichever leg is still
open. When a worker fails, what was emitted becomes part of the prompt and the legs are walked again (`cluster.replay`).
A request ends in exactly one way: its end, or a `RequestError`. However it ends, every worker that may still
hold something of it is told so. Between gateway and workers a request goes by an id of the gateway's own making,
so that clients may choose any id, even the same one twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.affinity import Affinity, Beginning, beginning_of
from cluster.alarm import AcceptanceWatch
from cluster.answers import (
    AnswerEnd,
    AnswerEvent,
    AnswerRequest,
    HeldPrompt,
    ModelLimits,
    PromptReady,
    Route,
    Usage,
)
from cluster.assemble import Assembler
from cluster.errors import (
    ClusterFull,
    DeadlineOver,
    GatewayStopping,
    NoWorkerReady,
    RequestError,
    UnknownWorker,
    WorkerLost,
    from_worker,
)
from cluster.figures import GatewayFigures, log_request
from cluster.holding import Holds
from cluster.intake import Intake, Tokenizer
from cluster.link import LinkState, LinkTimes, WorkerAddress, WorkerLink
from cluster.live import LiveRequest
from cluster.membership import LinkNews, Membership, facts_of
from cluster.readiness import Progress, stalled, stood_still_s
from cluster.recall import recall
from cluster.record import RequestRecord
from cluster.replay import Runs
from cluster.routing import ANY_ERRAND, Errand, NoRoute, WithoutContext, choose
from cluster.timeline import MAX_RECORDS, Timeline
from cluster.tracing import NoTracing, Tracing, traceparent_of
from cluster.worker_client import WorkerUnreachable
from kvmanager.ids import RequestId, WorkerEpoch
from workers.errors import EngineFailed, NotHeld, PeerUnknown, TransferBroke, WorkerRefused
from workers.request import (
    ComputedHere,
    HoldRequest,
    PrefillRequest,
    ReserveRequest,
    Role,
    ShipRequest,
    SubmitRequest,
    TokenFrame,
    WorkerFacts,
)

_log = logging.getLogger(__name__)

LAST_FIGURES_WAIT_S = 2.0
CANCEL_TIMEOUT_S = 5.0
STOP_WAIT_S = 1.0
RETRY_AFTER_S = 1.0
REPLAY_POLL_S = 0.1
MIN_ALARM_STEPS = 50  # fewer decode steps say little of a mean


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """`route` serves requests that name none. `admission_ttl_s` bounds the wait for room on the workers.

    A worker that runs requests and makes no progress for `stall_limit_s` makes the gateway unready. One whose
    acceptance length over `al_window_s` falls under `min_al` raises the alarm. An answer is good when its first token
    came within `slo_ttft_s` and the others took at most `slo_itl_s` each. A request whose workers fail runs again on
    others, at most `max_replays` times, and waits for one at most `replay_wait_s` each time. A generation worker
    computes a prompt itself when at most `local_prefill_tokens` of it are not in its prefix cache, and any prompt when
    there is no context worker and `without_context` is "local"; otherwise such requests are refused.
    """

    route: Route = "split"
    local_prefill_tokens: int = 0
    without_context: WithoutContext = "refuse"
    max_live_requests: int = 1024
    admission_ttl_s: float = 120.0
    max_replays: int = 3
    replay_wait_s: float = 0.0
    stall_limit_s: float = 30.0
    min_al: float = 0.0
    al_window_s: float = 60.0
    slo_ttft_s: float = 2.0
    slo_itl_s: float = 0.1
    times: LinkTimes = field(default_factory=LinkTimes)


@dataclass(frozen=True)
class _Asked:
    """What all runs of a request have in common; times on the event loop's clock. `held` is for the first of them."""

    route: Route
    salt: str
    beginning: Beginning
    deadline_s: float | None
    since_s: float
    held: HeldPrompt | None = None


class Gateway:
    """Start it on the event loop that will call it. `new_id` and `new_seed` are its only sources of chance."""

    def __init__(
        self,
        workers: Sequence[WorkerAddress],
        tokenizer: Tokenizer,
        settings: GatewaySettings,
        *,
        new_id: Callable[[], str],
        new_seed: Callable[[], int],
        tracing: Tracing | None = None,
    ) -> None:
        self.settings = settings
        self.figures = GatewayFigures(settings.slo_ttft_s, settings.slo_itl_s)
        self.acceptance = AcceptanceWatch(settings.min_al, settings.al_window_s, MIN_ALARM_STEPS)
        self.started_s = time.monotonic()
        self.tokenizer = tokenizer
        self._intake = Intake(tokenizer, new_seed)
        self._affinity = Affinity()
        self._new_id = new_id
        self._membership = Membership(
            workers,
            new_id(),
            settings.times,
            LinkNews(frame=self._on_frame, lost=self._on_lost, figures=self._on_figures),
        )
        self._live: dict[RequestId, LiveRequest] = {}
        self._records: deque[RequestRecord] = deque(maxlen=MAX_RECORDS)  # latest last
        self._tracing = tracing if tracing is not None else NoTracing()
        self._holds = Holds()
        self._limits: dict[tuple[Role, ...], tuple[list[WorkerFacts], ModelLimits]] = {}  # as last asked
        self._num_admitted = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._retiring: set[RequestId] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def num_live(self) -> int:
        """Requests accepted and not over."""
        return self._num_admitted

    @property
    def links(self) -> list[WorkerLink]:
        return list(self._membership.links.values())

    @property
    def paired(self) -> frozenset[tuple[WorkerEpoch, WorkerEpoch]]:
        """(context epoch, generation epoch) of workers that have been introduced to each other."""
        return self._membership.paired

    def peers(self) -> dict[str, list[str]]:
        """By name of a worker that is attached, names of those that it has been introduced to and that are too."""
        names = {
            link.facts.epoch: link.worker.name
            for link in self.links
            if link.facts is not None and link.state is LinkState.READY
        }
        found: dict[str, list[str]] = {name: [] for name in names.values()}
        for pair in self.paired:
            one, other = (names.get(epoch) for epoch in pair)
            if one is not None and other is not None:
                found[one].append(other)
                found[other].append(one)
        return {name: sorted(each) for name, each in found.items()}

    @property
    def ready(self) -> bool:
        """Whether an ordinary request sent now would be served."""
        return not self.troubles()

    def troubles(self) -> list[str]:
        """Why an ordinary request sent now would not be served, in sentences; empty when it would."""
        if self._stopping:
            return ["the gateway is shutting down"]
        try:
            self._choose(self.settings.route)
        except NoWorkerReady as error:
            return [error.message, *self.stalls()]
        return self.stalls()

    def stalls(self) -> list[str]:
        """A sentence for every worker that runs requests without progress."""
        now_s = time.monotonic()
        progress = [
            Progress(
                name=link.worker.name,
                running=link.stats.running,
                age_s=stood_still_s(link.stats) + now_s - link.stats_taken_s,
            )
            for link in self.links
            if link.state is LinkState.READY and link.stats is not None
        ]
        return stalled(progress, self.settings.stall_limit_s)

    async def start(self, timeout_s: float) -> None:
        """Attach to every worker and introduce them to each other. Raises NotReady."""
        self.begin()
        await self._membership.wait_ready(timeout_s)

    def begin(self) -> None:
        """Attach to whoever answers; `ready` tells when that is enough."""
        self._membership.start()

    def assign(self, workers: Sequence[WorkerAddress]) -> None:
        """These are the workers from now on; requests of those that are gone run again on others."""
        self._membership.assign(workers)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let the live ones finish for `drain_s`, end the rest."""
        self._stopping = True
        await self._wait_empty(drain_s)
        for live in self._live.values():
            live.fail(GatewayStopping("the gateway is shutting down", request_id=live.client_id))
        await self._wait_empty(STOP_WAIT_S)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_WAIT_S)
        await self._membership.close()
        await asyncio.to_thread(self._tracing.close)

    def limits(self, route: Route | None = None) -> ModelLimits:
        """What requests are checked against: the tightest of the route's workers. Raises NoWorkerReady."""
        roles = _roles(route or self.settings.route)
        links = self._membership.links.values()
        facts = facts_of(link for link in links if link.worker.role in roles)
        known = self._limits.get(roles)
        if known is not None and known[0] == facts:
            return known[1]
        decoding = [fact for fact in facts if fact.role != "context"]
        if not decoding:
            raise NoWorkerReady("no worker has joined yet", retry_after_s=RETRY_AFTER_S)
        limits = ModelLimits(
            model=decoding[0].model,
            vocab_size=min(fact.vocab_size for fact in facts),
            max_seq_len=min(fact.max_seq_len for fact in facts),
            max_draft_tokens=min(fact.max_draft_tokens for fact in decoding),
            eos_token_ids=decoding[0].eos_token_ids,
            dtype=decoding[0].dtype,
        )
        self._limits[roles] = (facts, limits)
        return limits

    def named(self, request: AnswerRequest) -> AnswerRequest:
        """The request with an id that `cancel` knows it by; one that the client chose stays."""
        return request if request.client_id else replace(request, client_id=self._new_id())

    def cancel(self, client_id: str) -> int:
        """End all live requests of this client id; returns how many. Unknown ids are no error."""
        found = [live for live in self._live.values() if live.client_id == client_id]
        for live in found:
            live.cancel()
        return len(found)

    async def drain(self, worker: str, draining: bool) -> WorkerLink:
        """Have a worker sent no new requests, by any gateway, or take it back. Raises RequestError."""
        link = self._membership.links.get(worker)
        if link is None:
            known = ", ".join(self._membership.links)
            raise UnknownWorker(f"there is no worker {worker!r}; there are {known}", field="worker")
        if link.facts is None:
            raise NoWorkerReady(f"worker {worker} has not joined yet", retry_after_s=RETRY_AFTER_S)
        changes = link.draining != draining
        try:
            await link.drain(draining)
        except (WorkerUnreachable, WorkerRefused) as error:
            raise NoWorkerReady(
                f"worker {worker} does not answer: {error}", retry_after_s=RETRY_AFTER_S
            ) from error
        if changes:
            _log.warning("worker %s is %s", worker, "draining" if draining else "taken back")
        return link

    async def timeline(self, request_id: str) -> Timeline:
        """What is known of a request of this id, a client's or ours; of the latest one when it is empty.

        Raises UnknownRequest.
        """
        return await recall(request_id, self._records, self._membership.links)

    async def refresh(self) -> None:
        """Take every attached worker's figures now; one that does not answer keeps its old ones."""
        ready = [link for link in self.links if link.state is LinkState.READY]
        results = await asyncio.gather(*(link.refresh() for link in ready), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(
                result, WorkerUnreachable | WorkerRefused
            ):
                raise result

    async def hold(self, request: AnswerRequest, lease_s: float) -> PromptReady:
        """Compute the prompt, and keep its KV for `lease_s` for a `generate` to come. Raises RequestError.

        A context worker that fails is replaced by another, at most `max_replays` times.
        """
        since_s, avoid = asyncio.get_running_loop().time(), frozenset[str]()
        with self._admission():
            prompt, sampling = await self._intake.take(request, self.limits("split"))
            beginning = beginning_of(prompt, request.cache_salt, request.conversation_id)
            while True:
                errand = self._affinity.errand(beginning, self._epochs(), avoid=avoid)
                link = self._choose("split", errand, without_context="refuse")[1]
                work = HoldRequest(
                    request_id=RequestId(self._new_id()),
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    ttl_s=self._ttl_s(since_s + self.settings.admission_ttl_s),
                    lease_s=lease_s,
                    cache_salt=request.cache_salt,
                )
                try:
                    held = await self._holds.ask(link, work)
                except (WorkerRefused, WorkerUnreachable) as refused:
                    if isinstance(refused, WorkerUnreachable):
                        link.doubt()
                    error = from_worker(refused, request.client_id)
                    if not error.replayable or len(avoid) >= self.settings.max_replays:
                        raise error from refused
                    avoid |= {link.worker.name}
                    continue
                assert link.facts is not None
                return PromptReady(
                    held=HeldPrompt(link.worker.name, link.facts.epoch, work.request_id),
                    seed=sampling.seed,
                    first_token=held.first_token,
                    prompt_tokens=len(prompt),
                    cached_prompt_tokens=len(prompt) - held.prompt_tokens_computed,
                )

    def give_up(self, held: HeldPrompt) -> None:
        """Nobody will ask for it: its context worker need not wait for the end of the lease. Idempotent."""
        link = self._membership.links.get(held.worker)
        if link is not None:
            self._spawn(self._cancel_stray(link, held.held_id))

    async def generate(
        self,
        request: AnswerRequest,
        *,
        route: Route | None = None,
        timeout_s: float | None = None,
        held: HeldPrompt | None = None,
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Chunks, then one AnswerEnd; or a RequestError. Close the iterator to end the request early.

        `held` spares the prompt's computation. What is no longer held is computed as if it had never been.
        """
        started_s = time.monotonic()
        deadline_s = asyncio.get_running_loop().time() + timeout_s if timeout_s is not None else None
        route = route or self.settings.route
        trace = self._tracing.begin(traceparent_of(request.traceparent))
        record = RequestRecord(request.client_id, route, started_s, trace)
        try:
            with self._admission():
                prompt_token_ids, sampling = await self._intake.take(request, self.limits(route))
                self._records.append(record)
                runs = Runs(prompt_token_ids, sampling, self.settings.max_replays)
                asked = _Asked(
                    route=route,
                    salt=request.cache_salt,
                    beginning=beginning_of(prompt_token_ids, request.cache_salt, request.conversation_id),
                    deadline_s=deadline_s,
                    since_s=asyncio.get_running_loop().time(),
                    held=held,
                )
                assembler = Assembler(
                    self.tokenizer.decode, request.stop, sampling.max_tokens, sampling.min_tokens
                )
                while assembler.reason is None:
                    live = LiveRequest(RequestId(self._new_id()), request.client_id, record)
                    self._begin(live, runs, asked)
                    try:
                        async for chunk in self._chunks(live, runs, assembler, deadline_s):
                            self.figures.chunk(record, time.monotonic())
                            yield chunk
                    except RequestError as error:
                        live.run.error = error.message
                        runs.broke(error, live.blamed)
                        self.figures.replayed(error.reason)
                        _log.warning("a request runs again: %s", error.message, extra=record.ids())
                        assembler.resume()
                    finally:
                        self._finish(live, assembler)
                now_s = time.monotonic()
                record.usage = Usage(
                    prompt_tokens=len(prompt_token_ids),
                    output_tokens=assembler.num_tokens,
                    stats=runs.stats,
                    time_to_first_token_s=(record.first_chunk_s or now_s) - started_s,
                    total_time_s=now_s - started_s,
                )
                record.outcome = assembler.reason
                said = beginning_of(runs.token_ids, request.cache_salt, request.conversation_id)
                self._remember(record, asked.beginning, said)
                yield AnswerEnd(assembler.reason, record.usage, assembler.tail, assembler.stop)
        except RequestError as error:
            record.outcome, record.error = error.code.lower(), error.message
            error.request_id = error.request_id or request.client_id
            raise
        except Exception as error:
            record.outcome, record.error = "internal", repr(error)
            raise
        finally:
            self.figures.ended(record, time.monotonic())
            log_request(record)
            trace.ended(record)

    @contextlib.contextmanager
    def _admission(self) -> Iterator[None]:
        if self._stopping:
            raise GatewayStopping("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        if self._num_admitted >= self.settings.max_live_requests:
            raise ClusterFull(
                f"{self._num_admitted} requests are live; at most {self.settings.max_live_requests} may be",
                limit=self.settings.max_live_requests,
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_admitted += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_admitted -= 1
            if self._num_admitted == 0:
                self._empty.set()

    async def _wait_empty(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()

    def _begin(self, live: LiveRequest, runs: Runs, asked: _Asked) -> None:
        self._live[live.request_id] = live
        live.legs = asyncio.create_task(self._walk_legs(live, runs, asked))
        live.legs.add_done_callback(live.legs_ended)

    def _finish(self, live: LiveRequest, assembler: Assembler) -> None:
        """The run is over for whoever reads the answer. `_retire` is about what workers still hold of it."""
        del self._live[live.request_id]
        live.run.end(time.monotonic())
        ended_well = assembler.worker_done and assembler.reason is not None
        if ended_well and live.legs is not None and live.legs.done():
            live.let_go_of_all()
            return
        self._spawn(self._retire(live, ended_well))

    def _choose(
        self,
        route: Route,
        errand: Errand = ANY_ERRAND,
        held: HeldPrompt | None = None,
        without_context: WithoutContext | None = None,
    ) -> list[WorkerLink]:
        """The links of the route, the decoding worker first. Raises NoWorkerReady.

        With `held` the context worker is its holder, which may be draining.
        """
        snapshots = self._membership.snapshots()
        if held is not None:
            snapshots = [
                replace(worker, draining=worker.draining and worker.role != "context")
                for worker in snapshots
                if worker.role != "context" or (worker.name, worker.epoch) == (held.worker, held.epoch)
            ]
        try:
            names = choose(
                route,
                snapshots,
                self._membership.paired,
                errand,
                without_context=without_context or self.settings.without_context,
            )
        except NoRoute as error:
            reasons = [str(error), *(self._membership.misfits if route == "split" else ())]
            raise NoWorkerReady("; ".join(reasons), retry_after_s=RETRY_AFTER_S) from error
        return [self._membership.links[name] for name in names]

    async def _walk_legs(self, live: LiveRequest, runs: Runs, asked: _Asked) -> None:
        """Bring the request to the worker that will decode it; failures end the run."""
        run, called = runs.run, None
        prompt, sampling = run.prompt_token_ids, run.sampling
        try:
            errand = self._affinity.errand(
                asked.beginning,
                self._epochs(),
                num_tokens=len(prompt) + sampling.max_tokens,
                avoid=runs.avoid,
            )
            held = None if run.again else asked.held
            try:
                links = self._choose(asked.route, errand, held, "refuse" if held is not None else None)
            except NoWorkerReady:
                if held is None and not run.again:
                    raise
                held, links = None, await self._choose_in_time(asked, errand, run.again)
            decoding, *contexts = links
            live.record.workers = tuple(link.worker.name for link in links)
            live.record.path = asked.route if asked.route == "aggregated" else "shipped"
            live.hold(decoding)
            called = decoding
            if asked.route == "aggregated":
                await decoding.client.submit(
                    SubmitRequest(
                        request_id=live.request_id,
                        prompt_token_ids=prompt,
                        sampling=sampling,
                        cache_salt=asked.salt,
                    )
                )
                return
            ttl_s = self._ttl_s(asked.deadline_s)
            facts = contexts[0].facts if contexts else None
            admitted = await decoding.client.reserve(
                ReserveRequest(
                    request_id=live.request_id,
                    num_prompt_tokens=len(prompt),
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    ttl_s=ttl_s,
                    cache_salt=asked.salt,
                    position_multiple=facts.page_size if facts is not None else 1,
                    age_s=asyncio.get_running_loop().time() - asked.since_s if run.again else 0.0,
                    local_prefill_tokens=self._local_prefill_tokens(len(prompt), contexts, held),
                )
            )
            if isinstance(admitted, ComputedHere):
                live.record.path = "local"
                live.record.workers = (decoding.worker.name,)
                return
            live.run.transfer_id = admitted.transfer_id
            called = contexts[0]
            live.hold(called)
            ttl_s = self._ttl_s(asked.deadline_s)  # waiting for the reservation has used some of it
            shipped = held is not None and await self._ship(
                called,
                ShipRequest(
                    request_id=live.request_id,
                    held_id=held.held_id,
                    num_prompt_tokens=len(prompt),
                    reservation=admitted,
                    ttl_s=ttl_s,
                ),
            )
            if not shipped:
                await called.client.prefill(
                    PrefillRequest(
                        request_id=live.request_id,
                        prompt_token_ids=prompt,
                        sampling=sampling,
                        reservation=admitted,
                        ttl_s=ttl_s,
                        cache_salt=asked.salt,
                    )
                )
            live.let_go(called)
        except (RequestError, WorkerRefused, WorkerUnreachable) as error:
            if called is not None and isinstance(error, WorkerUnreachable | EngineFailed):
                called.doubt()
            if isinstance(error, PeerUnknown):
                self._membership.introduce_again(*live.record.workers)
            if not live.landed:
                # Either side may have broken a transfer; else it was the worker that was asked.
                either = called is None or isinstance(error, TransferBroke)
                blamed = live.record.workers if either or called is None else (called.worker.name,)
                live.fail(from_worker(error, live.client_id), *blamed)

    async def _choose_in_time(self, asked: _Asked, errand: Errand, again: bool) -> list[WorkerLink]:
        """A route for what has begun already: whoever reads it cannot ask for its rest, so it waits for a worker."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + min(
            self.settings.replay_wait_s if again else 0.0, self._ttl_s(asked.deadline_s)
        )
        while True:
            try:
                return self._choose(asked.route, errand)
            except NoWorkerReady:
                if loop.time() >= until_s:
                    raise
            await asyncio.sleep(REPLAY_POLL_S)

    def _local_prefill_tokens(
        self, num_prompt_tokens: int, contexts: list[WorkerLink], held: HeldPrompt | None
    ) -> int:
        if not contexts:
            return num_prompt_tokens
        return self.settings.local_prefill_tokens if held is None else 0

    async def _ship(self, link: WorkerLink, work: ShipRequest) -> bool:
        """Ship what the worker holds; False when it holds it no longer. Raises as any call to a worker."""
        try:
            await link.client.ship(work)
        except NotHeld as gone:
            ids = {"internal_id": work.request_id, "transfer_id": work.reservation.transfer_id}
            _log.warning("%s; the prompt is computed again", gone, extra=ids)
            return False
        return True

    def _epochs(self) -> dict[str, WorkerEpoch]:
        links = self._membership.links.items()
        return {name: link.facts.epoch for name, link in links if link.facts is not None}

    def _remember(self, record: RequestRecord, prompt: Beginning, said: Beginning) -> None:
        """What the workers of the answer have from now on: the context worker its prompt, the other one all of it."""
        for name in record.workers:
            link = self._membership.links.get(name)
            if link is None or link.facts is None or link.stats is None:
                continue
            pool_tokens = link.stats.target_pages * link.facts.page_size
            if link.worker.role == "context":
                self._affinity.computed(name, link.facts.epoch, prompt, pool_tokens)
            else:
                self._affinity.computed(name, link.facts.epoch, said, pool_tokens)
                self._affinity.decoded(name, link.facts.epoch, said)
        self._affinity.retain(self._membership.links)

    def _ttl_s(self, deadline_s: float | None) -> float:
        """What a leg may take: deadlines do not cross a process, remaining seconds do."""
        ttl_s = self.settings.admission_ttl_s
        if deadline_s is None:
            return ttl_s
        return max(0.0, min(ttl_s, deadline_s - asyncio.get_running_loop().time()))

    async def _chunks(
        self, live: LiveRequest, runs: Runs, assembler: Assembler, deadline_s: float | None
    ) -> AsyncIterator[AnswerEvent]:
        """Chunks until the answer has its reason and, if it comes in time, the worker's figures."""
        while assembler.reason is None:
            try:
                outputs = await live.outputs(deadline_s)
            except TimeoutError:
                raise DeadlineOver("the request's deadline passed", request_id=live.client_id) from None
            runs.note(outputs)
            chunk = assembler.feed(outputs)
            if chunk is not None:
                yield chunk
            if assembler.reason is None and live.cancel_asked:
                assembler.cancel()
            if assembler.reason is None and assembler.failure is not None:
                live.blamed = live.record.workers
                raise assembler.failure
            if assembler.reason is None and live.failure is not None:
                raise live.failure
        if assembler.worker_done:
            return
        # The answer ended before its worker did: a stop string, or Cancel. Stop the worker and ask what it took.
        self._spawn(self._tell_holders(live))
        until_s = asyncio.get_running_loop().time() + LAST_FIGURES_WAIT_S
        while not assembler.worker_done and live.failure is None:
            try:
                outputs = await live.outputs(until_s)
            except TimeoutError:
                return
            runs.note(outputs)
            assembler.feed(outputs)

    async def _retire(self, live: LiveRequest, ended_well: bool) -> None:
        """Nobody waits for the run any more: end what is still open of it, on whichever worker."""
        legs = live.legs
        if legs is None:
            return
        if ended_well and not legs.done():
            # The decoding worker is through and the context worker's last word is on its way.
            await asyncio.wait({legs}, timeout=LAST_FIGURES_WAIT_S)
        if not ended_well or not legs.done():
            legs.cancel()
            self._retiring.add(live.request_id)
            await self._tell_holders(live)
            self._retiring.discard(live.request_id)
        await asyncio.gather(legs, return_exceptions=True)
        live.let_go_of_all()

    async def _tell_holders(self, live: LiveRequest) -> None:
        """Cancel at every worker that may hold the request. One that does not answer is gone, or soon suspect."""
        calls = [link.client.cancel(live.request_id, CANCEL_TIMEOUT_S) for link in live.holders]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(
                result, WorkerUnreachable | WorkerRefused
            ):
                raise result

    def _on_frame(self, link: WorkerLink, frame: TokenFrame) -> None:
        for output in frame.outputs:
            live = self._live.get(output.request_id)
            if live is not None:
                live.put(output)
            elif output.finish_reason is None and output.request_id not in self._retiring:
                # A cancel that overtook its request: the worker computes for nobody.
                self._spawn(self._cancel_stray(link, output.request_id))

    def _on_figures(self, link: WorkerLink) -> None:
        stats, name = link.stats, link.worker.name
        if stats is None or link.worker.role == "context":
            return
        change = self.acceptance.note(
            name, stats.epoch, link.stats_taken_s, stats.drafted_steps, stats.drafted_tokens
        )
        if change is None:
            return
        said = {
            "worker": name,
            "acceptance_length": self.acceptance.recent(name),
            "min_al": self.acceptance.min_al,
        }
        if change == "fell":
            _log.warning("acceptance length fell under min_al", extra=said)
        else:
            _log.warning("acceptance length is back at min_al or above", extra=said)

    def _on_lost(self, link: WorkerLink, why: str) -> None:
        for request_id in list(link.live):
            live = self._live.get(request_id)
            if live is None:
                self._holds.lost(request_id, why)
            elif not (live.landed and link.worker.role == "context"):
                lost = WorkerLost(f"worker {link.worker.name} was lost: {why}", request_id=live.client_id)
                live.fail(lost, link.worker.name)

    async def _cancel_stray(self, link: WorkerLink, request_id: RequestId) -> None:
        self._retiring.add(request_id)
        with contextlib.suppress(WorkerUnreachable, WorkerRefused):
            await link.client.cancel(request_id, CANCEL_TIMEOUT_S)
        self._retiring.discard(request_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _roles(route: Route) -> tuple[Role, ...]:
    return ("context", "generation") if route == "split" else ("aggregated",)
