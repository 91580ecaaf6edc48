"""The thread that steps an engine, and the bridge from asyncio callers to it.

    loop thread(s)                          engine thread                      transceiver thread
    reserve / prefill / submit ──command──▶ run commands, step, dispatch ◀──events── pump
    awaits a future            ◀──result──┘      │ tokens of the step
    frame sink                 ◀─────────────────┘

Callers' answers are futures; tokens go to one sink, a frame per step. When a step raises, the state of its requests
cannot be trusted: all of them end in errors, the worker takes no more, and the reason stays visible.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from kvmanager.ids import RequestId, WorkerEpoch
from transceiver.errors import HandshakeRefused
from transceiver.wire import epochs
from workers.aggregated import AggregatedEngine
from workers.assembly import Assembly, assemble
from workers.config import WorkerConfig
from workers.context import ContextEngine
from workers.engine import Computed, ContextDone, Emitted, Engine, EngineEvent, Granted, PromptHeld, Refused
from workers.errors import EngineFailed, HandshakeFailed, PeerUnknown, WorkerRefused, WorkerStopping
from workers.faults import Fault
from workers.generation import GenerationEngine
from workers.group.ranks import GroupRanks
from workers.request import (
    Admitted,
    Held,
    HoldRequest,
    Prefilled,
    PrefillRequest,
    RequestOutput,
    Reservation,
    ReserveRequest,
    ShipRequest,
    SubmitRequest,
    TokenFrame,
    WorkerFacts,
    WorkerStats,
)
from workers.timeline import Timelines

_log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.05

Answer = TypeVar("Answer")


class EngineHost:
    """Owns the engine thread of one worker process. Methods may be called from any thread or event loop."""

    def __init__(self, assembly: Assembly, num_threads: int) -> None:
        self._assembly = assembly
        self._engine: Engine = assembly.engine
        self.facts: WorkerFacts = assembly.facts
        self.timelines = Timelines()
        self._num_threads = num_threads
        self._commands: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self._futures: dict[RequestId, Future[Any]] = {}
        self._sink: Callable[[TokenFrame], None] | None = None
        self._peers: dict[WorkerEpoch, frozenset[WorkerEpoch]] = {}  # the epochs of each one's ranks
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = threading.Event()
        self._failure: str | None = None
        self._last_progress_s = self._last_turn_s = time.monotonic()
        self._awaited_pages = False  # when the present turn began
        if assembly.port is not None:
            assembly.port.wake_on_event(self._wake)

    @classmethod
    def load(cls, config: WorkerConfig, ranks: GroupRanks | None = None) -> EngineHost:
        """Load the models and build the engine. Slow; raises ModelMismatch for checkpoints that do not fit.

        `ranks`: of the group that this process leads.
        """
        torch.set_num_threads(config.num_threads)
        assembly = assemble(config, ranks=ranks)
        assembly.prepare()
        return cls(assembly, config.num_threads)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the engine thread after its present step; every request still waiting for an answer is refused."""
        self._stopping.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join()
        for future in self._futures.values():
            _settle(future, WorkerStopping("the worker is shutting down"))
        self._futures.clear()
        self._assembly.close()

    def set_frame_sink(self, sink: Callable[[TokenFrame], None]) -> None:
        """`sink` is called from the engine thread with every step's tokens."""
        self._sink = sink

    async def submit(self, request: SubmitRequest) -> None:
        """Queue a whole request on an aggregated worker; its tokens come in frames."""
        engine = self._expect_engine(AggregatedEngine)

        def submit(now_s: float) -> None:
            engine.submit(request)
            self.timelines.asked(request.request_id, now_s)

        await self._ask(None, submit)

    async def reserve(self, request: ReserveRequest) -> Admitted:
        """Wait for admission on a generation worker, at most the request's time to live."""
        engine = self._expect_engine(GenerationEngine)

        def reserve(now_s: float) -> None:
            engine.reserve(request, now_s)
            self.timelines.asked(request.request_id, now_s)

        admitted: Admitted = await self._ask(request.request_id, reserve)
        return admitted

    async def prefill(self, request: PrefillRequest) -> Prefilled:
        """Run a prompt and ship it; returns when the generation worker has acknowledged the hand-off."""
        engine = self._expect_engine(ContextEngine)
        self._expect_peer(request)

        def prefill(now_s: float) -> None:
            engine.prefill(request, now_s)
            self.timelines.asked(request.request_id, now_s, request.reservation.transfer_id)

        prefilled: Prefilled = await self._ask(request.request_id, prefill)
        return prefilled

    async def hold_prompt(self, request: HoldRequest) -> Held:
        """Run a prompt and keep it; returns when it is complete. Whoever stops waiting here gives it up."""
        engine = self._expect_engine(ContextEngine)

        def hold(now_s: float) -> None:
            engine.hold(request, now_s)
            self.timelines.asked(request.request_id, now_s)

        held: Held = await self._ask(request.request_id, hold)
        return held

    async def ship(self, request: ShipRequest) -> Prefilled:
        """Ship a prompt that is held; returns when the generation worker has acknowledged the hand-off."""
        engine = self._expect_engine(ContextEngine)
        self._expect_peer(request)

        def ship(now_s: float) -> None:
            engine.ship(request, now_s)
            self.timelines.asked(request.request_id, now_s)
            self.timelines.granted(request.request_id, request.reservation.transfer_id, now_s)

        prefilled: Prefilled = await self._ask(request.request_id, ship)
        return prefilled

    def cancel(self, request_id: RequestId) -> None:
        """Idempotent; a request that is unknown here changes nothing."""
        self._commands.put(lambda now_s: self._engine.cancel(request_id))

    def connect(self, hello: bytes) -> WorkerEpoch:
        """Shake hands with a peer. Raises HandshakeFailed with both sides' values when they do not fit."""
        port = self._assembly.port
        if port is None:
            raise HandshakeFailed("an aggregated worker has no peers")
        try:
            epoch = port.connect(hello)
        except HandshakeRefused as refused:
            raise HandshakeFailed(str(refused)) from refused
        self._peers[epoch] = epochs(hello)
        return epoch

    def disconnect(self, epoch: WorkerEpoch) -> None:
        """A peer is gone for good: every transfer with it breaks now. Idempotent; a stranger changes nothing."""
        self._peers.pop(epoch, None)
        if self._assembly.port is not None:
            self._assembly.port.disconnect(epoch)

    def inject(self, fault: Fault) -> None:
        """For the evaluation's own workers alone: see workers.faults."""
        self._commands.put(lambda now_s: self._engine.inject(fault))

    def check(self) -> Future[None]:
        """Run every ledger's check in the engine thread; the future carries what it raised."""
        done: Future[None] = Future()

        def command(now_s: float) -> None:
            try:
                self._engine.check()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._commands.put(command)
        return done

    def stats(self) -> WorkerStats:
        """Present figures. Raises EngineFailed once the engine has: a failed worker must not look alive."""
        if self._failure is not None:
            raise EngineFailed(f"the engine failed: {self._failure}")
        engine, usage = self._engine, self._engine.ledger.usage()
        counters, decode, port = engine.counters, engine.decode, self._assembly.port
        now_s = time.monotonic()
        return WorkerStats(
            role=self.facts.role,
            epoch=self.facts.epoch,
            running=engine.num_running,
            waiting=engine.num_waiting,
            slots_in_use=usage.slots_in_use,
            draft_slots_in_use=usage.draft_slots_in_use,
            target_pages_in_use=usage.target_pages_in_use,
            draft_pages_in_use=usage.draft_pages_in_use,
            target_pages=engine.ledger.num_target_pages,
            draft_pages=engine.ledger.num_draft_pages,
            leases=usage.leases,
            transfers=engine.num_transfers,
            quarantined_transfers=engine.num_quarantined,
            decode_steps=decode.decode_steps,
            decode_tokens=decode.decode_tokens,
            prompt_tokens_computed=counters.prompt_tokens_computed,
            kv_bytes_target=counters.kv_bytes_target,
            kv_bytes_draft=counters.kv_bytes_draft,
            transfers_done=counters.transfers_done,
            transfers_failed=counters.transfers_failed,
            requests_finished=counters.requests_finished,
            steps=counters.steps,
            last_progress_age_s=now_s - self._last_progress_s,
            last_turn_age_s=now_s - self._last_turn_s,
            awaits_pages=self._awaited_pages,
            cached_pages=usage.cached_pages,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            preemptions=counters.preemptions,
            prompts_held=counters.prompts_held,
            prompt_leases_expired=counters.prompt_leases_expired,
            transfers_cancelled=counters.transfers_cancelled,
            transfers_expired=counters.transfers_expired,
            drafted_steps=decode.drafted_steps,
            drafted_tokens=decode.drafted_tokens,
            kv_write_s=port.stats().write_s if port is not None else 0.0,
        )

    async def _ask(self, request_id: RequestId | None, command: Callable[[float], None]) -> Any:
        """Run `command` in the engine thread; await its acceptance, or with a request id the engine's own answer."""
        if self._failure is not None:
            raise EngineFailed(f"the engine failed: {self._failure}")
        if self._stopping.is_set():
            raise WorkerStopping("the worker is shutting down")
        future: Future[Any] = Future()
        if request_id is not None:
            self._futures[request_id] = future

        def run(now_s: float) -> None:
            try:
                command(now_s)
            except WorkerRefused as refused:
                self._resolve(request_id, future, refused)
            else:
                if request_id is None:
                    _settle(future, None)

        self._commands.put(run)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if request_id is not None:
                self.cancel(request_id)
            raise

    def _resolve(self, request_id: RequestId | None, future: Future[Any] | None, answer: object) -> None:
        if request_id is not None:
            future = self._futures.pop(request_id, future)
        if future is not None:
            _settle(future, answer)

    def _expect_peer(self, request: PrefillRequest | ShipRequest) -> None:
        epoch = request.reservation.generation_epoch
        if not any(epoch in ranks for ranks in list(self._peers.values())):
            raise PeerUnknown(
                f"no handshake yet with generation worker {epoch}: connect first",
                request_id=request.request_id,
            )

    def _expect_engine(self, kind: type[Answer]) -> Answer:
        if not isinstance(self._engine, kind):
            raise WorkerRefused(f"a {self.facts.role} worker cannot do this")
        return self._engine

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while not self._stopping.is_set():
                self._run_commands()
                # As the turn begins: the step in which pages come back is as young as itself, however long it takes.
                self._awaited_pages = self._engine.awaits_pages
                began_s = self._last_turn_s = time.monotonic()
                try:
                    self._assembly.beat()
                    events = self._engine.step(began_s)
                except Exception as error:
                    _log.exception("the engine failed")
                    self._failure = f"{type(error).__name__}: {error}"
                    self._assembly.failed()
                    events = self._engine.fail_all(self._failure)
                    self._stopping.set()
                self._dispatch(events, began_s)

    def _run_commands(self) -> None:
        """Run what has been asked. An idle engine waits here; a transfer that ends wakes it, and so does the time that
        cleaning up must not wait longer than.
        """
        try:
            if self._engine.idle:
                self._commands.get(timeout=_IDLE_WAIT_S)(time.monotonic())
            # Also of what ends an idle time: the step that begins now is not as old as that was long.
            self._last_progress_s = time.monotonic()
            while True:
                self._commands.get_nowait()(time.monotonic())
        except queue.Empty:
            return

    def _wake(self) -> None:
        self._commands.put(lambda now_s: None)

    def _dispatch(self, events: list[EngineEvent], began_s: float) -> None:
        """Tell what a step did that began at `began_s`."""
        if not events:
            return
        outputs: list[RequestOutput] = []
        now_s, timelines = time.monotonic(), self.timelines
        for event in events:
            match event:
                case Emitted(output):
                    outputs.append(output)
                case Granted(request_id, admitted):
                    if isinstance(admitted, Reservation):
                        timelines.granted(request_id, admitted.transfer_id, now_s)
                    self._resolve(request_id, None, admitted)
                case Computed(request_id, positions):
                    timelines.computed(request_id, positions, began_s, now_s)
                case PromptHeld(request_id, held):
                    timelines.over(request_id, "held", now_s)
                    self._resolve(request_id, None, held)
                case ContextDone(request_id, prefilled):
                    timelines.over(request_id, "shipped", now_s)
                    self._resolve(request_id, None, prefilled)
                case Refused(request_id, error):
                    timelines.over(request_id, error.message, now_s)
                    self._resolve(request_id, None, error)
        if outputs and self._sink is not None:
            self._sink(TokenFrame(tuple(outputs)))
        timelines.stepped(outputs, now_s)  # behind the sink: no token waits for it


def _settle(future: Future[Any], answer: object) -> None:
    """Give a future its answer unless its caller went away meanwhile."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
