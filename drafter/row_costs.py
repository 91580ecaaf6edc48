"""What a step costs by the rows it computes, fitted to every step that was measured.

    verifying n tokens of b requests   v0 + v1 · n + v2 · b + s_2 + ... + s_min(n, 20)
                                       + sum over h = 16, 32, 64, 256 of v_h · max(n - h, 0)
                                       + (u · b + p · rows of padding, of some requests more than of others)
    drafting k tokens for b requests   d0 + d1 · b + d2 · b · k

What one step shows serves all batch sizes and draft counts, and no single measurement decides. Few rows have a step
each, for a CPU multiplies so many rows at a time, and the next one starts another pass: on AVX-512 up to 6 rows cost
the same, and 7 a quarter more. The hinges stand for where a processor stops being bound by reading weights: a CPU at
one of the first two (on AVX2 33 rows cost a tenth more than 32), a GPU at one of the others. Where requests verify
unlike numbers of tokens, attention computes several groups of them, and in each for every request what it does for the
widest: rows of padding, which no product sees. Squares of relative errors are least, old steps fade, and a prior that
does not keeps what the steps at hand do not tell apart.

Only proportions decide, but a machine that is shared or throttled may be twice as slow a minute later. So seconds are
divided by the machine's pace of the moment, which follows quickly: how long a step took over how long it was expected
to. A step that took half as long again, or more, is taken for a change of pace at once, and teaches little of costs:
machines that crawl for a while otherwise leave costs behind that take a hundred steps to mend.

Pure.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drafter.scheduling import VerifyCosts

_STEPS = 20  # the most rows that have a cost of their own
_HINGES = (16, 32, 64, 256)
_PACE_GAIN = 0.3  # how far one step moves the pace towards what it shows
_LARGEST_SURPRISE = 1.5  # what differs more from what was expected is the machine's pace, at once
_MEMORY = 0.995  # of a step after one more
# Coefficients in units of a lone request's plain step, and how many steps' worth of trust each has: a CPU of two cores
# with SmolLM2-135M.
_VERIFY_PRIOR = (0.85, 0.06, 0.02, 0.0, 0.0, 0.0, 0.03, 0.005, 0.015, *[0.0] * (_STEPS - 1))
_VERIFY_TRUST = (0.2, 20.0, 20.0, 20.0, 20.0, 20.0, 10.0, 100.0, 30.0, *[7.0] * (_STEPS - 1))
_DRAFT_PRIOR, _DRAFT_TRUST = (0.22, 0.05, 0.007), (0.5, 10.0, 200.0)
_LEAST_SHARE = 0.05  # of the unit: no step is cheaper
_ROW_FEATURES = [tuple(float(rows >= row) for row in range(2, _STEPS + 1)) for rows in range(_STEPS + 1)]


class RowCosts:
    """Expected seconds of steps. Before the first measurement in arbitrary but consistent units."""

    def __init__(self) -> None:
        self._verify = _Fit(_VERIFY_PRIOR, _VERIFY_TRUST)
        self._draft = _Fit(_DRAFT_PRIOR, _DRAFT_TRUST)
        self._unit_s = 0.0  # of a lone plain step, from the first measurement; 0 until there is one
        self._pace = 1.0

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._unit_s > 0

    def observe_verify(self, batch_size: int, num_tokens: int, seconds: float, padding: int = 0) -> None:
        """`num_tokens`: of the whole batch, the token that a request decodes anyway included.

        `padding`: how many more there would be, had every request as many as the one with most.
        """
        features = _verify_features(batch_size, num_tokens, padding)
        if not self._unit_s:
            self._unit_s = seconds / self._verify.at(features)
        self._observe(self._verify, features, seconds)

    def observe_draft(self, batch_size: int, num_draft: int, seconds: float) -> None:
        """After a verification, which knows the machine's pace."""
        self._observe(self._draft, _draft_features(batch_size, num_draft), seconds)

    def verify_s(self, batch_size: int, num_tokens: int, padding: int = 0) -> float:
        return self._scale * self._verify.at(_verify_features(batch_size, num_tokens, padding))

    def verify_costs(self, batch_size: int, num_draft: int) -> VerifyCosts:
        """Of so many requests with up to so many drafts each."""
        widest = batch_size * (num_draft + 1)
        even = [_verify_features(batch_size, batch_size * (k + 1), 0) for k in range(num_draft + 1)]
        uneven = [_verify_features(batch_size, n, widest - n) for n in range(batch_size, widest + 1)]
        seconds = self._verify.all(even + uneven, self._scale)
        return VerifyCosts(seconds[: len(even)], seconds[len(even) :])

    def draft_s(self, batch_size: int, num_draft: int) -> float:
        if num_draft == 0:
            return 0.0
        return self._scale * self._draft.at(_draft_features(batch_size, num_draft))

    def _observe(self, fit: _Fit, features: Sequence[float], seconds: float) -> None:
        expected = fit.at(features)
        ratio = seconds / (self._scale * expected)
        learnt = min(max(ratio, 1 / _LARGEST_SURPRISE), _LARGEST_SURPRISE)
        fit.add(features, expected, learnt)
        self._pace *= ratio if ratio != learnt else 1 + _PACE_GAIN * (ratio - 1)

    @property
    def _scale(self) -> float:
        return (self._unit_s or 1.0) * self._pace


class _Fit:
    """Linear least squares of relative errors, with a prior and fading."""

    def __init__(self, prior: Sequence[float], trust: Sequence[float]) -> None:
        self._trust = np.diag(np.asarray(trust, dtype=np.float64))
        self._moment = self._trust @ np.asarray(prior, dtype=np.float64)
        self._seen = np.zeros_like(self._trust)
        self._seen_moment = np.zeros_like(self._moment)
        self._coefficients: list[float] | None = [*prior]  # None: to be solved for

    def add(self, features: Sequence[float], expected: float, ratio: float) -> None:
        """A value was `ratio` times what was expected.

        Errors are relative to that. Relative to the value itself, low ones would count more: the fit would come out
        below the mean, and the pace, which makes up for it, would never stop rising.
        """
        row: npt.NDArray[np.float64] = np.asarray(features, dtype=np.float64) / expected
        self._seen *= _MEMORY
        self._seen += row[:, None] * row
        self._seen_moment *= _MEMORY
        self._seen_moment += ratio * row
        self._coefficients = None

    def at(self, features: Sequence[float]) -> float:
        value: float = sum(map(operator.mul, self._solved(), features))
        return max(value, _LEAST_SHARE)

    def all(self, features: Sequence[Sequence[float]], scale: float) -> list[float]:
        """`scale` times each of them."""
        values = (np.asarray(features) @ np.asarray(self._solved())).clip(_LEAST_SHARE)
        return [scale * value for value in values.tolist()]

    def _solved(self) -> list[float]:
        if self._coefficients is None:
            solved = np.linalg.solve(self._trust + self._seen, self._moment + self._seen_moment)
            self._coefficients = solved.tolist()
        return self._coefficients


def _verify_features(batch_size: int, num_tokens: int, padding: int) -> tuple[float, ...]:
    steps = _ROW_FEATURES[min(num_tokens, _STEPS)]
    hinges = (max(num_tokens - hinge, 0) for hinge in _HINGES)
    return 1.0, num_tokens, *hinges, batch_size, padding, batch_size if padding else 0.0, *steps


def _draft_features(batch_size: int, num_draft: int) -> tuple[float, ...]:
    return 1.0, batch_size, batch_size * num_draft
