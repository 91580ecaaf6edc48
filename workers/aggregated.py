"""One worker that does both roles: prompts in chunks, then decoding, batched continuously.

    waiting ──admit──▶ prefilling ──last chunk, first token──▶ decoding ──end | cancel──▶ gone

Admission reserves the whole request in both ledgers (prompt, max_tokens, look-ahead), so a running request can
never be stranded for want of a page. A step is at most one prompt chunk and one decode step: a long prompt delays
the others' next token by one chunk and no more.
"""

from __future__ import annotations

from collections import deque

from kvmanager.errors import PoolExhausted, SlotsExhausted
from kvmanager.ids import RequestId
from kvmanager.ledgers import Ledger
from workers.admission import check_lengths, check_new, check_prompt, check_sampling, check_told
from workers.decode import DecodeLoop
from workers.engine import Emitted, EngineCounters, EngineEvent
from workers.errors import Overloaded
from workers.faults import Fault
from workers.limits import EngineLimits
from workers.prefill import PromptQueue
from workers.request import RequestOutput, SubmitRequest
from workers.reuse import PrefixReuse
from workers.runner import PromptRunner
from workers.sequence import Sequence


class AggregatedEngine:
    """Continuous batching of whole requests on one worker."""

    awaits_pages = False
    num_transfers = 0
    num_quarantined = 0

    def __init__(
        self, *, runner: PromptRunner, decode: DecodeLoop, ledger: Ledger, limits: EngineLimits
    ) -> None:
        self.ledger = ledger
        self.decode = decode
        self.counters = EngineCounters()
        self._runner = runner
        self._limits = limits
        self._reuse = PrefixReuse(ledger, limits)
        self._waiting: deque[Sequence] = deque()
        self._prefilling = PromptQueue(
            runner=runner,
            decode=decode,
            ledger=ledger,
            limits=limits,
            reuse=self._reuse,
            counters=self.counters,
        )
        self._decoding: list[Sequence] = []
        self._events: list[EngineEvent] = []

    def submit(self, request: SubmitRequest) -> None:
        """Queue a request. Raises InvalidRequest or Overloaded; nothing is kept then."""
        live = [*self._waiting, *self._prefilling, *self._decoding]
        check_new(request.request_id, [sequence.request_id for sequence in live])
        check_prompt(request.prompt_token_ids, self._limits.vocab_size)
        check_sampling(request.sampling, self._limits.vocab_size)
        num_prompt_tokens = len(request.prompt_token_ids)
        check_told(num_prompt_tokens, request.prompt_token_ids, request.sampling)
        check_lengths(num_prompt_tokens, request.sampling.max_tokens, self._limits.max_seq_len, self.ledger)
        if len(self._waiting) >= self._limits.max_waiting:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting already (max_waiting)", retry_after_s=1.0
            )
        self._waiting.append(
            self._limits.sequence(
                request.request_id, request.prompt_token_ids, request.sampling, request.cache_salt
            )
        )

    def step(self, now_s: float) -> list[EngineEvent]:
        self._admit()
        worked = False
        if self._prefilling:
            self._prefill()
            worked = True
        if self._decoding:
            self._events.extend(Emitted(output) for output in self.decode.step(self._decoding))
            self._drop_finished()
            worked = True
        self.counters.steps += worked
        events, self._events = self._events, []
        return events

    def cancel(self, request_id: RequestId) -> None:
        """End a request wherever it is; unknown and finished ones change nothing."""
        for queue in (self._waiting, self._decoding):
            for sequence in queue:
                if sequence.request_id == request_id:
                    queue.remove(sequence)
                    self._cancelled(sequence)
                    return
        prefilling = self._prefilling.remove(request_id)
        if prefilling is not None:
            self._cancelled(prefilling)

    def fail_all(self, reason: str) -> list[EngineEvent]:
        """End every request with an error; used when a step broke and its state cannot be trusted."""
        failed = [*self._waiting, *self._prefilling.clear(), *self._decoding]
        self._waiting.clear()
        self._decoding.clear()
        for sequence in failed:
            self.ledger.free(sequence.request_id)
        return [
            Emitted(RequestOutput(request_id=s.request_id, finish_reason="error", error=reason))
            for s in failed
        ]

    def inject(self, fault: Fault) -> None:
        self._runner.fault = fault
        self._reuse.inject(fault)

    def check(self) -> None:
        """Raise when the ledgers are corrupt or hold something although the engine is empty."""
        self.ledger.check()
        if self.idle and self.ledger.usage().slots_in_use:
            raise AssertionError("an idle engine holds slots")

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._prefilling or self._decoding or self._events)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _admit(self) -> None:
        """First come, first served: a request that does not fit yet holds back those behind it, so none starves."""
        while self._waiting:
            sequence = self._waiting[0]
            if self._reuse.worth_waiting(sequence, self._prefilling):
                return
            try:
                self.ledger.reserve(
                    sequence.request_id,
                    sequence.num_prompt_tokens + sequence.sampling.max_tokens,
                    self._reuse.prefix(sequence),
                    num_prompt_tokens=sequence.num_prompt_tokens,
                )
            except (PoolExhausted, SlotsExhausted):
                return
            self._prefilling.add(self._waiting.popleft())

    def _prefill(self) -> None:
        self._decoding += self._prefilling.step(self._events)
        self._drop_finished()

    def _cancelled(self, sequence: Sequence) -> None:
        sequence.finish_reason = "cancelled"
        self._events.append(Emitted(sequence.report(())))
        self.ledger.free(sequence.request_id)
        self.decode.forget(sequence.request_id)

    def _drop_finished(self) -> None:
        for sequence in self._decoding:
            if sequence.finish_reason is not None:
                self._reuse.leave_answer(sequence)
                self.ledger.free(sequence.request_id)
                self.decode.forget(sequence.request_id)
                self.counters.requests_finished += 1
        self._decoding = [s for s in self._decoding if s.finish_reason is None]
