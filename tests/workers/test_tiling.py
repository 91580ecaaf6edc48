"""Cutting products for a GPU: everything computed once, in what a multiprocessor holds, and evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.tiling import INPUTS, MOST_GATED_ROWS, Tiling, most_rows, tiling

AT_ONCE = {1: 132, 2: 132, 4: 128}  # an H200
LAYER = {"qkv": (6144, 4096), "output": (4096, 4096), "down": (4096, 12288)}  # of an 8B shape


@given(
    st.integers(1, MOST_GATED_ROWS),
    st.integers(1, 10_000).map(lambda n: 16 * n),
    st.integers(1, 300),
    st.booleans(),
)
def test_a_product_is_cut_into_programs_that_fit(
    num_rows: int, outputs: int, stages_of_inputs: int, gated: bool
) -> None:
    inputs, num_rows = stages_of_inputs * INPUTS, min(num_rows, most_rows(gated))
    found = tiling(num_rows, outputs, inputs, gated, AT_ONCE)
    assert num_rows <= found.rows <= max(16, 2 * num_rows)
    assert inputs % (found.parts * INPUTS) == 0
    assert found.stages >= 2
    assert found.shared_bytes <= 227 << 10
    assert found.threads <= 1024
    # What parts add up lies where stages were.
    assert found.parts == 1 or found.rows * found.tiles * 64 * 4 <= found.stages * found.stage_bytes
    assert not (gated and found.parts > 1)


@pytest.mark.parametrize("name", LAYER)
@pytest.mark.parametrize("num_rows", [16, 64])
def test_products_of_a_layer_keep_nearly_every_multiprocessor_busy(name: str, num_rows: int) -> None:
    outputs, inputs = LAYER[name]
    found = tiling(num_rows, outputs, inputs, False, AT_ONCE)
    assert 120 <= -(-outputs // found.outputs) * found.parts <= 132


def test_a_gated_product_is_cut_by_outputs_alone() -> None:
    assert tiling(16, 12288, 4096, True, AT_ONCE) == Tiling(16, 3, 1, True)


def test_few_clusters_at_once_count() -> None:
    """Where clusters of four leave too many multiprocessors empty, another cut is better."""
    assert tiling(16, 6144, 4096, False, AT_ONCE).parts == 4
    assert tiling(16, 6144, 4096, False, {1: 132, 2: 132, 4: 60}).parts != 4


@pytest.mark.parametrize(
    ("num_rows", "inputs", "gated"), [(0, 64, False), (65, 64, False), (129, 64, True), (16, 96, False)]
)
def test_other_products_are_refused(num_rows: int, inputs: int, gated: bool) -> None:
    with pytest.raises(ValueError, match=f"at most {most_rows(gated)}"):
        tiling(num_rows, 64, inputs, gated, AT_ONCE)
