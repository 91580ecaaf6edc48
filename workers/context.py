"""The context engine: runs prompts, ships their KV as it is computed, keeps nothing.

    waiting ──admit, open transfer, lease──▶ prefilling ──chunk, push──▶ ... ──last chunk, first token──▶ shipping
    shipping ──the other side acknowledged──▶ gone            anywhere ──cancel | transfer broke──▶ draining ──▶ gone

While a prompt waits, its transfer is held: heartbeats keep the reservation over there alive, and its end there ends
the wait here. The transfer co-owns the pages from the start, because a write may be reading them whatever becomes of
the request. At the last chunk `release_index_slot` frees the row and the request gives up its pages; the transfer's
lease alone holds them until the transfer is terminal. So prompts in flight to slow receivers cost pages, never slots.

A prompt whose destination is not known yet is computed first and kept:

    waiting ──admit──▶ prefilling ──last chunk, first token──▶ held ──ship, open transfer, push──▶ shipping
                                                                └──lease over | cancel──▶ gone

It costs pages, no slot, and nothing of it has left this worker: when its lease is over, its pages return at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from kvmanager.errors import PoolExhausted, SlotsExhausted
from kvmanager.ids import RequestId, TransferId
from kvmanager.ledgers import Ledger
from transceiver.errors import TransceiverError, UnknownPeer
from transceiver.port import Broke, Delivered, Landed, Pages, Released, SendSpec, TransferPort
from workers.admission import check_new, check_pool, check_prompt, check_sampling, check_told
from workers.decode import DecodeLoop
from workers.engine import Computed, ContextDone, EngineCounters, EngineEvent, PromptHeld, Refused
from workers.errors import (
    AdmissionTimeout,
    InvalidRequest,
    NotHeld,
    Overloaded,
    PeerUnknown,
    RequestCancelled,
    TransferBroke,
    WorkerRefused,
)
from workers.faults import Fault
from workers.handoff import to_handoff
from workers.limits import EngineLimits
from workers.prefill import next_chunks
from workers.request import (
    Held,
    HoldRequest,
    Prefilled,
    PrefillRequest,
    Reservation,
    ShipRequest,
    TokenLogprob,
)
from workers.reuse import PrefixReuse
from workers.runner import PromptChunk, PromptRunner
from workers.sequence import Sequence


@dataclass
class _ContextJob:
    """One prompt on its way through. `ended`: the caller has its answer, so that it is told once.

    `sequence.request_id` names it in the ledger, `request_id` towards callers: a held prompt ships under another name.
    Without a reservation it is kept for `lease_s` when it is complete; `lease_end_s` is None until a step sees it held.
    """

    request_id: RequestId
    sequence: Sequence
    deadline_s: float
    reservation: Reservation | None = None
    lease_s: float = 0.0
    lease_end_s: float | None = None
    logprob: TokenLogprob | None = None  # the first token's
    ended: bool = False


class ContextEngine:
    """Chunked prefill, first come first served, one prompt's chunk per step, on each rank that keeps requests apart."""

    def __init__(
        self,
        *,
        runner: PromptRunner,
        decode: DecodeLoop,
        ledger: Ledger,
        limits: EngineLimits,
        port: TransferPort,
    ) -> None:
        self.ledger = ledger
        self.decode = decode
        self.counters = EngineCounters()
        self._runner = runner
        self._limits = limits
        self._port = port
        self._reuse = PrefixReuse(ledger, limits)
        self._ship_draft = True
        self._waiting: deque[_ContextJob] = deque()
        self._prefilling: deque[_ContextJob] = deque()
        self._transfers: dict[TransferId, _ContextJob] = {}
        self._held: dict[RequestId, _ContextJob] = {}
        self._events: list[EngineEvent] = []

    def prefill(self, request: PrefillRequest, now_s: float) -> None:
        """Queue a prompt. Raises InvalidRequest or Overloaded; nothing is kept then."""
        self._check_prompt(request)
        reservation = request.reservation
        self._check_first_position(reservation, len(request.prompt_token_ids))
        job = _ContextJob(request.request_id, self._sequence(request), now_s + request.ttl_s, reservation)
        try:
            self._port.hold(reservation.transfer_id, reservation.generation_epoch, request.ttl_s)
        except TransceiverError as error:
            raise _refusal(error) from error
        self._waiting.append(job)

    def hold(self, request: HoldRequest, now_s: float) -> None:
        """Queue a prompt that is kept here when it is complete. Raises InvalidRequest or Overloaded."""
        self._check_prompt(request)
        self._waiting.append(
            _ContextJob(
                request.request_id, self._sequence(request), now_s + request.ttl_s, lease_s=request.lease_s
            )
        )

    def ship(self, request: ShipRequest, now_s: float) -> None:
        """Send a held prompt to where there is room for it now. Raises NotHeld, and InvalidRequest, which keeps it.

        What is held can be shipped once, however that ends.
        """
        job = self._held.get(request.held_id)
        if job is None:
            raise NotHeld(
                f"no prompt is held under {request.held_id}: its lease is over, or it was shipped already",
                request_id=request.request_id,
            )
        if request.num_prompt_tokens != job.sequence.num_prompt_tokens:
            raise InvalidRequest(
                f"{job.sequence.num_prompt_tokens} prompt tokens are held, {request.num_prompt_tokens} are asked for",
                field="num_prompt_tokens",
                limit=job.sequence.num_prompt_tokens,
            )
        self._check_first_position(request.reservation, request.num_prompt_tokens)
        check_new(request.request_id, self._names(but=job))
        del self._held[request.held_id]
        job.request_id, job.reservation, job.ended = request.request_id, request.reservation, False
        job.deadline_s = now_s + request.ttl_s
        try:
            self._open_transfer(job, now_s)
        except TransceiverError as error:
            self._stop(job)
            raise _refusal(error) from error
        self._finish(job)

    def _check_prompt(self, request: PrefillRequest | HoldRequest) -> None:
        check_new(request.request_id, self._names())
        check_prompt(request.prompt_token_ids, self._limits.vocab_size)
        check_sampling(request.sampling, self._limits.vocab_size)
        num_tokens = len(request.prompt_token_ids)
        check_told(num_tokens, request.prompt_token_ids, request.sampling)
        if num_tokens >= self._limits.max_seq_len:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens, max_seq_len is {self._limits.max_seq_len}",
                field="prompt",
                limit=self._limits.max_seq_len,
            )
        check_pool(num_tokens, self.ledger)
        if len(self._waiting) >= self._limits.max_waiting:
            raise Overloaded(f"{len(self._waiting)} prompts are waiting already (max_waiting)")

    def _check_first_position(self, reservation: Reservation, num_tokens: int) -> None:
        first = reservation.first_position
        if first % self._limits.page_size or not 0 <= first < num_tokens:
            raise InvalidRequest(
                f"the reservation asks for KV from position {first} of {num_tokens} on: pages start at multiples of "
                f"{self._limits.page_size} here",
                field="reservation.first_position",
                limit=self._limits.page_size,
            )
        draft = self.ledger.draft_geometry
        window_from = draft.first_position(num_tokens) if draft is not None else 0
        if self.ledger.draft_window is not None and first > window_from:
            raise InvalidRequest(
                f"the reservation asks for KV from position {first} of {num_tokens} on: the drafter's context begins "
                f"at {window_from}, and would be missing before {first}",
                field="reservation.first_position",
                limit=window_from,
            )

    def _names(self, but: _ContextJob | None = None) -> list[RequestId]:
        """Ids that no new request may have: by them the prompts here are known to callers or to the ledger."""
        jobs = [*self._waiting, *self._prefilling, *self._held.values()]
        return [job.request_id for job in jobs if job is not but]

    def _sequence(self, request: PrefillRequest | HoldRequest) -> Sequence:
        return self._limits.sequence(
            request.request_id, request.prompt_token_ids, request.sampling, request.cache_salt
        )

    def step(self, now_s: float) -> list[EngineEvent]:
        for event in self._port.poll(now_s):
            match event:
                case Delivered():
                    self._delivered(event)
                case Broke():
                    self._broke(event)
                case Landed() | Released():
                    raise AssertionError(f"a context worker received a transfer: {event.transfer}")
        self._expire(now_s)
        self._admit(now_s)
        if self._prefilling:
            self._prefill()
            self.counters.steps += 1
        events, self._events = self._events, []
        return events

    def cancel(self, request_id: RequestId) -> None:
        """Stop before the next chunk. Pages stay leased until the transfer is terminal."""
        for job in [*self._waiting, *self._prefilling, *self._held.values(), *self._transfers.values()]:
            if job.request_id == request_id:
                where = "while waiting for" if job in self._waiting else "on"
                self._give_up(job, "the request was cancelled")
                self._end(job, RequestCancelled(f"cancelled {where} the context worker"))
                return

    def fail_all(self, reason: str) -> list[EngineEvent]:
        """Refuse every prompt and abort its transfer; leases end as the transfers become terminal."""
        for job in [*self._waiting, *self._prefilling, *self._held.values(), *self._transfers.values()]:
            self._give_up(job, reason)
            self._end(job, TransferBroke(f"the context worker failed: {reason}"))
        events, self._events = self._events, []
        return events

    def inject(self, fault: Fault) -> None:
        self._runner.fault = fault
        self._reuse.inject(fault)
        self._ship_draft = fault is not Fault.EMPTY_CONTEXT

    def check(self) -> None:
        """Raise when ledger and jobs disagree: every lease belongs to an open transfer and the reverse."""
        self.ledger.check()
        self._port.check()
        usage = self.ledger.usage()
        if usage.leases != len(self._transfers):
            raise AssertionError("leases and open transfers differ")
        if usage.slots_in_use != len(self._prefilling):
            raise AssertionError("slots and prompts under way differ")
        if usage.requests != len(self._prefilling) + len(self._held):
            raise AssertionError("the ledger's requests are not the prompts under way and those held")

    @property
    def idle(self) -> bool:
        return not (self._prefilling or self._events or (self._waiting and not self.awaits_pages))

    @property
    def awaits_pages(self) -> bool:
        return bool(self._held) or self.ledger.usage().leases > 0

    @property
    def num_running(self) -> int:
        return len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    @property
    def num_quarantined(self) -> int:
        return 0

    def _admit(self, now_s: float) -> None:
        while self._waiting:
            job = self._waiting[0]
            sequence = job.sequence
            if self._reuse.worth_waiting(sequence, (ahead.sequence for ahead in self._prefilling)):
                return
            try:
                self.ledger.reserve(
                    sequence.request_id,
                    sequence.num_prompt_tokens,
                    self._reuse.prefix(sequence),
                    num_prompt_tokens=sequence.num_prompt_tokens,
                )
            except (PoolExhausted, SlotsExhausted):
                return
            self._waiting.popleft()
            sequence.cached_prompt_tokens = self.ledger.length(sequence.request_id)
            self.counters.cached_prompt_tokens += sequence.cached_prompt_tokens
            if job.reservation is not None:
                try:
                    self._open_transfer(job, now_s)
                except TransceiverError as error:
                    self._give_up(job, str(error))
                    self._end(job, _refusal(error))
                    continue
            self._prefilling.append(job)

    def _open_transfer(self, job: _ContextJob, now_s: float) -> None:
        """Start shipping an admitted prompt; from here on the transfer co-owns its pages.

        A transfer counts tokens and pages from the first position that the other side lacks.
        """
        reservation, request_id = job.reservation, job.sequence.request_id
        assert reservation is not None
        num_tokens = job.sequence.num_prompt_tokens
        pages = self.ledger.pages_between(request_id, reservation.first_position, num_tokens)
        self._port.open(
            SendSpec(
                transfer=reservation.transfer_id,
                peer=reservation.generation_epoch,
                num_tokens=num_tokens - reservation.first_position,
                source=pages,
                destination=Pages(reservation.target_pages, reservation.draft_pages),
                ship_draft=job.sequence.drafting and self._ship_draft,
                ttl_s=max(job.deadline_s - now_s, 0.0),
            )
        )
        self.ledger.lease(request_id, reservation.transfer_id)
        self._transfers[reservation.transfer_id] = job
        self._push(job, self.ledger.length(request_id))  # what is there already can go at once

    def _push(self, job: _ContextJob, end_position: int) -> None:
        """Ship what completes KV up to here, once the device has computed it. Cached pages may be as fresh as that."""
        if job.reservation is not None:
            shipped = max(end_position - job.reservation.first_position, 0)
            self._port.push(job.reservation.transfer_id, shipped, self._runner.written())

    def _prefill(self) -> None:
        jobs = {job.sequence.request_id: job for job in self._prefilling}
        chunks = next_chunks((job.sequence for job in jobs.values()), self.ledger, self._limits)
        for chunk, logits_1V in zip(chunks, self._runner.prefill(chunks), strict=True):
            self._computed(jobs[chunk.sequence.request_id], chunk, logits_1V)

    def _computed(self, job: _ContextJob, chunk: PromptChunk, logits_1V: Tensor | None) -> None:
        sequence, end = chunk.sequence, chunk.end
        self.ledger.commit(sequence.request_id, end)
        self.counters.prompt_tokens_computed += end - chunk.start
        self._events.append(Computed(sequence.request_id, range(chunk.start, end)))
        self._push(job, end)  # the last chunk too: it travels while the first token is chosen
        if logits_1V is None:
            return
        self._reuse.leave_prompt(sequence)
        token, job.logprob = self.decode.first_token(sequence, logits_1V)
        sequence.take([token])
        if job.reservation is not None:
            self._finish(job)
        else:
            self._keep(job)

    def _finish(self, job: _ContextJob) -> None:
        """The prompt is complete and its transfer open: ship the rest, then the hand-off behind it."""
        assert job.reservation is not None
        handoff = to_handoff(job.sequence, job.logprob, job.reservation.first_position)
        self._port.finish(job.reservation.transfer_id, handoff)
        self._stop(job)

    def _keep(self, job: _ContextJob) -> None:
        """The prompt is complete and has nowhere to go yet: its row is free, its pages wait."""
        self._prefilling.remove(job)
        self.ledger.release_index_slot(job.sequence.request_id)
        self._held[job.request_id] = job
        job.ended = True
        self.counters.prompts_held += 1
        held = Held(
            first_token=job.sequence.output[0], prompt_tokens_computed=job.sequence.prompt_tokens_computed
        )
        self._events.append(PromptHeld(job.request_id, held))

    def _stop(self, job: _ContextJob) -> None:
        """No more computing for this job: its row is free, its pages stay with the transfer."""
        if job in self._prefilling:
            self._prefilling.remove(job)
        self.ledger.release_index_slot(job.sequence.request_id)
        self.ledger.free(job.sequence.request_id)

    def _delivered(self, event: Delivered) -> None:
        job = self._transfers.pop(event.transfer)
        self.ledger.end_lease(event.transfer)
        self.counters.transfers_done += 1
        self.counters.kv_bytes_target += event.bytes_target
        self.counters.kv_bytes_draft += event.bytes_draft
        self.counters.requests_finished += 1
        if not job.ended:
            job.ended = True
            sequence = job.sequence
            prefilled = Prefilled(
                first_token=sequence.output[0], prompt_tokens_computed=sequence.prompt_tokens_computed
            )
            self._events.append(ContextDone(job.request_id, prefilled))

    def _broke(self, event: Broke) -> None:
        job = self._transfers.pop(event.transfer, None)
        if job is None:  # it ended before it was admitted
            for waiting in [job for job in self._waiting if _transfer(job) == event.transfer]:
                self._waiting.remove(waiting)
                self._end(waiting, TransferBroke(f"the reservation ended in {event.state}: {event.reason}"))
            return
        self._stop(job)
        self.ledger.end_lease(event.transfer)
        self.counters.transfer_ended(event.state)
        self._end(job, TransferBroke(f"the KV transfer ended in {event.state}: {event.reason}"))

    def _expire(self, now_s: float) -> None:
        for job in [job for job in self._waiting if job.deadline_s <= now_s]:
            self._give_up(job, "the context worker had no room for the prompt in time")
            self._end(job, AdmissionTimeout("the context worker had no room for the prompt in time"))
        for job in list(self._held.values()):
            if job.lease_end_s is None:
                job.lease_end_s = now_s + job.lease_s
            if job.lease_end_s <= now_s:
                self._give_up(job, "nobody asked for the held prompt in time")
                self.counters.prompt_leases_expired += 1

    def _give_up(self, job: _ContextJob, reason: str) -> None:
        """A prompt goes no further, wherever it is; the other side, if there is one, learns that nobody will write."""
        if job in self._waiting:
            self._waiting.remove(job)
        if self._held.get(job.request_id) is job:
            del self._held[job.request_id]
        self._stop(job)
        if job.reservation is not None:
            self._port.abort(job.reservation.transfer_id, reason)

    def _end(self, job: _ContextJob, error: WorkerRefused) -> None:
        if not job.ended:
            job.ended = True
            self._events.append(Refused(job.request_id, error))


def _transfer(job: _ContextJob) -> TransferId | None:
    return job.reservation.transfer_id if job.reservation is not None else None


def _refusal(error: TransceiverError) -> WorkerRefused:
    """Why a transfer could not even start. An unknown peer is worth a handshake and another try."""
    if isinstance(error, UnknownPeer):
        return PeerUnknown(str(error))
    return TransferBroke(f"the KV transfer could not start: {error}")
