"""How many tokens to draft in a step, 0 included: whatever promises most tokens per second for this batch.

A block pays only when the tokens it yields outweigh what drafting and the wider verification cost, and both
differ by machine, batch and text. So the policy divides expected tokens (`drafter.acceptance`, `drafter.beginnings`) by
measured seconds (`drafter.width_costs`) and picks the best number, with two precautions:

* Exploration. Of each batch a few widths are measured before anything is chosen. Later, estimates of what is not being
  done go stale: acceptance while nothing is drafted, costs of other widths. Probes refresh them; each waits twice as
  long as the last one, or longer if that lost much, and one that paid is followed by another at once.
* Hysteresis. A different number must promise more than the present one.

This is for steps that verify all they draft, of every request the same number, as captured graphs do. Where a drafter
says how sure it is of each draft and a step can verify some of them, `drafter.confident` decides. Between two steps the
device waits for the policy, so it does next to nothing: a stretch of steps goes on with one number, and what these
steps did is looked at when the stretch is over.

Pure: it is told durations and outcomes, and holds no clock.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from drafter.acceptance import AcceptanceBook, hoped_tokens
from drafter.beginnings import Beginnings
from drafter.width_costs import WidthCosts, size_class
from kvmanager.ids import RequestId

PolicyMode = Literal["full", "adaptive"]

_SWITCH_GAIN = 1.01
_LONGEST_STRETCH = 8  # steps that draft alike: one after a change of mind, and then twice as many each time
_FIRST_INTERVAL, _LARGEST_INTERVAL = 32, 256  # steps between probes; each is twice the last


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
        """One step's durations: drafting, which is ignored when nothing was drafted, and all the rest of it.

        `num_verified`: drafts of all.
        """

    def forget(self, request: RequestId) -> None:
        """Drop what is known of a request that has ended."""


@dataclass(slots=True)
class _Stretch:
    """Steps in a row, of batches of one size class, that draft alike.

    `steps_s`: of those that are done. `accepted`: in them, of every request.
    """

    batch_size: int = 1
    num_draft: int = 0
    steps: int = 0
    probes: bool = False
    steps_s: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def holds(self, batch_size: int) -> bool:
        """Whether steps of that batch may be part of it."""
        return batch_size == self.batch_size or size_class(batch_size) == size_class(self.batch_size)


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
        self._fixed = None if fixed is None and max_draft_tokens else min(fixed or 0, max_draft_tokens)
        self._widths = [num_rows(1, num_draft) // num_rows(1, 0) for num_draft in range(max_draft_tokens + 1)]
        # Of those of one width, which cost the same, only the largest are worth choosing.
        self._choices = sorted({width: number for number, width in enumerate(self._widths)}.values())
        self._measured = [k for k in self._choices if (k + 1).bit_count() == 1 or k == max_draft_tokens]
        self._book = AcceptanceBook(max_draft_tokens)
        self._beginnings = Beginnings(max_draft_tokens)
        self._costs = WidthCosts()
        self._current, self._longest = self._choices[-1], 1
        self._stretch = _Stretch()
        self._steps = 0
        self._probe_at = self._interval = _FIRST_INTERVAL
        self._probed = 0  # how many probes there were
        self._live: Sequence[RequestId] = ()
        self._accepted: list[int] = []  # of the step under way

    def choose(self, batch_size: int, requests: Sequence[RequestId]) -> int:
        """Drafts per request, 0 .. max_draft_tokens, for the next step of this batch."""
        if self._fixed is not None:
            return self._fixed
        self._live = requests
        stretch = self._stretch
        if len(stretch.steps_s) >= stretch.steps or not stretch.holds(batch_size):
            self._look_back()
            stretch = self._stretch = self._next(batch_size)
        return stretch.num_draft

    def possible(self) -> range:
        """What `choose` may answer, ascending."""
        return range(self._max + 1) if self._fixed is None else range(self._fixed, self._fixed + 1)

    def trim(self, requests: Sequence[RequestId], confidences: Sequence[Sequence[float]]) -> list[int]:
        """All of them."""
        return [len(drafts) for drafts in confidences]

    def observe_acceptance(self, request: RequestId, num_draft: int, accepted: int) -> None:
        """One request's outcome of a step that verified `num_draft` drafts; before that step's `observe_cost`."""
        if self._fixed is None:
            self._accepted.append(accepted)
            if request not in self._beginnings.passed_over:
                self._beginnings.observe(request, num_draft, accepted)

    def observe_cost(
        self, batch_size: int, num_draft: int, draft_s: float, verify_s: float, num_verified: int
    ) -> None:
        """One step's durations; `draft_s` is ignored when nothing was drafted. All drafts were verified."""
        if self._fixed is not None:
            return
        accepted, self._accepted = self._accepted, []
        step_s = verify_s + draft_s if num_draft else verify_s
        stretch = self._stretch
        if stretch.num_draft == num_draft and stretch.holds(batch_size):
            stretch.steps_s.append(step_s)
            stretch.accepted += accepted
        else:  # requests that named their own number
            self._learn(batch_size, num_draft, [step_s], accepted)

    def forget(self, request: RequestId) -> None:
        """Drop what is known of a request that has ended."""
        self._beginnings.forget(request)
        if request in self._live:
            self._book.forget(1 / len(self._live))
            self._live = [live for live in self._live if live != request]

    def _look_back(self) -> None:
        """Learn from the stretch that is over."""
        stretch = self._stretch
        if not stretch.steps_s:
            return
        self._learn(stretch.batch_size, stretch.num_draft, stretch.steps_s, stretch.accepted)
        self._steps += len(stretch.steps_s)
        if not stretch.probes:
            return
        current_s = self._step_s(stretch.batch_size, self._current)
        tokens = sum(stretch.accepted) / len(stretch.accepted) + 1
        replaced_steps = tokens / self._tokens()[self._current]
        lost_steps = self._step_s(stretch.batch_size, stretch.num_draft) / current_s - replaced_steps
        if lost_steps < 0:
            self._interval, self._probe_at = _FIRST_INTERVAL, self._steps
        else:
            self._interval = min(2 * self._interval, _LARGEST_INTERVAL)
            self._probe_at = self._steps + int(self._interval * max(lost_steps, 1.0))

    def _learn(self, batch_size: int, num_draft: int, steps_s: list[float], accepted: list[int]) -> None:
        self._book.observe(num_draft, accepted, len(steps_s))
        self._costs.observe(batch_size, self._widths[num_draft], steps_s)

    def _next(self, batch_size: int) -> _Stretch:
        unknown = [k for k in self._measured if not self._costs.known(batch_size, self._widths[k])]
        if unknown:
            others = [
                k for k in self._measured if k != self._stretch.num_draft
            ]  # a step tells nothing beside its like
            _, number = min((self._costs.times(batch_size, self._widths[k]), -k) for k in others)
            return _Stretch(batch_size, -number, 1)
        tokens = self._tokens()
        rates = {number: tokens[number] / self._step_s(batch_size, number) for number in self._choices}
        best = max(rates, key=rates.__getitem__)
        self._longest = min(2 * self._longest, _LONGEST_STRETCH)
        if rates[best] > rates[self._current] * _SWITCH_GAIN:
            self._current, self._longest = best, 1
        if self._steps >= self._probe_at:
            self._probed += 1
            return _Stretch(batch_size, self._probe(batch_size), 1, probes=True)
        return _Stretch(batch_size, self._current, self._longest)

    def _probe(self, batch_size: int) -> int:
        """A number worth trying for what it teaches."""
        if self._current == 0:
            # Nothing is learnt of acceptance, so the number is due that would be best if text were good again.
            return max(self._choices[1:], key=lambda k: hoped_tokens(k) / self._step_s(batch_size, k))
        others = [number for number in self._measured if number != self._current]
        return others[self._probed % len(others)]

    def _tokens(self) -> list[float]:
        """Expected of a request by a step with 0, 1, ... drafts."""
        return [*map(operator.mul, self._book.expected_tokens(), self._beginnings.factors())]

    def _step_s(self, batch_size: int, num_draft: int) -> float:
        """Expected seconds of a step with so many drafts."""
        return self._costs.step_s(batch_size, self._widths[num_draft])
