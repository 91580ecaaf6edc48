"""Ranks that cannot share a model are refused by the dimension that does not divide, before anything is read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.workers.random_pair import write_random_pair
from tests.workers.split_pair import config
from workers.assembly import load_models
from workers.config import PairSpec
from workers.errors import ModelMismatch


@pytest.mark.parametrize(
    ("size", "what"), [(3, "num_attention_heads 4"), (8, "num_attention_heads 4"), (4, "vocab_size 6")]
)
def test_a_dimension_that_does_not_divide_is_named(tmp_path: Path, size: int, what: str) -> None:
    vocabulary = {"vocab_size": 6} if "vocab" in what else {}  # two rows each, and none for the fourth
    pair = write_random_pair(tmp_path, num_attention_heads=4, head_dim=8, **vocabulary)
    told = msgspec.structs.replace(
        config("aggregated", drafting=False), pair=PairSpec(name="", target=str(pair.target_path))
    )
    one_of_them: Any = SimpleNamespace(rank=0, size=size)  # and no way to reach the others
    with pytest.raises(
        ModelMismatch, match=f"{what} cannot be divided among {size} tensor-parallel"
    ) as caught:
        load_models(told, one_of_them)
    assert caught.value.field == "tensor_parallel_size"
