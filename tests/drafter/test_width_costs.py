"""Costs by width: proportions hold whatever the machine's pace, and what lies between two widths is on a line."""

from __future__ import annotations

import math
import random

import pytest

from drafter.width_costs import WidthCosts

STEP_S = {1: 1.0e-3, 2: 1.3e-3, 4: 1.3e-3, 8: 1.7e-3}


def measured(noise: float, changes: float = 0.0, steps: int = 400) -> WidthCosts:
    """`changes`: in how many steps the machine's speed changes, by a fifth at most."""
    costs, rng, slowness = WidthCosts(), random.Random(1), 1.0
    for step in range(steps):
        width = 8 if step % 8 else rng.choice([*STEP_S])
        if rng.random() < changes:
            slowness = rng.uniform(0.8, 1.25)
        costs.observe(64, width, [STEP_S[width] * slowness * math.exp(rng.gauss(0.0, noise))])
    return costs


@pytest.mark.parametrize(("noise", "changes"), [(0.0, 0.0), (0.02, 0.0), (0.05, 0.0), (0.02, 0.02)])
def test_proportions_are_those_of_the_steps(noise: float, changes: float) -> None:
    costs = measured(noise, changes)
    for width, step_s in STEP_S.items():
        assert costs.step_s(64, width) / costs.step_s(64, 8) == pytest.approx(step_s / STEP_S[8], rel=0.05)


def test_a_slower_machine_slows_what_was_measured_before_alike() -> None:
    costs = measured(0.0)
    for _ in range(20):
        costs.observe(64, 8, [3 * STEP_S[8]])
    assert costs.step_s(64, 1) == pytest.approx(3 * STEP_S[1], rel=0.01)


def test_between_two_widths_costs_lie_on_a_line_and_beyond_them_nothing_is_known() -> None:
    costs = measured(0.0)
    assert costs.step_s(64, 6) == pytest.approx((STEP_S[4] + STEP_S[8]) / 2)
    for batch_size, width in ((64, 9), (8, 8)):
        with pytest.raises(KeyError):
            costs.step_s(batch_size, width)


def test_batches_that_are_rounded_up_alike_share_what_was_measured() -> None:
    costs = measured(0.0)
    assert costs.step_s(33, 8) == costs.step_s(64, 8)
    assert not costs.known(32, 8)


def test_quiet_machines_are_known_after_two_steps_and_noisy_ones_later() -> None:
    quiet, noisy = WidthCosts(), WidthCosts()
    for at in range(2):
        for costs, off in ((quiet, 0.01), (noisy, 0.2)):
            for width in (1, 8):
                costs.observe(1, width, [1.0 + off * at])
    assert quiet.known(1, 8)
    assert not noisy.known(1, 8)
    assert noisy.times(1, 8) == 2


def test_one_stall_moves_little() -> None:
    costs = measured(0.02)
    before = costs.step_s(64, 1) / costs.step_s(64, 8)
    costs.observe(64, 1, [1.0])
    costs.observe(64, 8, [STEP_S[8]])
    assert costs.step_s(64, 1) / costs.step_s(64, 8) == pytest.approx(before, rel=0.04)


def test_a_first_step_that_prepared_something_is_forgotten() -> None:
    costs = WidthCosts()
    for at in range(3):
        for width in (8, 1):
            costs.observe(1, width, [STEP_S[width] + (2.0 if at == 0 else 0.0)])
    for width in (8, 1):
        assert costs.known(1, width)
    assert costs.step_s(1, 8) / costs.step_s(1, 1) == pytest.approx(1.7, rel=0.1)
