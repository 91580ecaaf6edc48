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

With a drafter that says how sure it is of each draft, the block is drafted in full and `trim` decides, when it is
there, how much of it to verify (`drafter.scheduling`). What is left to choose beforehand is whether to draft at all:
yes, but for the guard and for the plain steps that keep the costs known.

Pure: it is told durations and outcomes, and holds no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from drafter.acceptance import AcceptanceBook
from drafter.costs import StepCosts, batch_bucket
from drafter.scheduling import admit
from kvmanager.ids import RequestId

PolicyMode = Literal["full", "adaptive"]

_FIRST_MEASUREMENTS = 2  # of a full block and of a plain step each, before anything is chosen
_EXPLORE_SHARE = 0.02  # of the time spent may be lost to probes
_LEAST_CHARGE = 0.1  # of a probe's time: its expected loss is an estimate too
_ALLOWANCE_STEPS = 4.0  # plain steps' worth of allowance that can be saved up
_SWITCH_GAIN = 1.03
_START_GAIN = (
    1.06  # to begin drafting from plain decoding, where the best of many noisy estimates looks too good
)
_REFRESH_AFTER = 30  # steps after which an estimate that no step renewed counts as stale
_GUARD_DEFICIT = 0.015  # of target-only time that recent steps may have lost
_GUARD_MEMORY = 0.99  # weight of a step in the guard's balance after one more: about the last 100 steps


class BlockLengthPolicy:
    """Picks the number of drafts of each step. `mode`: "full" block, a fixed number, or "adaptive"."""

    def __init__(
        self, max_draft_tokens: int, mode: PolicyMode | int = "full", *, confident: bool = False
    ) -> None:
        """`max_draft_tokens`: the drafter's limit, 0 without one. A larger fixed `mode` is cut to it.

        `confident`: drafts come with confidences, and steps can verify some of them.
        """
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
        self._allowance_s = 0.0
        self._balance = _Balance()
        self._tokens_of_step = 0
        self._confident = confident and mode == "adaptive"
        self._measuring = False

    def choose(self, batch_size: int, requests: Sequence[RequestId]) -> int:
        """Drafts per request, 0 .. max_draft_tokens, for the next step of this batch."""
        if self._max == 0:
            return 0
        if isinstance(self._mode, int):
            return min(self._mode, self._max)
        if self._mode == "full":
            return self._max
        first = self._first_measurement()
        self._measuring = first is not None
        if first is not None:
            return first
        if self._balance.behind:
            self._current[batch_bucket(batch_size)] = 0
            return 0
        if self._confident:
            return 0 if self._stale(0) and self._pay(self._costs.step_s(batch_size, 0)) else self._max
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

    def trim(self, confidences: Sequence[Sequence[float]]) -> list[int]:
        """How many drafts of each request to verify, the block being there: all, but for a confident policy."""
        if not self._confident or self._measuring:
            return [len(drafts) for drafts in confidences]
        batch_size, num_draft = len(confidences), max(map(len, confidences))
        return admit(confidences, lambda tokens: self._costs.mixed_step_s(batch_size, num_draft, tokens))

    @property
    def trims(self) -> bool:
        """Whether `trim` has anything to say."""
        return self._confident

    def observe_acceptance(self, request: RequestId, num_draft: int, accepted: int) -> None:
        """One request's outcome of a step that verified `num_draft` drafts; before that step's `observe_cost`."""
        self._book.observe(request, num_draft, accepted)
        self._tokens_of_step += accepted + 1

    def observe_cost(
        self,
        batch_size: int,
        num_draft: int,
        draft_s: float,
        verify_s: float,
        num_verified: float | None = None,
    ) -> None:
        """One step's durations; `draft_s` is ignored when nothing was drafted.

        `num_verified`: drafts of a request that were verified, on average; all when it is not given.
        """
        self._costs.observe(batch_size, num_draft, draft_s, verify_s, num_verified)
        self._steps += 1
        self._last_done[num_draft if num_verified is None else round(num_verified)] = self._steps
        step_s = verify_s + (draft_s if num_draft else 0.0)
        plain_s = self._costs.step_s(batch_size, 0)
        ceiling = _ALLOWANCE_STEPS * plain_s
        self._allowance_s = min(self._allowance_s + _EXPLORE_SHARE * step_s, ceiling)
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
            if self._pay(charge * self._costs.step_s(batch_size, candidate)):
                return candidate
        return None

    def _pay(self, charge_s: float) -> bool:
        """Take a probe's charge from the allowance, if it is there."""
        if charge_s > self._allowance_s:
            return False
        self._allowance_s -= charge_s
        return True

    def _stale(self, num_draft: int) -> bool:
        return self._steps - self._last_done.get(num_draft, 0) >= _REFRESH_AFTER


class _Balance:
    """Recent steps against target-only decoding: fading sums of the time each would have taken and took."""

    def __init__(self) -> None:
        self._plain_s = 0.0
        self._spent_s = 0.0

    def add(self, plain_s: float, spent_s: float) -> None:
        self._plain_s = self._plain_s * _GUARD_MEMORY + plain_s
        self._spent_s = self._spent_s * _GUARD_MEMORY + spent_s

    @property
    def behind(self) -> bool:
        return self._spent_s > self._plain_s * (1 + _GUARD_DEFICIT)
