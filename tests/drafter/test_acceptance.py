from __future__ import annotations

import random

import pytest

from drafter.acceptance import AcceptanceBook
from kvmanager.ids import RequestId

A, B = RequestId("a"), RequestId("b")


def feed(
    book: AcceptanceBook, request: RequestId, hazards: list[float], lengths: list[int], seed: int = 0
) -> None:
    """Steps of `request` whose numbers of drafts are `lengths`, accepted with the given hazards."""
    draw = random.Random(seed)
    for num_draft in lengths:
        accepted = 0
        while accepted < num_draft and draw.random() < hazards[accepted]:
            accepted += 1
        book.observe(request, num_draft, accepted)


def test_short_blocks_do_not_make_late_positions_look_bad() -> None:
    """Censoring: 400 blocks of 2 say nothing of positions 3 and 4, which 60 full blocks showed to be good."""
    hazards = [0.9, 0.9, 0.9, 0.9]
    book = AcceptanceBook(4)
    feed(book, A, hazards, [4] * 60 + [2] * 400)
    exact = [1.0]
    for position in range(4):
        exact.append(exact[-1] + 0.9 ** (position + 1))
    assert book.expected_tokens(A) == pytest.approx(exact, rel=0.08)


def test_a_rejected_position_counts_against_itself_and_not_against_those_behind() -> None:
    book = AcceptanceBook(3)
    for _ in range(200):
        book.observe(A, 3, 0)
    low = book.expected_tokens(A)
    assert low[1] < 1.1  # position 1 fails
    assert low[3] - low[2] < low[2] - low[1] < low[1] - low[0]
    for _ in range(200):
        book.observe(A, 3, 3)
    assert book.expected_tokens(A)[3] > 3.8


def test_requests_differ_and_a_new_one_starts_from_the_pool() -> None:
    book = AcceptanceBook(4)
    feed(book, A, [0.95] * 4, [4] * 100, seed=1)
    feed(book, B, [0.2] * 4, [4] * 100, seed=2)
    good, bad = book.expected_tokens(A)[4], book.expected_tokens(B)[4]
    stranger = book.expected_tokens(RequestId("new"))[4]
    assert good > 3.5
    assert bad < 1.8
    assert bad < stranger < good
    book.forget(A)
    book.forget(RequestId("never seen"))
    assert book.expected_tokens(A)[4] == stranger


def test_old_outcomes_fade() -> None:
    book = AcceptanceBook(2)
    for _ in range(300):
        book.observe(A, 2, 2)
    for _ in range(40):
        book.observe(A, 2, 0)
    assert book.expected_tokens(A)[2] < 1.5


def test_outcomes_that_cannot_be_are_refused() -> None:
    book = AcceptanceBook(3)
    for num_draft, accepted in ((2, 3), (4, 0), (2, -1)):
        with pytest.raises(ValueError, match="at most 3"):
            book.observe(A, num_draft, accepted)
