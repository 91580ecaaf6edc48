"""Temperatures that make confidences honest, from left to right."""

from __future__ import annotations

import numpy as np
import pytest

from drafter.calibration import calibration_error, fit_temperatures, running_products

TRUE = [2.0, 0.5, 1.0]


def blocks(count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Logits that claim too much, too little and just enough, and outcomes drawn from the honest chances."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.5, 1.5, (count, len(TRUE)))
    right = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / np.array(TRUE)))
    return logits, np.cumprod(right, axis=1).sum(axis=1)


def test_the_temperatures_that_made_the_outcomes_are_found() -> None:
    assert fit_temperatures(*blocks(20_000)) == pytest.approx(TRUE, rel=0.1)


def test_running_products_become_honest() -> None:
    logits, accepted = blocks(5_000)
    found = fit_temperatures(logits, accepted)
    held_out, outcomes = blocks(5_000, seed=2)
    raw = calibration_error(running_products(held_out, [1.0] * 3), outcomes)
    scaled = calibration_error(running_products(held_out, found), outcomes)
    assert raw > 0.02
    assert scaled < 0.015


def test_a_later_draft_is_fitted_to_what_the_earlier_ones_left() -> None:
    """Draft 1 claims 0.5 and is always right: no temperature can say so, and draft 2 makes up for it."""
    logits = np.array([[0.0, 1.0]] * 100)
    accepted = np.array([2] * 40 + [1] * 60)
    first, second = fit_temperatures(logits, accepted)
    claimed = running_products(logits, [first, second])[0]
    assert claimed == pytest.approx([0.5, 0.4], abs=0.01)


def test_without_blocks_there_is_nothing_to_fit() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        fit_temperatures(np.zeros((0, 3)), np.zeros(0, dtype=np.int64))
