from __future__ import annotations

import pytest

from drafter.costs import StepCosts, batch_bucket


def test_a_hiccup_is_soon_forgotten() -> None:
    costs = StepCosts()
    for verify_s in [0.05] * 10 + [5.0] + [0.05] * 15:
        costs.observe(1, 0, 0.0, verify_s)
    assert costs.step_s(1, 0) == pytest.approx(0.05, rel=0.06)


def test_a_slower_machine_slows_every_number_though_only_one_is_measured() -> None:
    costs = StepCosts()
    for _ in range(5):
        costs.observe(1, 0, 0.0, 0.05)
        costs.observe(1, 7, 0.04, 0.10)
    for _ in range(30):
        costs.observe(1, 7, 0.08, 0.20)
    assert costs.step_s(1, 0) == pytest.approx(0.10, rel=0.2)
    assert costs.step_s(1, 7) == pytest.approx(0.28, rel=0.1)


def test_a_number_measured_again_after_long_corrects_what_was_wrong_about_it() -> None:
    costs = StepCosts()
    costs.observe(1, 0, 0.0, 0.15)  # three times its true cost: the machine was busy just then
    for _ in range(3):
        for _ in range(60):
            costs.observe(1, 7, 0.04, 0.10)
        costs.observe(1, 0, 0.0, 0.05)
    assert costs.step_s(1, 0) / costs.step_s(1, 7) == pytest.approx(0.05 / 0.14, rel=0.25)


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
    assert costs.step_s(1, 7) == pytest.approx(0.05 * 3 + 0.1)  # its own verification, the other's draft


def test_before_anything_is_measured_longer_blocks_cost_more() -> None:
    steps = [StepCosts().step_s(4, num_draft) for num_draft in range(8)]
    assert steps == sorted(steps)
    assert steps[0] > 0


def test_batch_sizes_share_buckets_upwards() -> None:
    assert [batch_bucket(n) for n in (1, 5, 8, 9, 16, 17, 64)] == [1, 5, 8, 16, 16, 32, 64]
    with pytest.raises(ValueError, match="not positive"):
        batch_bucket(0)
