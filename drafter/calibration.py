"""Sequential temperature scaling: confidences whose running products mean what they say.

A confidence head is trained against an average over tokens; what scheduling reads is the product of its confidences
from the anchor on. One temperature for each draft, fitted from left to right with those before it fixed, makes that
product as likely as it claims: σ(l_1 / t_1) · ... · σ(l_k / t_k) against whether drafts 1 .. k were all accepted, by
the least log loss.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Outcomes = npt.NDArray[np.bool_]

_COLDEST, _HOTTEST = 0.05, 20.0
_ROUNDS = 40  # of golden section: the interval shrinks to 1e-8 of itself
_SMALLEST = 1e-7


def fit_temperatures(logits_NK: Floats, accepted_N: npt.NDArray[np.int64]) -> list[float]:
    """A temperature for each of K drafts, from N blocks' confidence logits and how many drafts each had accepted.

    Raises ValueError for no blocks.
    """
    if len(logits_NK) == 0 or len(logits_NK) != len(accepted_N):
        raise ValueError(
            f"{len(logits_NK)} blocks of logits, {len(accepted_N)} outcomes: some of both are needed"
        )
    survival_N: Floats = np.ones(len(logits_NK), dtype=np.float64)
    temperatures = []
    for draft in range(logits_NK.shape[1]):
        before_N, logits_N, outcome_N = survival_N, logits_NK[:, draft], accepted_N > draft

        loss = partial(_loss_at, before_N, logits_N, outcome_N)
        temperature = math.exp(_least(loss, math.log(_COLDEST), math.log(_HOTTEST)))
        temperatures.append(temperature)
        survival_N = survival_N * _sigmoid(logits_N / temperature)
    return temperatures


def running_products(logits_NK: Floats, temperatures: Sequence[float]) -> Floats:
    """Claimed chances, [N, K], that drafts 1 .. k are all accepted."""
    chances_NK = _sigmoid(logits_NK / np.asarray(temperatures, dtype=np.float64))
    return np.asarray(np.cumprod(chances_NK, axis=1), dtype=np.float64)


def calibration_error(claimed_NK: Floats, accepted_N: npt.NDArray[np.int64], bins: int = 10) -> float:
    """Expected calibration error of claimed running products, pooled over the drafts: 0 is perfect."""
    happened_NK = accepted_N[:, None] > np.arange(claimed_NK.shape[1])
    which = np.minimum((claimed_NK * bins).astype(np.int64), bins - 1)
    error = 0.0
    for one in range(bins):
        inside = which == one
        if inside.any():
            error += abs(float(claimed_NK[inside].sum()) - float(happened_NK[inside].sum()))
    return error / claimed_NK.size


def _sigmoid(x: Floats) -> Floats:
    result: Floats = 1.0 / (1.0 + np.exp(-np.clip(x, -500, 500)))
    return result


def _loss_at(before_N: Floats, logits_N: Floats, outcome_N: Outcomes, log_temperature: float) -> float:
    return _log_loss(before_N * _sigmoid(logits_N / math.exp(log_temperature)), outcome_N)


def _log_loss(claimed_N: Floats, outcome_N: Outcomes) -> float:
    safe = np.clip(claimed_N, _SMALLEST, 1 - _SMALLEST)
    return float(-np.where(outcome_N, np.log(safe), np.log1p(-safe)).mean())


def _least(loss: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley is least, by golden section."""
    golden = (math.sqrt(5) - 1) / 2
    inner_low, inner_high = high - golden * (high - low), low + golden * (high - low)
    at_low, at_high = loss(inner_low), loss(inner_high)
    for _ in range(_ROUNDS):
        if at_low <= at_high:
            high, inner_high, at_high = inner_high, inner_low, at_low
            inner_low = high - golden * (high - low)
            at_low = loss(inner_low)
        else:
            low, inner_low, at_low = inner_low, inner_high, at_high
            inner_high = low + golden * (high - low)
            at_high = loss(inner_high)
    return (low + high) / 2
