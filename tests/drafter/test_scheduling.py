"""Which drafts are verified: prefixes, by falling chance, up to the number that promises the best rate."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.scheduling import admit

BLOCKS = st.lists(st.lists(st.floats(0.0, 1.0), max_size=5), min_size=1, max_size=5)


def rate(
    confidences: list[list[float]], counts: tuple[int, ...] | list[int], fixed_s: float, token_s: float
) -> float:
    expected = sum(
        1 + sum(prod(row[: j + 1]) for j in range(k)) for row, k in zip(confidences, counts, strict=True)
    )
    return expected / (fixed_s + token_s * (len(counts) + sum(counts)))


@settings(max_examples=60, deadline=None)
@given(BLOCKS, st.floats(0.1, 10), st.floats(0.01, 2))
def test_with_a_cost_in_proportion_to_tokens_no_other_choice_of_prefixes_promises_more(
    confidences: list[list[float]], fixed_s: float, token_s: float
) -> None:
    counts = admit(confidences, lambda tokens: fixed_s + token_s * tokens)
    best = max(
        rate(confidences, choice, fixed_s, token_s)
        for choice in product(*(range(len(row) + 1) for row in confidences))
    )
    assert rate(confidences, counts, fixed_s, token_s) == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(BLOCKS)
def test_free_tokens_are_all_verified_and_dear_ones_never(confidences: list[list[float]]) -> None:
    assert admit(confidences, lambda _: 1.0) == [len(row) for row in confidences]
    assert admit(confidences, lambda tokens: tokens**3) == [0] * len(confidences)


def test_the_surer_request_gets_more_and_a_doubt_hides_what_stands_behind_it() -> None:
    sure, unsure, doubtful = [0.9] * 4, [0.5] * 4, [0.9, 0.1, 1.0, 1.0]
    counts = admit([sure, unsure, doubtful], lambda tokens: 6 + tokens * 0.5)
    assert counts == [4, 1, 1]


def test_a_step_in_the_costs_does_not_hide_what_pays_behind_it() -> None:
    """A staircase: the third token is dear, those behind it are free."""
    assert admit([[0.9, 0.9, 0.9, 0.9]], lambda tokens: 1.0 if tokens < 3 else 2.0) == [4]
    assert admit([[0.9, 0.9, 0.9, 0.9]], lambda tokens: 1.0 if tokens < 3 else 2.5) == [1]


def test_nothing_to_schedule_is_nothing() -> None:
    assert admit([], lambda _: 1.0) == []
    assert admit([[], [0.5]], lambda _: 1.0) == [0, 1]
