"""Sizes of pages and pools."""

from __future__ import annotations

import math

import pytest

from kvmanager.errors import InvalidCount
from kvmanager.layout import KvGeometry


def test_five_draft_layers_of_sixteen_heads_take_20480_bytes_per_token_and_an_eighth_on_eight_ranks() -> None:
    whole = KvGeometry(num_layers=5, num_kv_heads=16, head_dim=64, page_size=64, element_bytes=2)
    rank = KvGeometry(num_layers=5, num_kv_heads=2, head_dim=64, page_size=64, element_bytes=2)
    assert whole.bytes_per_token == 20_480
    assert rank.bytes_per_token == 2_560


def test_a_pool_is_pages_of_layer_interleaved_heads() -> None:
    geometry = KvGeometry(num_layers=3, num_kv_heads=2, head_dim=8, page_size=16, element_bytes=4)
    assert geometry.pool_shape(10) == (10, 3, 2, 2, 16, 8)
    assert math.prod(geometry.pool_shape(10)) * geometry.element_bytes == 10 * geometry.page_bytes


@pytest.mark.parametrize(
    ("num_tokens", "num_pages"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)]
)
def test_pages_round_up_at_the_page_edge(num_tokens: int, num_pages: int) -> None:
    geometry = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=1, page_size=16, element_bytes=1)
    assert geometry.pages_for(num_tokens) == num_pages


def test_sizes_below_one_are_refused_by_name() -> None:
    with pytest.raises(InvalidCount, match="page_size is 0, but must be at least 1"):
        KvGeometry(num_layers=1, num_kv_heads=1, head_dim=1, page_size=0, element_bytes=2)
    with pytest.raises(InvalidCount, match="num_tokens is -1"):
        KvGeometry(1, 1, 1, 16, 2).pages_for(-1)
