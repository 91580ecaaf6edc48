from __future__ import annotations

import pytest

from drafter.costs import StepCosts, batch_bucket


def test_a_measured_step_costs_its_median_so_that_a_hiccup_does_not_count() -> None:
    costs = StepCosts()
    for verify_s in (0.05, 0.05, 0.06, 9.0, 0.04):
        costs.observe(1, 0, 0.0, verify_s)
    assert costs.step_s(1, 0) == 0.05


def test_numbers_between_two_measured_ones_lie_on_the_line_with_the_draft_on_top() -> None:
    costs = StepCosts()
    costs.observe(1, 0, 0.0, 0.048)
    costs.observe(1, 7, 0.039, 0.083)
    assert costs.step_s(1, 7) == pytest.approx(0.122)
    assert costs.step_s(1, 2) == pytest.approx(0.048 + 2 * 0.005 + 0.039, abs=0.005)
    assert costs.step_s(1, 0) == 0.048  # no draft is charged to a plain step


def test_a_batch_size_without_measurements_borrows_the_nearest_ones_proportions() -> None:
    costs = StepCosts()
    costs.observe(8, 0, 0.0, 0.1)
    costs.observe(8, 7, 0.1, 0.3)
    assert costs.step_s(6, 7) / costs.step_s(6, 0) == pytest.approx(4.0)
    costs.observe(1, 0, 0.0, 0.05)
    assert costs.step_s(1, 7) == pytest.approx(0.05 * 3 + 0.1)


def test_before_anything_is_measured_longer_blocks_cost_more() -> None:
    steps = [StepCosts().step_s(4, num_draft) for num_draft in range(8)]
    assert steps == sorted(steps)
    assert steps[0] > 0


def test_batch_sizes_share_buckets_upwards() -> None:
    assert [batch_bucket(n) for n in (1, 5, 8, 9, 16, 17, 64)] == [1, 5, 8, 16, 16, 32, 64]
    with pytest.raises(ValueError, match="not positive"):
        batch_bucket(0)
