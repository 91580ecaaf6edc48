"""How many tokens to draft in a step, 0 included: whatever promises most tokens per second for this batch.

A block pays only when the tokens it yields outweigh what drafting and the wider verification cost, and both
differ by machine, batch and text. So the policy divides expected tokens (`drafter.acceptance`) by measured
seconds (`drafter.costs`) and picks the best number, with three precautions:

* Exploration. Estimates of what is not being done go stale: acceptance while nothing is drafted, the plain
  decode step while everything is. Probes refresh them, paid from an allowance that grows with the time spent
  and is charged what the probe is expected to lose, so hopeless ones are rare.
* Hysteresis. A different number must promise clearly more than the present one.
* A guard. Time and tokens of recent steps are compared with what target-only decoding would have taken. When
  the balance falls behind by more than a little, nothing is drafted until it has recovered, whatever the
  estimates say.

This is for steps that verify all they draft, of every request the same number, as captured graphs do. Where a drafter
says how sure it is of each draft and a step can verify some of them, `drafter.confident` decides.

Pure: it is told durations and outcomes, and holds no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from drafter.acceptance import AcceptanceBook
from drafter.allowance import Allowance, Balance
from drafter.costs import StepCosts, batch_bucket
from kvmanager.ids import RequestId

PolicyMode = Literal["full", "adaptive"]

_FIRST_MEASUREMENTS = 2  # of a full block and of a plain step each, before anything is chosen
_LEAST_CHARGE = 0.1  # of a probe's time: its expected loss is an estimate too
_SWITCH_GAIN = 1.03
_START_GAIN = (
    1.06  # to begin drafting from plain decoding, where the best of many noisy estimates looks too good
)
_REFRESH_AFTER = 30  # steps after which an estimate that no step renewed counts as stale


class DraftingPolicy(Protocol):
    """What a decode loop asks before and tells after each step."""

    @property
    def trims(self) -> bool:
        """Whether `trim` has anything to say."""

    def choose(self, batch_size: int, requests: Sequence[RequestId]) -> int:
        """Drafts per request, 0 .. max_draft_tokens, for the next step of this batch."""

    def possible(self) -> range:
        """What `choose` may answer, ascending."""

    def trim(self, requests: Sequence[RequestId], confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many drafts of each request to verify, the block being there."""

    def observe_acceptance(self, request: RequestId, num_draft: int, accepted: int) -> None:
        """One request's outcome of a step that verified `num_draft` drafts; before that step's `observe_cost`."""

    def observe_cost(
        self, batch_size: int, num_draft: int, draft_s: float, verify_s: float, num_verified: int
    ) -> None:
        """One step's durations; `draft_s` is ignored when nothing was drafted. `num_verified`: drafts of all."""

    def forget(self, request: RequestId) -> None:
        """Drop what is known of a request that has ended."""


class BlockLengthPolicy:
    """Picks the number of drafts of each step. `mode`: "full" block, a fixed number, or "adaptive"."""

    trims = False

    def __init__(self, max_draft_tokens: int, mode: PolicyMode | int = "full") -> None:
        """`max_draft_tokens`: the drafter's limit, 0 without one. A larger fixed `mode` is cut to it."""
        if max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens {max_draft_tokens} is negative")
        if isinstance(mode, int) and mode < 0:
            raise ValueError(f"draft tokens {mode} is negative")
        self._max = max_draft_tokens
        self._mode = mode
        self._book = AcceptanceBook(max_draft_tokens)
        self._costs = StepCosts()
        self._current: dict[int, int] = {}  # bucket -> number chosen last
        self._steps = 0
        self._last_done: dict[int, int] = {}  # num_draft -> step of its last measurement
        self._allowance = Allowance()
        self._balance = Balance()
        self._tokens_of_step = 0

    def choose(self, batch_size: int, requests: Sequence[RequestId]) -> int:
        """Drafts per request, 0 .. max_draft_tokens, for the next step of this batch."""
        if self._max == 0:
            return 0
        if isinstance(self._mode, int):
            return min(self._mode, self._max)
        if self._mode == "full":
            return self._max
        first = self._first_measurement()
        if first is not None:
            return first
        if self._balance.behind:
            self._current[batch_bucket(batch_size)] = 0
            return 0
        rates = self._rates(batch_size, requests)
        best = self._best(batch_size, rates)
        probe = self._probe(batch_size, best, rates)
        if probe is not None:
            return probe
        self._current[batch_bucket(batch_size)] = best
        return best

    def possible(self) -> range:
        """What `choose` may answer, ascending."""
        if self._mode == "adaptive":
            return range(self._max + 1)
        only = self._max if self._mode == "full" else min(self._mode, self._max)
        return range(only, only + 1)

    def trim(self, requests: Sequence[RequestId], confidences: Sequence[Sequence[float]]) -> list[int]:
        """All of them."""
        return [len(drafts) for drafts in confidences]

    def observe_acceptance(self, request: RequestId, num_draft: int, accepted: int) -> None:
        """One request's outcome of a step that verified `num_draft` drafts; before that step's `observe_cost`."""
        self._book.observe(request, num_draft, accepted)
        self._tokens_of_step += accepted + 1

    def observe_cost(
        self, batch_size: int, num_draft: int, draft_s: float, verify_s: float, num_verified: int
    ) -> None:
        """One step's durations; `draft_s` is ignored when nothing was drafted. All drafts were verified."""
        self._costs.observe(batch_size, num_draft, draft_s, verify_s)
        self._steps += 1
        self._last_done[num_draft] = self._steps
        step_s = verify_s + (draft_s if num_draft else 0.0)
        plain_s = self._costs.step_s(batch_size, 0)
        self._allowance.earn(step_s, plain_s)
        self._balance.add(self._tokens_of_step / batch_size * plain_s, step_s if num_draft else plain_s)
        self._tokens_of_step = 0

    def forget(self, request: RequestId) -> None:
        """Drop what is known of a request that has ended."""
        self._book.forget(request)

    def _first_measurement(self) -> int | None:
        """A number to measure before choosing makes sense: the full block and the plain step, in turns."""
        full, plain = self._costs.measured_anywhere(self._max), self._costs.measured_anywhere(0)
        if min(full, plain) >= _FIRST_MEASUREMENTS:
            return None
        return self._max if full <= plain else 0

    def _rates(self, batch_size: int, requests: Sequence[RequestId]) -> list[float]:
        """Tokens per second of the whole batch with 0, 1, ..., max drafts."""
        tokens = [0.0] * (self._max + 1)
        for request in requests:
            for num_draft, expected in enumerate(self._book.expected_tokens(request)):
                tokens[num_draft] += expected
        return [total / self._costs.step_s(batch_size, k) for k, total in enumerate(tokens)]

    def _best(self, batch_size: int, rates: list[float]) -> int:
        best = max(range(len(rates)), key=rates.__getitem__)
        current = self._current.get(batch_bucket(batch_size), best)
        gain = _START_GAIN if current == 0 else _SWITCH_GAIN
        return best if rates[best] > rates[current] * gain else current

    def _probe(self, batch_size: int, best: int, rates: list[float]) -> int | None:
        """A number worth trying for what it teaches, when the allowance covers its expected loss."""
        candidates: list[int] = []
        if best == 0:
            # While nothing is drafted nothing is learnt of acceptance, so the most promising number is always
            # due.
            candidates.append(max(range(1, len(rates)), key=rates.__getitem__))
        elif self._stale(0):
            candidates.append(0)
        for near in (best + 1, best - 1):
            if 0 < near <= self._max and best and not self._costs.measurements(batch_size, near):
                candidates.append(near)
        for candidate in candidates:
            charge = max(1 - rates[candidate] / rates[best], _LEAST_CHARGE)
            if self._allowance.pay(charge * self._costs.step_s(batch_size, candidate)):
                return candidate
        return None

    def _stale(self, num_draft: int) -> bool:
        return self._steps - self._last_done.get(num_draft, 0) >= _REFRESH_AFTER
