from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.attention.grouping import grouped

lengths = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 5000)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1,
    max_size=40,
)


@given(lengths, st.integers(1, 20000))
def test_every_request_is_in_exactly_one_group(lens: list[tuple[int, int]], max_positions: int) -> None:
    groups = grouped([q for q, _ in lens], [kv for _, kv in lens], max_positions=max_positions)
    assert sorted(member for group in groups for member in group) == list(range(len(lens)))


@given(lengths, st.integers(1, 20000))
def test_groups_are_even_and_bounded(lens: list[tuple[int, int]], max_positions: int) -> None:
    for group in grouped([q for q, _ in lens], [kv for _, kv in lens], max_positions=max_positions):
        counts = {lens[member][0] for member in group}
        assert len(counts) == 1 or max(counts) <= 16
        from_zero = {lens[member][0] == lens[member][1] for member in group}
        assert from_zero == {False} or (from_zero == {True} and len(counts) == 1)
        padded = len(group) * max(lens[member][1] for member in group)
        assert len(group) == 1 or padded <= max_positions
        assert padded <= 2 * sum(lens[member][1] for member in group)


def test_one_long_request_does_not_pad_the_short_ones_to_its_length() -> None:
    assert grouped([1, 1, 1], [4000, 30, 40], max_positions=100000) == [[1, 2], [0]]


def test_requests_of_like_length_stay_together_in_their_order() -> None:
    assert grouped([1, 1, 1], [40, 30, 35], max_positions=1000) == [[0, 1, 2]]


def test_requests_with_a_few_queries_each_share_a_group_and_long_chunks_do_not() -> None:
    assert grouped([1, 4, 8, 30, 1], [40, 44, 48, 60, 41], max_positions=1000) == [[0, 1, 2, 4], [3]]
