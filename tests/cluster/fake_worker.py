"""A worker whose answers can be worked out by hand, behind the real worker server.

Token ids are bytes, so every text is its own token list. The answer to a prompt is the prompt again and again: output
token i is prompt[i % len(prompt)]. Byte 0 is the end-of-sequence token. A step emits `tokens_per_step` tokens of every
request, so a decode step is as wide as an accepted draft block.

A host that `continues` chooses tokens as a model does: by what stands before them, their position and the seed. Then
the answer to a prompt and the beginning of its answer is the rest of that answer.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvmanager.ids import PageId, RequestId, TransferId, WorkerEpoch
from workers.config import WorkerConfig
from workers.errors import (
    HandshakeFailed,
    ModelMismatch,
    NotHeld,
    PeerUnknown,
    RequestCancelled,
    WorkerRefused,
)
from workers.request import (
    Admitted,
    ComputedHere,
    Held,
    HoldRequest,
    Prefilled,
    PrefillRequest,
    RequestOutput,
    RequestStats,
    Reservation,
    ReserveRequest,
    Role,
    SamplingParams,
    ShipRequest,
    SubmitRequest,
    TokenFrame,
    TokenLogprob,
    WorkerFacts,
    WorkerStats,
)
from workers.timeline import Timelines

EOS = 0
VOCAB_SIZE = 256
MAX_SEQ_LEN = 64
BYTES_PER_TOKEN = 10


class ByteTokenizer:
    """Token ids are UTF-8 bytes; a chat is its contents joined."""

    path = Path("/no/such/tokenizer")

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": b"{}"}

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(message["content"] for message in messages))


@dataclass
class _Job:
    prompt: tuple[int, ...]
    sampling: SamplingParams
    emitted: int = 0
    steps: int = 0
    decode_tokens: int = 0
    landed: bool = True
    salt: str = ""
    last: int = 0


@dataclass
class FakeHost:
    """Implements the host protocol. Tests reach in: `hold` stops decoding, `refusal` is raised by the next call."""

    role: Role = "aggregated"
    peers: dict[WorkerEpoch, FakeHost] = field(default_factory=dict)  # shared by the hosts of a test
    tokens_per_step: int = 2
    max_seq_len: int = MAX_SEQ_LEN
    refusal: WorkerRefused | None = None
    prefill_refusal: WorkerRefused | None = None
    refuse_hello: str = ""
    version: str = "1"  # hosts of different ones refuse each other
    error_after: int | None = None  # tokens after which a request ends in an error
    preempt_after: int | None = None  # tokens after which it loses its pages
    continues: bool = False
    step_s: float = 0.001
    stats_change: dict[str, Any] = field(default_factory=dict)  # figures that `stats` reports instead

    def __post_init__(self) -> None:
        self.timelines = Timelines()
        self.epoch = WorkerEpoch(uuid.uuid4().hex)
        self.peers[self.epoch] = self
        self.facts = WorkerFacts(
            role=self.role,
            epoch=self.epoch,
            model="fake",
            vocab_size=VOCAB_SIZE,
            max_seq_len=self.max_seq_len,
            max_batch=8,
            max_draft_tokens=7,
            eos_token_ids=(EOS,),
            dtype="float32",
            page_size=16,
            kv_bytes_per_token_target=BYTES_PER_TOKEN,
            kv_bytes_per_token_draft=1,
            transport="loopback",
            hello=f"{self.version}/{self.epoch}".encode(),
        )
        self.hold = threading.Event()
        self.jobs: dict[RequestId, _Job] = {}
        self.seen: list[RequestId] = []
        self.samplings: list[SamplingParams] = []
        self.salts: list[str] = []
        self.prefilled: list[PrefillRequest] = []
        self.reserved: list[ReserveRequest] = []
        self.held: dict[RequestId, HoldRequest] = {}
        self.shipped: list[ShipRequest] = []
        self.cancelled: list[RequestId] = []
        self.connected: set[WorkerEpoch] = set()
        self.disconnected: set[WorkerEpoch] = set()
        self.running = False
        self._sink: Callable[[TokenFrame], None] | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @classmethod
    def load(cls, config: WorkerConfig) -> FakeHost:
        return cls(role=config.role)

    def start(self) -> None:
        self.running = True
        self._thread.start()

    def stop(self) -> None:
        self.running = False
        if self._thread.is_alive():
            self._thread.join()

    def set_frame_sink(self, sink: Callable[[TokenFrame], None]) -> None:
        self._sink = sink

    async def submit(self, request: SubmitRequest) -> None:
        self._refuse()
        self._add(
            request.request_id, request.prompt_token_ids, request.sampling, request.cache_salt, landed=True
        )

    async def reserve(self, request: ReserveRequest) -> Admitted:
        self._refuse()
        self.reserved.append(request)
        if len(request.prompt_token_ids) <= request.local_prefill_tokens:
            prompt, salt = request.prompt_token_ids, request.cache_salt
            self._add(request.request_id, prompt, request.sampling, salt, landed=True)
            return ComputedHere()
        self._add(request.request_id, (), request.sampling, request.cache_salt, landed=False)
        self.timelines.granted(request.request_id, TransferId(request.request_id), time.monotonic())
        pages = (PageId(1),)
        return Reservation(
            transfer_id=TransferId(request.request_id),
            generation_epoch=self.epoch,
            target_pages=pages,
            draft_pages=pages,
        )

    async def prefill(self, request: PrefillRequest) -> Prefilled:
        if request.reservation.generation_epoch not in self.connected:
            raise PeerUnknown("connect first")
        if self.prefill_refusal is not None:
            raise self.prefill_refusal
        began_s, transfer = time.monotonic(), request.reservation.transfer_id
        self.timelines.asked(request.request_id, began_s, transfer)
        self.seen.append(request.request_id)
        self.prefilled.append(request)
        self.salts.append(request.cache_salt)
        while self.hold.is_set():
            await asyncio.sleep(0.002)
            if request.request_id in self.cancelled:
                raise RequestCancelled("cancelled on the context worker")
        peer = self.peers[request.reservation.generation_epoch]
        peer.land(request.request_id, request.prompt_token_ids)
        positions = range(len(request.prompt_token_ids))
        self.timelines.computed(request.request_id, positions, began_s, time.monotonic())
        self.timelines.over(request.request_id, "shipped", time.monotonic())
        return Prefilled(
            first_token=request.prompt_token_ids[0], prompt_tokens_computed=len(request.prompt_token_ids)
        )

    async def hold_prompt(self, request: HoldRequest) -> Held:
        self.seen.append(request.request_id)
        self.samplings.append(request.sampling)
        try:
            while self.hold.is_set():
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.cancel(request.request_id)
            raise
        self._refuse()
        if request.lease_s > 0:
            self.held[request.request_id] = request
        return Held(
            first_token=request.prompt_token_ids[0], prompt_tokens_computed=len(request.prompt_token_ids)
        )

    async def ship(self, request: ShipRequest) -> Prefilled:
        held = self.held.pop(request.held_id, None)
        if held is None:
            raise NotHeld(f"no prompt is held under {request.held_id}")
        self.shipped.append(request)
        self.peers[request.reservation.generation_epoch].land(request.request_id, held.prompt_token_ids)
        return Prefilled(
            first_token=held.prompt_token_ids[0], prompt_tokens_computed=len(held.prompt_token_ids)
        )

    def land(self, request_id: RequestId, prompt: tuple[int, ...]) -> None:
        def command() -> None:
            job = self.jobs.get(request_id)
            if job is not None:
                job.prompt, job.landed = prompt, True

        self._commands.put(command)

    def cancel(self, request_id: RequestId) -> None:
        self.cancelled.append(request_id)
        self.held.pop(request_id, None)
        self._commands.put(lambda: self._cancel(request_id))

    def connect(self, hello: bytes) -> WorkerEpoch:
        if self.refuse_hello:
            raise HandshakeFailed(self.refuse_hello)
        version, _, name = hello.decode().partition("/")
        if version != self.version:
            raise HandshakeFailed(f"protocol version {self.version} here, {version} there")
        epoch = WorkerEpoch(name)
        self.connected.add(epoch)
        return epoch

    def disconnect(self, epoch: WorkerEpoch) -> None:
        self.disconnected.add(epoch)

    def stats(self) -> WorkerStats:
        stats = WorkerStats(
            role=self.role,
            epoch=self.epoch,
            running=len(self.jobs),
            waiting=0,
            slots_in_use=len(self.jobs),
            draft_slots_in_use=len(self.jobs),
            target_pages_in_use=len(self.jobs),
            draft_pages_in_use=len(self.jobs),
            target_pages=100,
            draft_pages=100,
            leases=0,
            transfers=0,
            decode_steps=0,
            decode_tokens=0,
            prompt_tokens_computed=0,
            kv_bytes_target=0,
            kv_bytes_draft=0,
            transfers_done=0,
            transfers_failed=0,
            requests_finished=0,
            steps=0,
            last_progress_age_s=0.0,
        )
        return msgspec.structs.replace(stats, **self.stats_change)

    def _refuse(self) -> None:
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal

    def _add(
        self,
        request_id: RequestId,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        salt: str,
        *,
        landed: bool,
    ) -> None:
        self.timelines.asked(request_id, time.monotonic())
        self.seen.append(request_id)
        self.salts.append(salt)
        self.samplings.append(sampling)
        job = _Job(prompt, sampling, landed=landed, salt=salt)
        self._commands.put(lambda: self.jobs.__setitem__(request_id, job))

    def _run(self) -> None:
        while self.running:
            while not self._commands.empty():
                self._commands.get()()
            outputs = [] if self.hold.is_set() else self._step()
            if outputs and self._sink is not None:
                self._sink(TokenFrame(tuple(outputs)))
            self.timelines.stepped(outputs, time.monotonic())
            time.sleep(self.step_s)

    def _step(self) -> list[RequestOutput]:
        outputs = []
        for request_id, job in list(self.jobs.items()):
            if not job.landed:
                continue
            output = self._advance(request_id, job)
            if output.finish_reason is not None:
                del self.jobs[request_id]
            outputs.append(output)
        return outputs

    def _advance(self, request_id: RequestId, job: _Job) -> RequestOutput:
        if self.error_after is not None and job.emitted >= self.error_after:
            return RequestOutput(request_id=request_id, finish_reason="error", error="the engine broke")
        if self.preempt_after is not None and job.emitted >= self.preempt_after:
            return RequestOutput(request_id=request_id, finish_reason="preempted", stats=_stats(job))
        first = job.emitted == 0
        tokens: list[int] = []
        finish = None
        for _ in range(1 if first else self.tokens_per_step):
            token = self._choose(job)
            tokens.append(token)
            job.last = token
            job.emitted += 1
            is_stop = token in job.sampling.stop_token_ids or (token == EOS and not job.sampling.ignore_eos)
            if is_stop or job.emitted == job.sampling.max_tokens:
                finish = "stop" if is_stop else "length"
                break
        if not first:
            job.steps += 1
            job.decode_tokens += len(tokens)
        logprobs = tuple(TokenLogprob(token, -0.5, ((token, -0.5),)) for token in tokens)
        return RequestOutput(
            request_id=request_id,
            token_ids=tuple(tokens),
            logprobs=logprobs if job.sampling.logprobs is not None else (),
            finish_reason="stop" if finish == "stop" else "length" if finish else None,
            stats=_stats(job) if finish else None,
        )

    def _choose(self, job: _Job) -> int:
        if not self.continues:
            return job.prompt[job.emitted % len(job.prompt)]
        return continuation(job.last or job.prompt[-1], len(job.prompt) + job.emitted, job.sampling.seed)

    def _cancel(self, request_id: RequestId) -> None:
        job = self.jobs.pop(request_id, None)
        if job is not None and self._sink is not None:
            output = RequestOutput(request_id=request_id, finish_reason="cancelled", stats=_stats(job))
            self._sink(TokenFrame((output,)))
            self.timelines.stepped([output], time.monotonic())


def continuation(before: int, position: int, seed: int) -> int:
    """The letter that a host that `continues` puts at `position` behind the token `before`."""
    return ord("a") + (7 * before + 3 * position + seed) % 26


class RefusingHost:
    """A worker whose checkpoint is broken."""

    @classmethod
    def load(cls, config: WorkerConfig) -> RefusingHost:
        raise ModelMismatch("tensor lm_head.weight is missing", field="pair")


def _stats(job: _Job) -> RequestStats:
    return RequestStats(
        prompt_tokens=len(job.prompt),
        output_tokens=job.emitted,
        decode_steps=job.steps,
        decode_tokens=job.decode_tokens,
        decode_steps_first8=min(job.steps, 8),
        decode_tokens_first8=job.decode_tokens,
        accepted_by_position=(job.steps,),
        drafted_by_position=(job.steps,),
        prompt_tokens_computed=0,
        kv_bytes_target=BYTES_PER_TOKEN * len(job.prompt),
        kv_bytes_draft=len(job.prompt),
        cached_prompt_tokens=len(job.salt),
    )
