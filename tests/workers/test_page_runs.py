from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.attention.pages import page_runs


@given(
    lens=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 40)), min_size=1, max_size=6),
    page_size=st.integers(1, 8),
    factor=st.integers(1, 3),
)
def test_runs_and_offsets_say_what_the_page_table_says(
    lens: list[tuple[int, int]], page_size: int, factor: int
) -> None:
    q_lens = [q_len for q_len, _ in lens]
    kv_lens = [q_len + before for q_len, before in lens]
    max_pages = -(-max(kv_lens) // page_size) + 1
    rows = np.arange(1, len(lens) * max_pages + 1, dtype=np.int32).reshape(len(lens), max_pages)
    runs = page_runs(rows, kv_lens, page_size, factor)
    for request, kv_len in enumerate(kv_lens):
        entries = runs.entries[runs.starts[request] : runs.starts[request + 1]]
        assert entries.tolist() == (rows[request, : -(-kv_len // page_size)] * factor).tolist()
        assert (len(entries) - 1) * page_size + runs.last_page_lens[request] == kv_len
    assert runs.starts[len(lens)] == len(runs.entries)
    assert runs.kv_lens.tolist() == kv_lens
    expected = [
        int(rows[request, position // page_size]) * factor * 1000 + position % page_size * 10
        for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True))
        for position in range(kv_len - q_len, kv_len)
    ]
    assert runs.offsets(q_lens, 1000, 10).tolist() == expected


def test_a_step_without_requests_is_refused() -> None:
    with pytest.raises(ValueError, match="0 lengths"):
        page_runs(np.zeros((0, 1), np.int32), [], 4)


@pytest.mark.parametrize("kv_lens", [[0, 3], [3, 9], [3]])
def test_lengths_that_the_rows_cannot_hold_are_refused(kv_lens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"kv_lens|page rows"):
        page_runs(np.zeros((2, 2), np.int32), kv_lens, 4)


def test_more_queries_than_positions_are_refused() -> None:
    runs = page_runs(np.zeros((1, 2), np.int32), [5], 4)
    with pytest.raises(ValueError, match="do not fit"):
        runs.offsets([6], 1, 1)
