"""A drafter inside its target's checkpoint: what is recognised, what is refused, and what its window computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.checkpoint import TargetFacts, load_drafter, read_config
from drafter.embedded import num_stages, plain_fields, plain_name
from drafter.errors import DrafterCheckpointError, DrafterConfigError
from drafter.fingerprint import drafter_fingerprint
from kvmanager.layout import KvGeometry
from tests.device import DEVICE
from tests.drafter.plain import plain_hidden
from tests.workers.embedded_pair import (
    STAGES,
    VOCAB,
    WINDOW,
    embedded_config,
    stage_tensors,
    write_embedded,
)
from tests.workers.tiny_checkpoints import random_tensors, write_directory
from workers.attention.torch import TorchPagedAttention
from workers.models.errors import CheckpointError
from workers.models.load import load_config
from workers.pairs import PairError, resolve_pair
from workers.storage import KvStorage

PAGE = 4


def facts(tensors: dict[str, Tensor]) -> TargetFacts:
    return TargetFacts(
        hidden_size=32,
        vocab_size=VOCAB,
        num_layers=2,
        embed_weight=tensors["model.embed_tokens.weight"].double().to(DEVICE),
        lm_head_weight=tensors["lm_head.weight"].double().to(DEVICE),
        fingerprint="f",
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_it_is_found_in_the_targets_directory(tmp_path: Path, family: str, num_shards: int) -> None:
    path = write_embedded(tmp_path / "target", embedded_config(family), num_shards)
    pair = resolve_pair(str(path))
    assert pair.drafter_path == pair.target_path == path
    config = read_config(path)
    assert (config.family, config.num_layers, config.window) == ("dspark_embedded", STAGES, WINDOW)
    assert (config.first_slot, config.max_draft_tokens, config.tap_layer_ids) == (0, 3, (0,))
    assert config.confidence is not None
    assert config.confidence.with_markov
    assert load_config(path).family == family


def test_the_window_is_128_unless_told_otherwise_and_rotation_leaves_scaling_out(tmp_path: Path) -> None:
    raw = embedded_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}, rope_theta=5000.0)
    del raw["dspark_window_size"]
    config = read_config(write_embedded(tmp_path / "target", raw))
    assert config.window == 128
    assert (config.rope.rope_type, config.rope.theta) == ("default", 5000.0)


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 43])
def test_a_block_sees_the_last_positions_and_itself_whatever_lies_before(tmp_path: Path, length: int) -> None:
    raw = embedded_config()
    tensors = random_tensors(raw, seed=1)
    drafter = load_drafter(write_embedded(tmp_path / "target", raw), facts(tensors))
    geometry = KvGeometry(
        drafter.num_layers, drafter.num_kv_heads, drafter.head_dim, PAGE, 8, drafter.config.window
    )
    storage = KvStorage(geometry, 20, torch.float64, DEVICE)
    storage.pool.fill_(torch.nan)  # what was never written must not be read
    attention = TorchPagedAttention(storage)
    first = geometry.first_position(length)
    base = geometry.first_page(length) * PAGE
    row = torch.randperm(19, generator=torch.Generator().manual_seed(0))[None, :8].int() + 1
    taps = torch.randn(length, 32, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    for start in range(first, length, 5):
        end = min(start + 5, length)
        plan = attention.plan(row, [end - start], [end - base], causal=False)
        positions = torch.arange(start, end, device=DEVICE)
        drafter.append_context(taps[start:end].to(DEVICE), positions, attention, plan)
    plan = attention.plan(row, [3], [length + 3 - base], causal=False, seen_from=[first - base])
    positions = torch.arange(length, length + 3, device=DEVICE)
    block = drafter.block(torch.tensor([4], device=DEVICE), positions, 3, attention, plan)
    stages = stage_tensors(raw)
    plain = {plain_name(name, STAGES): tensor for name, tensor in stages.items()}
    fields = plain_fields(raw, stages, STAGES)
    embed = tensors["model.embed_tokens.weight"].double()
    wanted = plain_hidden(fields, plain, embed, taps, 4, WINDOW)
    torch.testing.assert_close(block.hidden_BKH[0].cpu(), wanted, rtol=0, atol=1e-6)
    if length > WINDOW:
        assert not torch.allclose(wanted, plain_hidden(fields, plain, embed, taps, 4), atol=1e-3)


def test_its_fingerprint_is_that_of_its_own_tensors_and_config(tmp_path: Path) -> None:
    raw = embedded_config()
    first = drafter_fingerprint(write_embedded(tmp_path / "a", raw))
    other_target = random_tensors(raw, seed=9) | stage_tensors(raw)
    assert drafter_fingerprint(write_directory(tmp_path / "b", raw, other_target)) == first
    other_drafter = random_tensors(raw, seed=1) | stage_tensors(raw, seed=3)
    assert drafter_fingerprint(write_directory(tmp_path / "c", raw, other_drafter)) != first
    wider = embedded_config(dspark_window_size=WINDOW + 1)
    assert drafter_fingerprint(write_embedded(tmp_path / "d", wider)) != first


@pytest.mark.parametrize("field", ["dspark_noise_token_id", "dspark_target_layer_ids"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    path = write_embedded(tmp_path / "target", embedded_config())
    raw = embedded_config(**{field: None})
    write_directory(path, raw, random_tensors(raw) | stage_tensors(embedded_config()))
    with pytest.raises(DrafterConfigError, match=rf"{field}: missing"):
        read_config(path)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"dspark_noise_token_id": 99}, "dspark_noise_token_id: 99 is outside"),
        ({"dspark_window_size": 0}, "dspark_window_size: expected a positive integer"),
        ({"dspark_target_layer_ids": [1]}, "dspark_target_layer_ids: 1 is the target's last layer"),
        ({"dspark_markov_head_type": "tree"}, "dspark_markov_head_type: 'tree' is none of"),
    ],
)
def test_a_field_out_of_range_is_named_as_the_file_has_it(
    tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    raw = embedded_config(**changed)
    tensors = random_tensors(raw) | stage_tensors(embedded_config())
    with pytest.raises(DrafterConfigError, match=says):
        read_config(write_directory(tmp_path / "target", raw, tensors))


def test_stages_that_are_not_there_or_of_another_kind_are_named(tmp_path: Path) -> None:
    raw = embedded_config()
    target, stages = random_tensors(raw), stage_tensors(raw)
    with pytest.raises(DrafterCheckpointError, match=r"no tensor mtp\.0"):
        read_config(write_directory(tmp_path / "none", raw, target))
    gap = {name.replace("mtp.1.", "mtp.2."): tensor for name, tensor in stages.items()}
    with pytest.raises(DrafterCheckpointError, match=r"stages \[0, 2\]"):
        read_config(write_directory(tmp_path / "gap", raw, target | gap))
    mixture = stages | {"mtp.0.mlp.experts.0.gate_proj.weight": torch.zeros(2, 2)}
    with pytest.raises(DrafterCheckpointError, match=r"no place for, first layers.0.mlp.experts.0"):
        load_drafter(write_directory(tmp_path / "mixture", raw, target | mixture), facts(target))
    assert num_stages(tmp_path, stages) == STAGES


def test_it_serves_no_other_target(tmp_path: Path) -> None:
    path = write_embedded(tmp_path / "target", embedded_config())
    (tmp_path / "other").mkdir()
    with pytest.raises(PairError, match="a target with a drafter inside, which serves that target only"):
        resolve_pair(f"{tmp_path / 'other'}:{path}")
    assert resolve_pair(f"{path}:{tmp_path / 'other'}").drafter_path == tmp_path / "other"


@pytest.mark.parametrize("inside", [True, False])
def test_a_deepseek_v4_is_recognised_and_refused_by_what_is_missing(tmp_path: Path, inside: bool) -> None:
    raw = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "n_routed_experts": 256,
        "quantization_config": {"quant_method": "fp8"},
    }
    drafting = {"dspark_block_size": 5, "dspark_noise_token_id": 7, "dspark_target_layer_ids": [58, 59, 60]}
    path = write_directory(tmp_path / "v4", raw | (drafting if inside else {}), {"mtp.0.x": torch.zeros(1)})
    with pytest.raises(CheckpointError) as refused:
        load_config(path)
    said = str(refused.value)
    assert "DeepseekV4ForCausalLM is recognised and cannot be served" in said
    for missing in ("one latent that all heads share", "mixtures of experts", "mHC", "quantization_config"):
        assert missing in said
    assert ("DSpark drafter in its mtp.N weights" in said) is inside
