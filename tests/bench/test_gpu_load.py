"""The load bench: who meets the SLO, what the quantiles are of, and arrivals that do not wait for anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.gpu.load import Life, arrivals, load_points, save_points, summarize

SLO = (1.0, 0.03)


def life(ttft_s: float, gap_s: float, tokens: int = 5, error: str = "") -> Life:
    times = [10.0 + ttft_s + index * gap_s for index in range(tokens)]
    return Life(10.0, tokens_s=times, ended_s=times[-1], error=error)


@pytest.mark.parametrize(
    ("one", "meets"),
    [
        (life(0.9, 0.02), True),
        (life(1.1, 0.02), False),
        (life(0.9, 0.04), False),
        (life(0.9, 0.02, error="the transfer broke"), False),
        (Life(10.0), False),
        (Life(10.0, tokens_s=[10.5], ended_s=None), False),
        (life(0.9, 0.02, tokens=1), True),
    ],
)
def test_a_request_counts_when_it_ended_well_and_met_both_bounds(one: Life, meets: bool) -> None:
    assert one.meets(*SLO) is meets


def test_a_point_has_the_quantiles_of_all_requests_and_counts_the_failed_ones() -> None:
    lives = [life(0.1, 0.01), life(0.3, 0.03), life(5.0, 0.01), Life(10.0, error="refused", ended_s=10.1)]
    point = summarize(lives, rate=2.0, seconds=2.0, slo=SLO)
    assert point.ttft_s[0] == pytest.approx(0.3)
    assert point.ttft_s[1] == pytest.approx(0.3 + 0.98 * 4.7)
    assert point.itl_s[0] == pytest.approx(0.01)
    assert (point.offered, point.goodput, point.failed) == (2.0, 1.0, 1)


def test_points_of_one_run_are_there_for_the_next(tmp_path: Path) -> None:
    point = summarize([life(0.1, 0.01)], rate=2.0, seconds=2.0, slo=SLO)
    save_points({"split": [point]}, tmp_path / "points.json")
    assert load_points(tmp_path / "points.json") == {"split": [point]}
    assert load_points(tmp_path / "none.json") == {}


def test_arrivals_are_the_same_for_both_arrangements_and_come_at_the_rate() -> None:
    times = arrivals(50.0, 20.0, seed=3)
    assert times == arrivals(50.0, 20.0, seed=3)
    assert times == sorted(times)
    assert times[-1] < 20.0
    assert len(times) == pytest.approx(1000, rel=0.15)
