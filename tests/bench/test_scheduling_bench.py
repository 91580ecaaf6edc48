"""The scheduling bench's own part: whose turn it is, what counts as best, and that the code path runs on a CPU."""

from __future__ import annotations

import argparse

import pytest

from tests.bench.scheduling import SCHEDULED, Bench, Row, broken_lengths, ways_in_turn, worker_config
from workers.assembly import load_models


def row(**speeds: float) -> Row:
    tokens_per_s = {name.removeprefix("fixed_"): speed for name, speed in speeds.items()}
    return Row("pair", 1, tokens_per_s, dict.fromkeys(tokens_per_s, 1.0), 1.0, 0, 0)


def test_every_way_comes_first_and_last_equally_often() -> None:
    ways = ["a", "b", "c"]
    turns = [ways_in_turn(ways, turn) for turn in range(6)]
    assert sorted(turn[0] for turn in turns) == sorted(turn[-1] for turn in turns) == sorted(ways * 2)
    assert all(sorted(turn) == ways for turn in turns)


def test_scheduling_is_compared_with_the_fixed_length_that_was_fastest() -> None:
    measured = row(scheduled=97.0, fixed_0=50.0, fixed_3=100.0, fixed_7=90.0)
    assert measured.best_fixed == "3"
    assert measured.ratio == pytest.approx(0.97)


def test_a_length_whose_drafts_are_accepted_less_than_those_behind_them_is_broken() -> None:
    sound = {SCHEDULED: 2.9, "0": 1.0, "1": 1.74, "2": 2.22, "3": 2.55, "7": 2.98}
    assert broken_lengths(sound) == []
    assert broken_lengths({way: sound[way] for way in ("7", "0", "2")}) == []
    (found,) = broken_lengths(sound | {"1": 1.10})  # what single drafts of other slots were worth
    assert "with 1 drafts the last adds 0.10 tokens a step, with 2 each further one 1.12" in found
    (found,) = broken_lengths({"0": 1.0, "3": 1.2, "7": 2.98})
    assert "with 3 drafts" in found


def test_all_ways_answer_alike_on_a_cpu() -> None:
    options = argparse.Namespace(
        device="cpu", threads=1, rounds=1, max_tokens=6, fixed=[0, 2, 7, 99], cpu_seconds=True
    )
    bench = Bench(load_models(worker_config("cpu", "tiny", 2, 1)), options, 2)
    measured = bench.run([[3, 5, 7, 11], [13, 17, 19], [23, 29]])
    assert [*measured.tokens_per_s] == [SCHEDULED, "0", "2", "7"]
    assert measured.tokens_per_step["0"] == 1.0
    assert (measured.parted, measured.wrong, measured.answers) == (0, [], 2 * 6 * 3)
    assert measured.requests_per_step == 2.0
