"""Costs fitted over all steps: right where measured, sensible where not, and steady under noise and a changing pace."""

from __future__ import annotations

import math
import random

import pytest

from drafter.row_costs import RowCosts


def verify_s(batch: int, tokens: int) -> float:
    return 0.03 + 0.0011 * tokens + 0.0008 * max(tokens - 16, 0) + 0.001 * batch


def draft_s(batch: int, num_draft: int) -> float:
    return 0.004 + 0.002 * batch + 0.0003 * batch * num_draft


def measured(noise: float = 0.0, slowness: float = 1.0, steps: int = 400) -> RowCosts:
    costs, rng = RowCosts(), random.Random(1)
    for step in range(steps):
        batch, num_draft = rng.choice([1, 2, 4, 8]), rng.randint(0, 7)
        factor = math.exp(rng.gauss(0.0, noise)) * (slowness if step > steps // 2 else 1.0)
        verified = rng.randint(0, batch * num_draft)
        costs.observe_verify(batch, batch + verified, factor * verify_s(batch, batch + verified))
        if num_draft:
            costs.observe_draft(batch, num_draft, factor * draft_s(batch, num_draft))
    return costs


@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_steps_like_those_measured_are_expected_rightly(noise: float) -> None:
    costs = measured(noise)
    one = costs.verify_s(8, 8)
    for batch, tokens in ((1, 1), (1, 8), (4, 12), (8, 24), (8, 64)):
        assert costs.verify_s(batch, tokens) / one == pytest.approx(
            verify_s(batch, tokens) / verify_s(8, 8), rel=0.12
        )
    assert costs.draft_s(8, 7) / one == pytest.approx(draft_s(8, 7) / verify_s(8, 8), rel=0.15)
    assert costs.draft_s(8, 0) == 0.0


def test_what_requests_of_unlike_widths_take_longer_is_learnt() -> None:
    costs, rng = RowCosts(), random.Random(2)

    def taken_s(batch: int, tokens: int, padding: int) -> float:
        return verify_s(batch, tokens) + (0.004 * batch + 0.0005 * padding if padding else 0.0)

    for _ in range(400):
        batch, num_draft = rng.choice([4, 8]), rng.randint(1, 7)
        verified = rng.randint(num_draft, batch * num_draft)
        padding = batch * num_draft - verified
        tokens = batch + verified
        costs.observe_verify(batch, tokens, taken_s(batch, tokens, padding), padding)
    found = costs.verify_costs(8, 3)
    for drafts, seconds in enumerate(found.uneven_s):
        wanted = taken_s(8, 8 + drafts, 24 - drafts) / verify_s(8, 8)
        assert seconds / found.even_s[0] == pytest.approx(wanted, rel=0.12)
    assert found.even_s[2] / found.even_s[0] == pytest.approx(verify_s(8, 24) / verify_s(8, 8), rel=0.12)
    assert found.uneven_s[16] > 1.2 * found.even_s[2]


def test_a_slower_machine_changes_no_proportion() -> None:
    at_speed, slowed = measured(), measured(slowness=3.0)
    assert slowed.verify_s(4, 16) / at_speed.verify_s(4, 16) == pytest.approx(3.0, rel=0.1)
    for tokens in (4, 32):
        assert slowed.verify_s(4, tokens) / slowed.verify_s(4, 16) == pytest.approx(
            at_speed.verify_s(4, tokens) / at_speed.verify_s(4, 16), rel=0.1
        )


def test_a_hiccup_moves_little() -> None:
    costs = measured()
    before = costs.verify_s(8, 24) / costs.verify_s(8, 8)
    costs.observe_verify(8, 24, 50.0)
    assert costs.verify_s(8, 24) / costs.verify_s(8, 8) == pytest.approx(before, rel=0.05)


def test_one_measurement_gives_every_step_a_price() -> None:
    costs = RowCosts()
    assert not costs.known
    costs.observe_verify(1, 1, 0.05)
    assert costs.known
    assert costs.verify_s(1, 1) == pytest.approx(0.05)
    prices = [costs.verify_s(8, tokens) for tokens in range(8, 65)]
    assert prices == sorted(prices)
    assert prices[0] > 0.05
    assert 0 < costs.draft_s(1, 7) < costs.draft_s(8, 7)


def test_a_step_in_the_cost_of_few_rows_is_found() -> None:
    """As on a CPU that multiplies six rows at a time: the seventh costs what no line through the others says."""
    costs, rng = RowCosts(), random.Random(2)
    for _ in range(200):
        rows = rng.randint(1, 8)
        costs.observe_verify(1, rows, (0.05 if rows <= 6 else 0.063) * math.exp(rng.gauss(0.0, 0.03)))
    assert costs.verify_s(1, 6) == pytest.approx(costs.verify_s(1, 2), rel=0.09)
    assert costs.verify_s(1, 7) / costs.verify_s(1, 6) == pytest.approx(1.26, rel=0.1)
