"""Mixtures of experts on a GPU: the CPU's scores in float32, and grouped products that a captured step can hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.layers import TORCH_OPS
from tests.workers.paged import PagedDecoder
from tests.workers.random_pair import write_random_pair
from tests.workers.split_pair import config as small_config
from tests.workers.tiny_checkpoints import config_of, random_tensors, write_directory
from workers.assembly import build, load_models
from workers.config import PairSpec
from workers.models.experts import GroupedExperts, LoopedExperts, MixtureMlp, make_experts
from workers.models.load import load_decoder
from workers.step import EagerStep

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
TOKENS = [(7 * i * i + 3 * i) % 61 for i in range(60)]
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": 8,
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_of("qwen3_moe", **WIDE)
    return write_directory(tmp_path_factory.mktemp("mixture"), config, random_tensors(config))


def test_float32_scores_are_those_of_a_cpu(checkpoint: Path) -> None:
    there, here = (
        PagedDecoder(load_decoder(checkpoint, torch.float32, device), max_positions=64).logits({0: TOKENS})
        for device in ("cuda", "cpu")
    )
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=1e-4)


@pytest.mark.parametrize("ends", [[4, 4, 11, 12, 27], [0, 0, 0, 0, 30], [30] * 5, [0] * 5], ids=str)
def test_one_grouped_product_moves_rows_as_one_product_an_expert_does(ends: list[int]) -> None:
    generator = torch.Generator("cuda").manual_seed(4)

    def random(*shape: int) -> Tensor:
        return (
            torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5
        )

    gate_up, down, rows = random(5, 2 * 24, 64), random(5, 64, 24), random(30, 64)
    assert isinstance(make_experts(gate_up, down, TORCH_OPS), GroupedExperts)
    ends_E = torch.tensor(ends, dtype=torch.int32, device="cuda")
    looped = LoopedExperts(gate_up, down, TORCH_OPS)(rows, ends_E)
    grouped = GroupedExperts(gate_up, down, TORCH_OPS)(rows, ends_E)
    torch.testing.assert_close(grouped, looped, rtol=0.02, atol=0.001)
    assert not grouped[ends[-1] :].any()


@pytest.mark.parametrize("num_tokens", [1, 8, 40, 300])
def test_a_captured_graph_moves_other_tokens_as_a_call_does(checkpoint: Path, num_tokens: int) -> None:
    mlp = load_decoder(checkpoint, torch.bfloat16, "cuda")._layers[0].mlp
    assert isinstance(mlp, MixtureMlp)
    assert not mlp.asks_host
    buffer = torch.randn(num_tokens, 256, device="cuda", dtype=torch.bfloat16)
    mlp(buffer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moved = mlp(buffer)
    for _ in range(3):
        buffer.normal_()
        graph.replay()
        assert torch.equal(moved, mlp(buffer))


@pytest.mark.parametrize(("dtype", "captured"), [("bfloat16", True), ("float16", False)])
def test_a_mixture_that_asks_the_host_is_not_captured(dtype: Any, captured: bool, tmp_path: Path) -> None:
    heads = {"head_dim": 64}
    pair = write_random_pair(tmp_path, heads, "qwen3_moe", **heads)
    spec = PairSpec(name="random", target=str(pair.target_path), drafter=str(pair.drafter_path))
    config = small_config("aggregated", pages=64, dtype=dtype, device="cuda", pair=spec)
    step = build(config, load_models(config)).engine.decode._step
    assert isinstance(step, EagerStep) != captured
