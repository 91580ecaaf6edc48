"""What blocks of one length show of another: right for text that is easy in places, and left alone where it is even."""

from __future__ import annotations

import random
from itertools import accumulate
from operator import mul

import pytest

from drafter.beginnings import Beginnings
from kvmanager.ids import RequestId

MAX = 7
TEXTS = {
    "even": ([0.75] * 2, 0.5),
    "easy in places": ([0.45, 0.93], 0.12),
}  # chances that a draft is right in hard and in easy text, and that one token's kind is not the last one's


def right(text: str, seed: int, length: int = 12_000) -> list[bool]:
    """For every position, whether a draft there would be right."""
    chances, change = TEXTS[text]
    rng, kind, found = random.Random(seed), 0, []
    for _ in range(length):
        kind = 1 - kind if rng.random() < change else kind
        found.append(rng.random() < chances[kind])
    return found


def outcomes(found: list[bool], num_draft: int) -> list[int]:
    """Accepted drafts of blocks of that length, one after the other."""
    accepted, at = [], 0
    while at + num_draft < len(found):
        accepted.append(next((k for k in range(num_draft) if not found[at + k]), num_draft))
        at += accepted[-1] + 1
    return accepted


def hazards(accepted: list[int], num_draft: int) -> list[float]:
    """Of all blocks together, what they do not show being as what they show last."""
    shown = [sum(a > k for a in accepted) / sum(a >= k for a in accepted) for k in range(num_draft)]
    return shown + shown[-1:] * (MAX - num_draft)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("in_use", [3, 7])
def test_estimates_hold_for_lengths_that_are_not_in_use(text: str, in_use: int) -> None:
    found = right(text, seed=1)
    book, seen = Beginnings(MAX), outcomes(found, in_use)
    for accepted in seen:
        book.observe(RequestId("a"), in_use, accepted)
    tokens = [*accumulate([1.0, *accumulate(hazards(seen, in_use), mul)])]
    for other in (2, 3, 5, 7):
        held = outcomes(found, other)
        real = sum(held) / len(held) + 1
        corrected = tokens[other] * book.factors()[other]
        assert corrected == pytest.approx(real, rel=0.035)
        if text == "easy in places" and other != in_use and abs(tokens[other] / real - 1) > 0.03:
            assert abs(corrected / real - 1) < abs(tokens[other] / real - 1)


def test_nothing_seen_changes_nothing() -> None:
    assert Beginnings(3).factors() == [1.0] * 4


def test_a_few_requests_are_followed_and_the_next_ones_when_they_end() -> None:
    book = Beginnings(3)
    ids = [RequestId(str(number)) for number in range(20)]
    for request in ids:
        book.observe(request, 3, 1)
    assert book.passed_over == {*ids[8:]}
    for request in ids[:10]:
        book.forget(request)
    assert book.passed_over == {*ids[10:]}
    book.observe(RequestId("new"), 3, 1)
    assert RequestId("new") not in book.passed_over
