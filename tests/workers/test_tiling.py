"""Cutting products for a GPU: everything computed once, in what a multiprocessor holds, and evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.tiling import INPUTS, MOST_ROWS, SHARED_BYTES, Tiling, tiling, tilings

AT_ONCE = {1: 132, 2: 132}  # an H200
LAYER = {"qkv": (6144, 4096), "output": (4096, 4096), "down": (4096, 12288)}  # of an 8B shape


@given(
    st.integers(1, MOST_ROWS),
    st.integers(1, 10_000).map(lambda n: 16 * n),
    st.integers(1, 300),
    st.booleans(),
)
def test_every_way_to_cut_a_product_fits(
    num_rows: int, outputs: int, stages_of_inputs: int, gated: bool
) -> None:
    inputs = stages_of_inputs * INPUTS
    ways = list(tilings(num_rows, outputs, inputs, gated))
    for way in ways:
        assert num_rows <= way.rows <= max(16, 2 * num_rows)
        assert inputs % (way.parts * INPUTS) == 0
        assert way.stages >= 2
        assert way.x_stages >= 2
        assert 1 <= way.ahead <= way.stages
        assert way.shared_bytes <= SHARED_BYTES
        assert way.threads <= 1024
        assert not (gated and way.parts > 1)
    best = tiling(num_rows, outputs, inputs, gated, AT_ONCE)
    assert best in ways or (best is None and num_rows > 64)
    # Parts that have to wait for each other are there at the same time.
    assert best is None or best.parts == 1 or -(-outputs // best.outputs) * best.parts <= AT_ONCE[best.parts]


@pytest.mark.parametrize(("name", "programs"), [("qkv", 96), ("output", 128), ("down", 128)])
@pytest.mark.parametrize("num_rows", [16, 64, 128])
def test_products_of_a_layer_keep_most_multiprocessors_busy(name: str, programs: int, num_rows: int) -> None:
    outputs, inputs = LAYER[name]
    found = tiling(num_rows, outputs, inputs, False, AT_ONCE)
    assert found is not None
    assert -(-outputs // found.outputs) * found.parts == programs


def test_a_gated_product_is_cut_by_outputs_alone() -> None:
    assert tiling(16, 12288, 4096, True, AT_ONCE) == Tiling(16, 3, 1, True)


def test_few_clusters_at_once_count() -> None:
    """Where clusters leave too many multiprocessors empty, another cut is better."""
    wanted = tiling(16, 6144, 4096, False, AT_ONCE)
    assert wanted is not None
    assert wanted.parts == 2
    for few in (60, 0):
        other = tiling(16, 6144, 4096, False, {1: 132, 2: few})
        assert other is not None
        assert other.parts == 1


def test_many_rows_of_a_large_head_are_left_to_torch() -> None:
    assert tiling(64, 151936, 4096, False, AT_ONCE) is not None
    assert tiling(65, 151936, 4096, False, AT_ONCE) is None


@pytest.mark.parametrize(("num_rows", "inputs"), [(0, 64), (129, 64), (16, 96)])
def test_other_products_are_refused(num_rows: int, inputs: int) -> None:
    with pytest.raises(ValueError, match=f"at most {MOST_ROWS}"):
        tiling(num_rows, 64, inputs, False, AT_ONCE)
