"""The context engine: runs prompts, ships their KV as it is computed, keeps nothing.

    waiting ──admit, open transfer, lease──▶ prefilling ──chunk, push──▶ ... ──last chunk, first token──▶ shipping
    shipping ──the other side acknowledged──▶ gone            anywhere ──cancel | transfer broke──▶ draining ──▶ gone

While a prompt waits, its transfer is held: heartbeats keep the reservation over there alive, and its end there ends
the wait here. The transfer co-owns the pages from the start, because a write may be reading them whatever becomes of
the request. At the last chunk `release_index_slot` frees the row and the request gives up its pages; the transfer's
lease alone holds them until the transfer is terminal. So prompts in flight to slow receivers cost pages, never slots.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvmanager.errors import PoolExhausted, SlotsExhausted
from kvmanager.ids import RequestId, TransferId
from kvmanager.ledger import KvLedger
from transceiver.errors import TransceiverError, UnknownPeer
from transceiver.port import Broke, Delivered, Landed, Pages, Released, SendSpec, TransferPort
from workers.admission import check_new, check_pool, check_prompt, check_sampling
from workers.decode import DecodeLoop
from workers.engine import ContextDone, EngineCounters, EngineEvent, Refused
from workers.errors import (
    AdmissionTimeout,
    InvalidRequest,
    Overloaded,
    PeerUnknown,
    RequestCancelled,
    TransferBroke,
    WorkerRefused,
)
from workers.faults import Fault
from workers.handoff import bytes_apart, to_handoff
from workers.limits import EngineLimits
from workers.request import Prefilled, PrefillRequest
from workers.reuse import PrefixReuse
from workers.runner import ModelRunner
from workers.sequence import Sequence


@dataclass
class _ContextJob:
    """One prompt on its way through. `ended` is what the caller was told, so that it is told once."""

    request: PrefillRequest
    sequence: Sequence
    deadline_s: float
    ships_draft: bool = False
    ended: bool = False

    @property
    def transfer(self) -> TransferId:
        return self.request.reservation.transfer_id


class ContextEngine:
    """Chunked prefill, first come first served, one prompt's chunk per step."""

    def __init__(
        self,
        *,
        runner: ModelRunner,
        decode: DecodeLoop,
        ledger: KvLedger,
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
        self._events: list[EngineEvent] = []

    def prefill(self, request: PrefillRequest, now_s: float) -> None:
        """Queue a prompt. Raises InvalidRequest or Overloaded; nothing is kept then."""
        jobs = [*self._waiting, *self._prefilling]
        check_new(request.request_id, [job.request.request_id for job in jobs])
        check_prompt(request.prompt_token_ids, self._limits.vocab_size)
        check_sampling(request.sampling)
        num_tokens = len(request.prompt_token_ids)
        if num_tokens >= self._limits.max_seq_len:
            raise InvalidRequest(
                f"the prompt has {num_tokens} tokens, max_seq_len is {self._limits.max_seq_len}",
                field="prompt",
                limit=self._limits.max_seq_len,
            )
        check_pool(num_tokens, self.ledger)
        if len(self._waiting) >= self._limits.max_waiting:
            raise Overloaded(f"{len(self._waiting)} prompts are waiting already (max_waiting)")
        first = request.reservation.first_position
        if first % self._limits.page_size or not 0 <= first < num_tokens:
            raise InvalidRequest(
                f"the reservation asks for KV from position {first} of {num_tokens} on: pages start at multiples of "
                f"{self._limits.page_size} here",
                field="reservation.first_position",
                limit=self._limits.page_size,
            )
        sequence = self._limits.sequence(
            request.request_id, request.prompt_token_ids, request.sampling, request.cache_salt
        )
        job = _ContextJob(request, sequence, now_s + request.ttl_s)
        try:
            self._port.hold(job.transfer, request.reservation.generation_epoch, request.ttl_s)
        except TransceiverError as error:
            raise _refusal(error) from error
        self._waiting.append(job)

    def step(self, now_s: float) -> list[EngineEvent]:
        for event in self._port.poll(now_s):
            match event:
                case Delivered():
                    self._delivered(event)
                case Broke():
                    self._broke(event)
                case Landed() | Released():
                    raise AssertionError(f"a context worker received a transfer: {event.transfer}")
        self._expire_waiting(now_s)
        self._admit(now_s)
        if self._prefilling:
            self._prefill(self._prefilling[0])
            self.counters.steps += 1
        events, self._events = self._events, []
        return events

    def cancel(self, request_id: RequestId) -> None:
        """Stop before the next chunk. Pages stay leased until the transfer is terminal."""
        for job in self._waiting:
            if job.request.request_id == request_id:
                self._give_up(job, "the request was cancelled")
                self._end(job, RequestCancelled("cancelled while waiting for the context worker"))
                return
        for job in list(self._transfers.values()):
            if job.request.request_id == request_id:
                self._stop(job)
                self._port.abort(job.transfer, "the request was cancelled")
                self._end(job, RequestCancelled("cancelled on the context worker"))
                return

    def fail_all(self, reason: str) -> list[EngineEvent]:
        """Refuse every prompt and abort its transfer; leases end as the transfers become terminal."""
        for job in [*self._waiting, *self._transfers.values()]:
            self._stop(job)
            self._port.abort(job.transfer, reason)
            self._end(job, TransferBroke(f"the context worker failed: {reason}"))
        self._waiting.clear()
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
        if self.ledger.usage().leases != len(self._transfers):
            raise AssertionError("leases and open transfers differ")

    @property
    def idle(self) -> bool:
        return not (self._prefilling or self._events or (self._waiting and self.ledger.usage().leases == 0))

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
            request = job.request
            if self._reuse.worth_waiting(job.sequence, (ahead.sequence for ahead in self._prefilling)):
                return
            try:
                self.ledger.reserve(
                    request.request_id, job.sequence.num_prompt_tokens, self._reuse.prefix(job.sequence)
                )
            except (PoolExhausted, SlotsExhausted):
                return
            self._waiting.popleft()
            job.sequence.cached_prompt_tokens = self.ledger.length(request.request_id)
            self.counters.cached_prompt_tokens += job.sequence.cached_prompt_tokens
            try:
                self._open_transfer(job, now_s)
            except TransceiverError as error:
                self._port.abort(job.transfer, str(error))
                self.ledger.free(request.request_id)
                self._end(job, _refusal(error))

    def _open_transfer(self, job: _ContextJob, now_s: float) -> None:
        """Start shipping an admitted prompt; from here on the transfer co-owns its pages.

        A transfer counts tokens and pages from the first position that the other side lacks.
        """
        reservation, request_id = job.request.reservation, job.request.request_id
        job.ships_draft = job.sequence.drafting and self._ship_draft
        pages, skipped = self.ledger.pages(request_id), reservation.first_position // self._limits.page_size
        self._port.open(
            SendSpec(
                transfer=job.transfer,
                peer=reservation.generation_epoch,
                num_tokens=job.sequence.num_prompt_tokens - reservation.first_position,
                source=Pages(pages.target[skipped:], pages.draft[skipped:]),
                destination=Pages(reservation.target_pages, reservation.draft_pages),
                ship_draft=job.ships_draft,
                ttl_s=max(job.deadline_s - now_s, 0.0),
            )
        )
        self.ledger.lease(request_id, job.transfer)
        self._transfers[job.transfer] = job
        self._prefilling.append(job)
        self._push(job, self.ledger.length(request_id))  # what the cache had can go at once

    def _push(self, job: _ContextJob, end_position: int) -> None:
        """Ship what completes KV up to here, once the device has computed it. Cached pages may be as fresh as that."""
        shipped = max(end_position - job.request.reservation.first_position, 0)
        self._port.push(job.transfer, shipped, self._runner.written())

    def _prefill(self, job: _ContextJob) -> None:
        sequence = job.sequence
        start = self.ledger.length(sequence.request_id)
        end = min(start + self._limits.chunk_tokens, sequence.num_prompt_tokens)
        logits_1V = self._runner.prefill_chunk(sequence, start, end)
        self.ledger.commit(sequence.request_id, end)
        self.counters.prompt_tokens_computed += end - start
        self._push(job, end)  # the last chunk too: it travels while the first token is chosen
        if logits_1V is None:
            return
        self._reuse.leave_prompt(sequence)
        token, logprob = self.decode.first_token(sequence, logits_1V)
        sequence.take([token])
        self._port.finish(job.transfer, to_handoff(sequence, logprob, job.request.reservation.first_position))
        self._stop(job)

    def _stop(self, job: _ContextJob) -> None:
        """No more computing for this job: its row is free, its pages stay with the transfer."""
        if job in self._prefilling:
            self._prefilling.remove(job)
        self.ledger.release_index_slot(job.request.request_id)
        self.ledger.free(job.request.request_id)

    def _delivered(self, event: Delivered) -> None:
        job = self._transfers.pop(event.transfer)
        self.ledger.end_lease(event.transfer)
        self.counters.transfers_done += 1
        bytes_target, bytes_draft = bytes_apart(
            self.ledger, event.bytes_target, event.bytes_draft, job.ships_draft
        )
        self.counters.kv_bytes_target += bytes_target
        self.counters.kv_bytes_draft += bytes_draft
        self.counters.requests_finished += 1
        if not job.ended:
            job.ended = True
            sequence = job.sequence
            prefilled = Prefilled(
                first_token=sequence.output[0], prompt_tokens_computed=sequence.prompt_tokens_computed
            )
            self._events.append(ContextDone(job.request.request_id, prefilled))

    def _broke(self, event: Broke) -> None:
        job = self._transfers.pop(event.transfer, None)
        if job is None:  # it ended before it was admitted
            for waiting in [job for job in self._waiting if job.transfer == event.transfer]:
                self._waiting.remove(waiting)
                self._end(waiting, TransferBroke(f"the reservation ended in {event.state}: {event.reason}"))
            return
        self._stop(job)
        self.ledger.end_lease(event.transfer)
        self.counters.transfer_ended(event.state)
        self._end(job, TransferBroke(f"the KV transfer ended in {event.state}: {event.reason}"))

    def _expire_waiting(self, now_s: float) -> None:
        for job in [job for job in self._waiting if job.deadline_s <= now_s]:
            self._give_up(job, "the context worker had no room for the prompt in time")
            self._end(job, AdmissionTimeout("the context worker had no room for the prompt in time"))

    def _give_up(self, job: _ContextJob, reason: str) -> None:
        """A prompt leaves the queue; the other side learns at once that nobody will write."""
        self._waiting.remove(job)
        self._port.abort(job.transfer, reason)

    def _end(self, job: _ContextJob, error: WorkerRefused) -> None:
        if not job.ended:
            job.ended = True
            self._events.append(Refused(job.request.request_id, error))


def _refusal(error: TransceiverError) -> WorkerRefused:
    """Why a transfer could not even start. An unknown peer is worth a handshake and another try."""
    if isinstance(error, UnknownPeer):
        return PeerUnknown(str(error))
    return TransferBroke(f"the KV transfer could not start: {error}")
