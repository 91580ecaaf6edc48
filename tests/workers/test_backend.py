from __future__ import annotations

import pytest
import torch

from kvmanager.layout import KvGeometry
from workers.backend import choose_backend
from workers.memory import Memory
from workers.working import WorkingSet

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dims", "chosen"),
    [
        (CPU, torch.bfloat16, [128], "torch"),
        (GPU, torch.float32, [128], "torch"),
        (GPU, torch.bfloat16, [128, 64], "flashinfer"),
        (GPU, torch.float16, [64], "flashinfer"),
        (GPU, torch.bfloat16, [128, 32], "torch"),
    ],
)
def test_flashinfer_serves_half_precision_on_gpus_and_torch_the_rest(
    device: torch.device, dtype: torch.dtype, head_dims: list[int], chosen: str
) -> None:
    assert choose_backend(device, dtype, head_dims) == chosen


def test_what_others_use_and_what_computing_takes_come_off_the_budget() -> None:
    assert Memory(total=1000, free=700).budget(0.9, working_bytes=100) == 900 - 300 - 100


def working(**changes: int) -> WorkingSet:
    sizes = {
        "num_heads": 32, "draft_heads": 32, "hidden_size": 4096, "intermediate_size": 12288, "vocab_size": 151936,
        "num_taps": 5, "max_batch": 32, "width": 16, "block_size": 16, "chunk_tokens": 8192,
    }  # fmt: skip
    target = KvGeometry(num_layers=36, num_kv_heads=8, head_dim=128, page_size=16, element_bytes=2)
    draft = KvGeometry(num_layers=5, num_kv_heads=8, head_dim=128, page_size=16, element_bytes=2)
    return WorkingSet(target=target, draft=draft, **sizes | changes)


def test_a_mixture_s_rows_count_on_every_rank_that_meets_the_token() -> None:
    alone, dense = working(expert_elements=8 * 3 * (768 + 4096)), working()
    of_a_token = 8 * 3 * (768 + 4096) * 2
    assert alone.eager_bytes - dense.eager_bytes > 2 * 8192 * (of_a_token - 3 * 12288 * 2)
    met = working(expert_elements=8 * 3 * (768 + 4096), num_ranks_met=4)
    assert met.eager_bytes - alone.eager_bytes > 2 * 8192 * 3 * of_a_token


def test_attention_scratch_holds_flashinfers_partial_results() -> None:
    """Its own formula at the largest captured step: heads x units x tile x (head_dim + 1) floats."""
    num_units = max(2 * 132 // 8, 128 * 16 * 4 // 128 + 128 - 1)
    assert working(max_batch=128).attention_bytes(132) >= 32 * num_units * 128 * 129 * 4
    assert working(max_batch=1).attention_bytes(132) >= 32 * (2 * 132 // 8) * 128 * 129 * 4


@pytest.mark.parametrize("larger", ["max_batch", "chunk_tokens", "vocab_size", "hidden_size"])
def test_larger_workers_need_more_memory_to_compute(larger: str) -> None:
    plain = working()
    assert working(**{larger: 4 * getattr(plain, larger)}).captured_bytes(132) > plain.captured_bytes(132)
