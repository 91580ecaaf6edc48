"""Which drafts are verified: prefixes, by falling chance or of all requests alike, whatever promises the best rate."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.scheduling import Admission, VerifyCosts, admit

BLOCKS = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.lists(st.floats(0.0, 1.0), min_size=width, max_size=width), min_size=1, max_size=5
    )
)


def admitted(
    chances: list[list[float]], verify_s: Callable[[int], float], draft_s: float = 0.0, uneven_s: float = 0.0
) -> Admission:
    """`verify_s(tokens)`, and `uneven_s` more where requests differ."""
    requests, width = len(chances), len(chances[0])
    even = [verify_s(requests * (drafts + 1)) for drafts in range(width + 1)]
    uneven = [verify_s(requests + drafts) + uneven_s for drafts in range(requests * width + 1)]
    return admit(chances, width, draft_s, VerifyCosts(even, uneven))


def expected(chances: list[list[float]], counts: tuple[int, ...] | list[int]) -> float:
    return sum(1 + sum(prod(row[: j + 1]) for j in range(k)) for row, k in zip(chances, counts, strict=True))


@settings(max_examples=60, deadline=None)
@given(BLOCKS, st.floats(0.1, 10), st.floats(0.01, 2), st.floats(0.0, 2.0))
def test_no_other_choice_of_prefixes_promises_more(
    chances: list[list[float]], draft_s: float, token_s: float, uneven_s: float
) -> None:
    found = admitted(chances, lambda tokens: token_s * tokens, draft_s, uneven_s)

    def rate(counts: tuple[int, ...]) -> float:
        step_s = draft_s + token_s * (len(counts) + sum(counts)) + (uneven_s if len({*counts}) > 1 else 0.0)
        return expected(chances, counts) / step_s

    best = max(map(rate, product(*(range(len(row) + 1) for row in chances))))
    assert rate(tuple(found.counts)) == pytest.approx(best)
    assert found.expected == pytest.approx(expected(chances, found.counts))
    assert found.expected / (draft_s + found.verify_s) == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(BLOCKS)
def test_free_tokens_are_all_verified_and_dear_ones_never(chances: list[list[float]]) -> None:
    assert admitted(chances, lambda _: 1.0).counts == [len(row) for row in chances]
    assert admitted(chances, lambda tokens: tokens**3).counts == [0] * len(chances)


def test_the_surer_request_gets_more_and_a_doubt_hides_what_stands_behind_it() -> None:
    sure, unsure, doubtful = [0.9] * 4, [0.5] * 4, [0.9, 0.1, 1.0, 1.0]
    assert admitted([sure, unsure, doubtful], lambda tokens: 6 + tokens * 0.5).counts == [4, 1, 1]


def test_requests_are_treated_alike_where_telling_them_apart_costs_more_than_it_saves() -> None:
    sure, unsure = [0.9] * 3, [0.6, 0.2, 0.1]
    assert admitted([sure, unsure], lambda tokens: 3 + tokens).counts == [3, 1]
    assert admitted([sure, unsure], lambda tokens: 3 + tokens, uneven_s=2.0).counts == [1, 1]


def test_a_step_in_the_costs_does_not_hide_what_pays_behind_it() -> None:
    """A staircase: the third token is dear, those behind it are free."""
    assert admitted([[0.9, 0.9, 0.9, 0.9]], lambda tokens: 1.0 if tokens < 3 else 2.0).counts == [4]
    assert admitted([[0.9, 0.9, 0.9, 0.9]], lambda tokens: 1.0 if tokens < 3 else 2.5).counts == [1]


def test_shorter_blocks_are_judged_without_what_they_leave_out() -> None:
    costs = VerifyCosts([1.0] * 5, [1.0] * 5)
    assert admit([[0.9, 0.9, 0.9, 0.9]], 2, 0.0, costs).counts == [2]
