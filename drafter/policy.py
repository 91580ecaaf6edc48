"""How many tokens to draft in a step, 0 included: whatever promises most tokens per second for this batch.

A block pays only when the tokens it yields outweigh what drafting and the wider verification cost, and both
differ by machine, batch and text. So the policy divides expected tokens (`drafter.acceptance`) by measured
seconds (`drafter.row_costs`) and picks the best number, with three precautions:

* Exploration. Estimates of what is not being done go stale: acceptance while nothing is drafted, the plain
  decode step while everything is. Probes refresh them, paid from an allowance that grows with the time spent
  and is charged what the probe is expected to lose, so hopeless ones are rare. Plain steps grow rare: each wait for
  one is twice the last.
* Hysteresis. A different number must promise more than the present one.
* A guard. Time and tokens of recent steps are compared with what target-only decoding would have taken. When
  the balance falls behind by more than a little, nothing is drafted until it has recovered, whatever the
  estimates say. Probes are paid for already, and left out.

This is for steps that verify all they draft, of every request the same number, as captured graphs do. Where a drafter
says how sure it is of each draft and a step can verify some of them, `drafter.confident` decides. Between two steps the
device waits for it, so it does little: one number for the batch needs no look at each request, and most steps go on
with what was chosen before.

Pure: it is told durations and outcomes, and holds no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from drafter.acceptance import AcceptanceBook, hoped_tokens
from drafter.allowance import Allowance, Balance
from drafter.row_costs import RowCosts
from kvmanager.ids import RequestId

PolicyMode = Literal["full", "adaptive"]

_FIRST_BLOCKS, _FIRST_PLAIN = 4, 2  # full blocks and plain steps measured before anything is chosen
_LEAST_CHARGE = 0.1  # of a probe's time: its expected loss is an estimate too
_SWITCH_GAIN = 1.01
_START_GAIN = (
    1.04  # to begin drafting from plain decoding, where the best of many noisy estimates looks too good
)
_FIRST_INTERVAL, _LARGEST_INTERVAL = 32, 128  # steps between plain ones; each is twice the last
_LEARNING_STEPS, _LOOK_EVERY = (
    64,
    4,
)  # from then on only every so many steps, unless the batch changes, are looked at
_TELLING_BATCH = (
    4  # requests of which one probe shows as much as is needed: larger batches need no more of them
)


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

    def __init__(
        self,
        max_draft_tokens: int,
        mode: PolicyMode | int = "full",
        num_rows: Callable[[int, int], int] = lambda batch_size, num_draft: batch_size * (num_draft + 1),
    ) -> None:
        """`max_draft_tokens`: the drafter's limit, 0 without one. A larger fixed `mode` is cut to it.

        `num_rows`: how many tokens a step computes for so many requests with so many drafts each.
        """
        if max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens {max_draft_tokens} is negative")
        if isinstance(mode, int) and mode < 0:
            raise ValueError(f"draft tokens {mode} is negative")
        self._max = max_draft_tokens
        fixed = {"full": max_draft_tokens, "adaptive": None}.get(mode) if isinstance(mode, str) else mode
        self._fixed = None if fixed is None else min(fixed, max_draft_tokens)
        self._book = AcceptanceBook(max_draft_tokens)
        self._num_rows = num_rows
        self._costs = RowCosts(stepped=False)
        self._current: dict[int, int] = {}  # batch, padded as steps are -> number chosen last
        self._padded = 0
        self._steps = 0
        self._looking = True
        self._first = {0: 0, self._max: 0}  # of each, how often it was measured
        self._plain_ago = 0  # steps since the last one without drafts
        self._plain_every = _FIRST_INTERVAL
        self._allowance = Allowance()
        self._balance = Balance()
        self._probing = False
        self._charge_s = 0.0  # of the step under way, when it is a probe
        self._live: Sequence[RequestId] = ()
        self._accepted: list[int] = []  # of the step under way

    def choose(self, batch_size: int, requests: Sequence[RequestId]) -> int:
        """Drafts per request, 0 .. max_draft_tokens, for the next step of this batch."""
        if self._fixed is not None or self._max == 0:
            return self._fixed or 0
        self._live = requests
        padded = self._num_rows(batch_size, 0)
        changed, self._padded = padded != self._padded, padded
        self._looking = (
            changed or self._probing or self._steps < _LEARNING_STEPS or self._steps % _LOOK_EVERY == 0
        )
        if not self._looking:
            return self._current[padded]
        self._probing, self._charge_s = True, 0.0
        first = self._first_measurement()
        if first is not None:
            return first
        costs_s = self._steps_s(batch_size)
        rates = [
            tokens / step_s for tokens, step_s in zip(self._book.expected_tokens(), costs_s, strict=True)
        ]
        best = 0 if self._balance.behind else self._best(batch_size, rates)
        probe = None if self._balance.behind else self._probe(best, rates, costs_s)
        if probe is not None:
            return probe
        self._probing = False
        self._current[padded] = best
        return best

    def possible(self) -> range:
        """What `choose` may answer, ascending."""
        return range(self._max + 1) if self._fixed is None else range(self._fixed, self._fixed + 1)

    def trim(self, requests: Sequence[RequestId], confidences: Sequence[Sequence[float]]) -> list[int]:
        """All of them."""
        return [len(drafts) for drafts in confidences]

    def observe_acceptance(self, request: RequestId, num_draft: int, accepted: int) -> None:
        """One request's outcome of a step that verified `num_draft` drafts; before that step's `observe_cost`."""
        self._accepted.append(accepted)

    def observe_cost(
        self, batch_size: int, num_draft: int, draft_s: float, verify_s: float, num_verified: int
    ) -> None:
        """One step's durations; `draft_s` is ignored when nothing was drafted. All drafts were verified."""
        accepted, self._accepted = self._accepted, []
        if self._fixed is not None:
            return
        self._book.observe(num_draft, accepted)
        self._steps += 1
        if self._looking:
            padded = self._num_rows(batch_size, 0)
            self._costs.observe_verify(padded, self._num_rows(batch_size, num_draft), verify_s)
            if num_draft:
                self._costs.observe_draft(padded, num_draft, draft_s)
        if num_draft in self._first:
            self._first[num_draft] += 1
        self._plain_ago += 1
        if num_draft == 0:
            if self._plain_ago >= self._plain_every:
                self._plain_every = min(2 * self._plain_every, _LARGEST_INTERVAL)
            self._plain_ago = 0
        step_s = verify_s + (draft_s if num_draft else 0.0)
        plain_s = self._step_s(batch_size, 0)
        self._allowance.earn(step_s / min(batch_size, _TELLING_BATCH), plain_s)
        saved_s = (sum(accepted) / batch_size + 1) * plain_s  # that target-only decoding would have taken
        if not self._probing:
            self._balance.add(saved_s, step_s if num_draft else plain_s)
        elif num_draft and self._charge_s:
            # By the cost that is known by now, for one quick step proves nothing.
            self._allowance.settle(self._charge_s, self._step_s(batch_size, num_draft) - saved_s)

    def forget(self, request: RequestId) -> None:
        """Drop what is known of a request that has ended."""
        if request in self._live:
            self._book.forget(1 / len(self._live))
            self._live = [live for live in self._live if live != request]

    def _first_measurement(self) -> int | None:
        """A number to measure before choosing makes sense: the full block and the plain step, in turns."""
        full, plain = self._first[self._max], self._first[0]
        if full >= _FIRST_BLOCKS and plain >= _FIRST_PLAIN:
            return None
        return self._max if full <= plain or plain >= _FIRST_PLAIN else 0

    def _step_s(self, batch_size: int, num_draft: int) -> float:
        """Expected seconds of a step with so many drafts."""
        padded = self._num_rows(batch_size, 0)
        return self._costs.draft_s(padded, num_draft) + self._costs.verify_s(
            padded, self._num_rows(batch_size, num_draft)
        )

    def _steps_s(self, batch_size: int) -> list[float]:
        return [self._step_s(batch_size, num_draft) for num_draft in range(self._max + 1)]

    def _best(self, batch_size: int, rates: list[float]) -> int:
        best = max(range(len(rates)), key=rates.__getitem__)
        current = self._current.get(self._num_rows(batch_size, 0), best)
        gain = _START_GAIN if current == 0 else _SWITCH_GAIN
        return best if rates[best] > rates[current] * gain else current

    def _probe(self, best: int, rates: list[float], costs_s: list[float]) -> int | None:
        """A number worth trying for what it teaches, when the allowance covers its expected loss."""
        candidate = None
        if best == 0:
            # While nothing is drafted nothing is learnt of acceptance, so the number that would be best if text
            # were good again is always due.
            candidate = max(range(1, len(rates)), key=lambda k: hoped_tokens(k) / costs_s[k])
        elif self._plain_ago >= self._plain_every:
            candidate = 0
        if candidate is None:
            return None
        charge_s = max(1 - rates[candidate] / rates[best], _LEAST_CHARGE) * costs_s[candidate]
        if not self._allowance.pay(charge_s):
            return None
        self._charge_s = charge_s
        return candidate
