"""The generation engine: decodes prompts that were computed elsewhere.

    waiting ──room in both ledgers──▶ reserved ──KV landed, first token──▶ decoding ──end | cancel | preempted──▶ gone
              │                          └──cancel | transfer broke──▶ gone, its pages perhaps in quarantine ──▶ free
              └──few tokens to compute──▶ prefilling ──last chunk, first token──▶ decoding

A reservation is one in both ledgers: prompt, max_tokens (or, under admission "grow", some of them), look-ahead. The
slot bound then is a real one in target and draft alike, and when the KV lands the context length becomes the prompt
length in both: the drafter starts with the whole prompt before its eyes. Nothing of such a prompt is computed here.

Shipping costs a round through another worker. A prompt that is short, or mostly in the prefix cache already, may be
asked to be computed here instead, up to a number of tokens that its request names (`workers.prefill`).

A reservation whose transfer breaks ends at once, and so does its slot. If its sender may still have a write under way,
the pages belong to the transfer alone from then on, until the port says that nobody writes them any more.

Pages can run out only under admission "grow". Then age decides, which a request keeps over all its runs: whoever lacks
pages takes them from the youngest that decodes and is younger than itself, which is preempted: its pages and slot
return, and its gateway brings it back, as a longer prompt, through a context worker. It is let in again before all
younger ones. The youngest itself waits where it is, and nobody is let in while somebody lacks pages. So the oldest is
never preempted and lacks pages only while prompts or transfers hold them, which end by themselves, or in quarantine,
when their sender wakes or is replaced; whoever is not the oldest becomes it. Each run of a request emits a token at
least, because only what decodes can be preempted.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from kvmanager.errors import PoolExhausted, SlotsExhausted
from kvmanager.ids import RequestId, TransferId, WorkerEpoch
from kvmanager.ledgers import Ledger
from transceiver.port import Broke, Delivered, Landed, ReceiveSpec, Released, TransferPort
from workers.admission import check_lengths, check_new, check_prompt, check_sampling, check_told
from workers.decode import DecodeLoop
from workers.engine import Emitted, EngineCounters, EngineEvent, Granted, Refused
from workers.errors import AdmissionTimeout, EngineFailed, InvalidRequest, Overloaded, RequestCancelled
from workers.faults import Fault
from workers.growth import PageGrowth
from workers.handoff import first_logprob
from workers.limits import EngineLimits
from workers.prefill import PromptQueue
from workers.request import Admitted, ComputedHere, RequestOutput, Reservation, ReserveRequest
from workers.reuse import PrefixReuse
from workers.runner import PromptRunner
from workers.sequence import Sequence


@dataclass
class _GenerationJob:
    """One request before its KV has landed. `cancelled` jobs wait for their transfer to end."""

    request: ReserveRequest
    sequence: Sequence
    deadline_s: float
    transfer: TransferId | None = None
    cancelled: bool = False


class GenerationEngine:
    """Reservations, landings and continuous decoding. `new_id` names transfers, never the client.

    `epochs`: by which whoever ships knows each rank that keeps requests of its own; one, when all share them.
    """

    def __init__(
        self,
        *,
        runner: PromptRunner,
        decode: DecodeLoop,
        ledger: Ledger,
        limits: EngineLimits,
        port: TransferPort,
        epochs: Items[WorkerEpoch],
        new_id: Callable[[], str],
    ) -> None:
        self.ledger = ledger
        self.decode = decode
        self.counters = EngineCounters()
        self._runner = runner
        self._limits = limits
        self._reuse = PrefixReuse(ledger, limits)
        self._growth = PageGrowth(ledger, limits)
        self._port = port
        self._epochs = tuple(epochs)
        self._new_id = new_id
        self._waiting: deque[_GenerationJob] = deque()  # oldest first
        self._transfers: dict[TransferId, _GenerationJob] = {}
        self._quarantined: set[TransferId] = set()  # broken, and a write of theirs may still arrive
        self._prefilling = PromptQueue(
            runner=runner,
            decode=decode,
            ledger=ledger,
            limits=limits,
            reuse=self._reuse,
            counters=self.counters,
        )
        self._decoding: list[Sequence] = []  # oldest first
        self._lacking: list[Sequence] = []  # those of them that no page was left for in this step
        self._events: list[EngineEvent] = []

    def reserve(self, request: ReserveRequest, now_s: float) -> None:
        """Queue for admission; `Granted` or `Refused` answers. Raises InvalidRequest or Overloaded at once."""
        jobs = [*self._waiting, *self._transfers.values()]
        live = [*(job.sequence for job in jobs), *self._prefilling, *self._decoding]
        check_new(request.request_id, [sequence.request_id for sequence in live])
        if request.num_prompt_tokens < 1:
            raise InvalidRequest("the prompt is empty: send at least one token", field="prompt", limit=1)
        if request.prompt_token_ids and len(request.prompt_token_ids) != request.num_prompt_tokens:
            raise InvalidRequest(
                f"{len(request.prompt_token_ids)} prompt tokens came with num_prompt_tokens "
                f"{request.num_prompt_tokens}",
                field="prompt",
                limit=request.num_prompt_tokens,
            )
        if request.position_multiple < 1:
            raise InvalidRequest(
                f"position_multiple is {request.position_multiple}: it must be at least 1",
                field="position_multiple",
                limit=1,
            )
        if request.prompt_token_ids and (request.local_prefill_tokens or request.sampling.penalises):
            check_prompt(request.prompt_token_ids, self._limits.vocab_size)
        check_sampling(request.sampling, self._limits.vocab_size)
        check_told(request.num_prompt_tokens, request.prompt_token_ids, request.sampling)
        check_lengths(
            request.num_prompt_tokens, request.sampling.max_tokens, self._limits.max_seq_len, self.ledger
        )
        if len(self._waiting) >= self._limits.max_waiting and not request.age_s:
            raise Overloaded(f"{len(self._waiting)} requests are waiting already (max_waiting)")
        sequence = self._limits.remote_sequence(
            request.request_id,
            request.num_prompt_tokens,
            request.sampling,
            request.prompt_token_ids,
            request.cache_salt,
        )
        sequence.since_s = now_s - request.age_s
        insort(self._waiting, _GenerationJob(request, sequence, now_s + request.ttl_s), key=_since_s)

    def step(self, now_s: float) -> list[EngineEvent]:
        for event in self._port.poll(now_s):
            match event:
                case Landed():
                    self._landed(event)
                case Broke():
                    self._broke(event)
                case Released():
                    self._released(event.transfer)
                case Delivered():
                    raise AssertionError(f"a generation worker sent a transfer: {event.transfer}")
        self._expire_waiting(now_s)
        self._lacking = self._grow()
        if not self._lacking:
            self._admit(now_s)
        worked = self._prefill()
        ready = [sequence for sequence in self._decoding if sequence not in self._lacking]
        if ready:
            self._events.extend(Emitted(output) for output in self.decode.step(ready))
            self._drop_finished()
        self.counters.steps += worked or bool(ready)
        events, self._events = self._events, []
        return events

    def cancel(self, request_id: RequestId) -> None:
        """End a request wherever it is; unknown and finished ones change nothing."""
        for job in self._waiting:
            if job.request.request_id == request_id:
                self._waiting.remove(job)
                self._events.append(Refused(request_id, RequestCancelled("cancelled before admission")))
                return
        for transfer, job in self._transfers.items():
            if job.request.request_id == request_id and not job.cancelled:
                job.cancelled = True
                self._port.abort(transfer, "the request was cancelled")
                job.sequence.finish_reason = "cancelled"
                self._events.append(Emitted(job.sequence.report(())))
                return
        found = self._prefilling.remove(request_id)
        for sequence in self._decoding:
            if sequence.request_id == request_id:
                found = sequence
        if found is not None:
            if found in self._decoding:
                self._decoding.remove(found)
            found.finish_reason = "cancelled"
            self._events.append(Emitted(found.report(())))
            self._let_go(found)

    def fail_all(self, reason: str) -> list[EngineEvent]:
        """End every request with an error; pages of open transfers return when those are terminal."""
        for job in self._waiting:
            self._events.append(Refused(job.request.request_id, EngineFailed(reason)))
        self._waiting.clear()
        for transfer, job in self._transfers.items():
            if not job.cancelled:
                job.cancelled = True
                self._port.abort(transfer, reason)
                self._events.append(Emitted(_error(job.request.request_id, reason)))
        for sequence in [*self._prefilling.clear(), *self._decoding]:
            self._let_go(sequence)
            self._events.append(Emitted(_error(sequence.request_id, reason)))
        self._decoding.clear()
        events, self._events = self._events, []
        return events

    def inject(self, fault: Fault) -> None:
        self._runner.fault = fault
        self._reuse.inject(fault)

    def check(self) -> None:
        """Raise when ledger and jobs disagree: every slot belongs to an open transfer or a request at work, and every
        lease to a transfer in quarantine.
        """
        self.ledger.check()
        self._port.check()
        if self.ledger.usage().slots_in_use != self._num_admitted:
            raise AssertionError("slots and live requests differ")
        if self.ledger.usage().leases != len(self._quarantined):
            raise AssertionError("leases and transfers in quarantine differ")
        ages = [sequence.since_s for sequence in self._decoding]
        if ages != sorted(ages):
            raise AssertionError("a younger request stands before an older one")

    @property
    def idle(self) -> bool:
        able = self._prefilling or len(self._decoding) > len(self._lacking)
        return not (able or self._events or (self._waiting and not self.awaits_pages))

    @property
    def awaits_pages(self) -> bool:
        return bool(self._transfers or self._quarantined)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_transfers(self) -> int:
        return len(self._transfers)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def _admit(self, now_s: float) -> None:
        """The oldest first: a request that does not fit yet holds back those behind it, so none starves."""
        while self._waiting:
            job = self._waiting[0]
            local = self._is_local(job)
            if local and self._reuse.worth_waiting(job.sequence, self._prefilling):
                return
            try:
                self.ledger.reserve(
                    job.request.request_id,
                    self._growth.at_admission(job.sequence),
                    self._reuse.prefix(job.sequence),
                    num_prompt_tokens=job.sequence.num_prompt_tokens,
                    spare_pages=self._growth.spare_pages(self._num_admitted),
                    position_multiple=1 if local else job.request.position_multiple,
                )
            except (PoolExhausted, SlotsExhausted):
                return
            self._growth.admitted(job.sequence)
            self._waiting.popleft()
            admitted: Admitted
            if local:
                self._prefilling.add(job.sequence)
                admitted = ComputedHere()
            else:
                admitted = self._expect(job, now_s)
            self._events.append(Granted(job.request.request_id, admitted))

    def _is_local(self, job: _GenerationJob) -> bool:
        """Whether so little of the prompt is missing here, by what is cached now, that it is computed here."""
        sequence = job.sequence
        if not sequence.prompt_token_ids:
            return False
        cached = len(self._reuse.prefix(sequence)) * self._limits.page_size
        return sequence.num_prompt_tokens - cached <= job.request.local_prefill_tokens

    def _expect(self, job: _GenerationJob, now_s: float) -> Reservation:
        """Open an admitted prompt's transfer; from here on its pages may be written from elsewhere."""
        request_id, prompt = job.request.request_id, job.request.num_prompt_tokens
        first_position = self.ledger.length(request_id)
        job.transfer = TransferId(self._new_id())
        pages = self.ledger.pages_between(request_id, first_position, prompt)
        self._port.expect(
            ReceiveSpec(
                transfer=job.transfer,
                num_tokens=prompt - first_position,
                destination=pages,
                ttl_s=max(job.deadline_s - now_s, 0.0),
            )
        )
        self._transfers[job.transfer] = job
        return Reservation(
            transfer_id=job.transfer,
            generation_epoch=self._epochs[pages.rank],
            target_pages=pages.target,
            draft_pages=pages.draft,
            first_position=first_position,
        )

    @property
    def _num_admitted(self) -> int:
        return len(self._transfers) + len(self._prefilling) + len(self._decoding)

    def _prefill(self) -> bool:
        """A chunk of the first prompt that is computed here; whether there was one."""
        if not self._prefilling:
            return False
        for sequence in self._prefilling.step(self._events):
            insort(self._decoding, sequence, key=_since)
        self._drop_finished()
        return True

    def _landed(self, event: Landed) -> None:
        job = self._transfers.pop(event.transfer)
        sequence = job.sequence
        self.counters.transfers_done += 1
        self.counters.kv_bytes_target += event.bytes_target
        self.counters.kv_bytes_draft += event.bytes_draft
        if job.cancelled:
            self._let_go(sequence)
            return
        sequence.kv_bytes_target = event.bytes_target
        sequence.kv_bytes_draft = event.bytes_draft
        if self._runner.fault is Fault.EMPTY_CONTEXT or not event.handoff.draft_shipped:
            sequence.draft_origin = sequence.num_prompt_tokens
        self.ledger.commit(sequence.request_id, sequence.num_prompt_tokens)
        if event.handoff.draft_shipped:
            self._reuse.leave_prompt(sequence)
        sequence.cached_prompt_tokens = sequence.num_prompt_tokens - event.handoff.prompt_tokens_computed
        self.counters.cached_prompt_tokens += sequence.cached_prompt_tokens
        token = event.handoff.first_token
        sequence.take([token])
        insort(self._decoding, sequence, key=_since)
        self._events.append(Emitted(sequence.report([token], first_logprob(event.handoff))))
        self._drop_finished()

    def _broke(self, event: Broke) -> None:
        job = self._transfers.pop(event.transfer)
        if not event.pages_safe:
            self.ledger.lease(job.sequence.request_id, event.transfer)
            self._quarantined.add(event.transfer)
        self._let_go(job.sequence)
        self.counters.transfer_ended(event.state)
        if not job.cancelled:
            reason = f"the KV transfer ended in {event.state}: {event.reason}"
            self._events.append(Emitted(_error(job.request.request_id, reason)))

    def _released(self, transfer: TransferId) -> None:
        self._quarantined.remove(transfer)
        self._lacking = []
        self.ledger.end_lease(transfer)

    def _expire_waiting(self, now_s: float) -> None:
        for job in [job for job in self._waiting if job.deadline_s <= now_s]:
            self._waiting.remove(job)
            error = AdmissionTimeout("the generation worker had no room for the request in time")
            self._events.append(Refused(job.request.request_id, error))

    def _drop_finished(self) -> None:
        for sequence in self._decoding:
            if sequence.finish_reason is not None:
                self._reuse.leave_answer(sequence)
                self._let_go(sequence)
                self.counters.requests_finished += 1
        self._decoding = [s for s in self._decoding if s.finish_reason is None]

    def _grow(self) -> list[Sequence]:
        """Give everyone the pages of the coming step, the oldest first; returns whom there are none for.

        Who makes room is the youngest on the same rank: pages of another are of no use.
        """
        lacking = []
        for sequence in self._growth.lacking(self._decoding):
            if sequence.finish_reason is not None:
                continue  # preempted meanwhile
            while not self._growth.grow(sequence):
                rank = self.ledger.rank_of(sequence.request_id)
                youngest = next(
                    s for s in reversed(self._decoding) if self.ledger.rank_of(s.request_id) == rank
                )
                if youngest is sequence:
                    lacking.append(sequence)
                    break
                self._preempt(youngest)
        return lacking

    def _preempt(self, sequence: Sequence) -> None:
        """Its KV stays in the prefix cache until its pages are wanted, which may spare the next run some of it."""
        self._decoding.remove(sequence)
        self._reuse.leave_answer(sequence)
        sequence.finish_reason = "preempted"
        self._events.append(Emitted(sequence.report(())))
        self._let_go(sequence)
        self.counters.preemptions += 1

    def _let_go(self, sequence: Sequence) -> None:
        self._lacking = []  # there are pages again
        self.ledger.free(sequence.request_id)
        self._growth.forget(sequence.request_id)
        self.decode.forget(sequence.request_id)


def _since_s(job: _GenerationJob) -> float:
    return job.sequence.since_s


def _since(sequence: Sequence) -> float:
    return sequence.since_s


def _error(request_id: RequestId, reason: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason="error", error=reason)
