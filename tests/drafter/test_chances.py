"""Chances learnt from outcomes: monotone in confidence, calibrated, and kept apart by request."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from drafter.chances import ChanceBook
from kvmanager.ids import RequestId

A, B = RequestId("a"), RequestId("b")
CONFIDENCE = st.floats(0.0, 1.0)


def taught(book: ChanceBook, request: RequestId, shift: float, steps: int = 400) -> ChanceBook:
    """Blocks of 4 whose true chances are the confidences with `shift` added to their logits."""
    rng = random.Random(3)
    for _ in range(steps):
        said = [rng.uniform(0.05, 0.95) for _ in range(4)]
        accepted = 0
        while accepted < 4 and rng.random() < true(said[accepted], shift):
            accepted += 1
        book.observe(request, said, accepted)
    return book


def true(confidence: float, shift: float) -> float:
    return 1 / (1 + math.exp(-math.log(confidence / (1 - confidence)) - shift))


def test_before_anything_was_seen_the_drafter_is_trusted() -> None:
    first, *later = ChanceBook(4).chances(A, [0.8, 0.8, 0.8])
    assert first == pytest.approx(0.8)
    assert later == pytest.approx([0.8, 0.8], abs=0.05)


@example([(0.0, True), (0.0, True), (1.0, False), (1.0, False)], 0.0, 1.0)
@given(st.lists(st.tuples(CONFIDENCE, st.booleans()), max_size=40), CONFIDENCE, CONFIDENCE)
def test_chances_are_probabilities_and_rise_with_confidence(
    seen: list[tuple[float, bool]], one: float, other: float
) -> None:
    book = ChanceBook(1)
    for confidence, right in seen:
        book.observe(A, [confidence], int(right))
    low, high = (book.chances(A, [confidence])[0] for confidence in sorted((one, other)))
    assert 0.0 < low <= high < 1.0


@pytest.mark.parametrize("shift", [-1.0, 0.0, 1.0])
def test_a_vain_and_a_modest_drafter_are_seen_through(shift: float) -> None:
    book = taught(ChanceBook(4), A, shift)
    for confidence in (0.3, 0.6, 0.9):
        assert book.chances(A, [confidence])[0] == pytest.approx(true(confidence, shift), abs=0.12)


def test_a_request_has_a_bias_of_its_own_until_it_ends() -> None:
    book = ChanceBook(4)
    for _ in range(20):
        taught(book, A, 1.5, steps=5)
        taught(book, B, -1.5, steps=5)
    of_a, of_b = (book.chances(request, [0.5])[0] for request in (A, B))
    assert of_a > of_b + 0.15
    book.forget(A)
    book.forget(A)
    assert of_b < book.chances(A, [0.5])[0] < of_a


def test_drafts_behind_a_wrong_one_were_not_tried() -> None:
    book = ChanceBook(3)
    before = book.chances(B, [0.5, 0.5, 0.5])
    book.observe(A, [0.5, 0.5, 0.5], 0)
    after = book.chances(B, [0.5, 0.5, 0.5])
    falls = [a - b for a, b in zip(before, after, strict=True)]
    assert falls[0] > falls[1] == pytest.approx(falls[2], rel=0.1)
    with pytest.raises(ValueError, match="accepted 4 of 3"):
        book.observe(A, [0.5, 0.5, 0.5], 4)
