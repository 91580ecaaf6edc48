from __future__ import annotations

import random

import pytest

from drafter.acceptance import AcceptanceBook


def feed(book: AcceptanceBook, hazards: list[float], lengths: list[int], seed: int = 0) -> None:
    """Steps of one request whose numbers of drafts are `lengths`, accepted with the given hazards."""
    draw = random.Random(seed)
    for num_draft in lengths:
        accepted = 0
        while accepted < num_draft and draw.random() < hazards[accepted]:
            accepted += 1
        book.observe(num_draft, [accepted])


def test_short_blocks_do_not_make_late_positions_look_bad() -> None:
    """Censoring: 400 blocks of 2 say nothing of positions 3 and 4, which 60 full blocks showed to be good."""
    hazards = [0.9, 0.9, 0.9, 0.9]
    book = AcceptanceBook(4)
    feed(book, hazards, [4] * 60 + [2] * 400)
    exact = [1.0]
    for position in range(4):
        exact.append(exact[-1] + 0.9 ** (position + 1))
    assert book.expected_tokens() == pytest.approx(exact, rel=0.08)


def test_a_rejected_position_counts_against_itself_and_not_against_those_behind() -> None:
    book = AcceptanceBook(3)
    for _ in range(200):
        book.observe(3, [0])
    low = book.expected_tokens()
    assert low[1] < 1.1  # position 1 fails
    assert low[3] - low[2] < low[2] - low[1] < low[1] - low[0]
    for _ in range(200):
        book.observe(3, [3])
    assert book.expected_tokens()[3] > 3.8


def test_requests_that_differ_are_counted_as_the_mixture_they_are() -> None:
    """Half of the blocks accepted in full, half not at all: each position behind the first is certain."""
    book = AcceptanceBook(4)
    for _ in range(100):
        book.observe(4, [4, 0, 4, 0])
    assert book.expected_tokens() == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0], rel=0.03)


def test_a_request_that_ends_takes_what_it_did_late_along_and_not_what_blocks_did_for_long() -> None:
    book = AcceptanceBook(2)
    feed(book, [0.5, 0.5], [2] * 400)
    usual = book.expected_tokens()[2]
    for _ in range(20):
        book.observe(2, [2])
    late = book.expected_tokens()[2]
    book.forget(0.5)
    half = book.expected_tokens()[2]
    book.forget(1.0)
    assert usual < book.expected_tokens()[2] < half < late
    assert book.expected_tokens()[2] < (usual + late) / 2


def test_old_outcomes_fade() -> None:
    book = AcceptanceBook(2)
    for _ in range(300):
        book.observe(2, [2])
    for _ in range(40):
        book.observe(2, [0])
    assert book.expected_tokens()[2] < 1.5


def test_outcomes_that_cannot_be_are_refused() -> None:
    book = AcceptanceBook(3)
    for num_draft, accepted in ((2, [1, 3]), (4, [0]), (2, [-1, 2])):
        with pytest.raises(ValueError, match="at most 3"):
            book.observe(num_draft, accepted)
