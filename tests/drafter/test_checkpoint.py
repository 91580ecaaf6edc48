from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from drafter.checkpoint import TargetFacts, load_drafter, save_drafter
from drafter.errors import DrafterCheckpointError, DrafterConfigError, DrafterMismatch

Facts = Callable[..., TargetFacts]


def test_a_saved_drafter_loads_in_the_dtype_of_its_target(saved: Path, facts: Facts) -> None:
    drafter = load_drafter(saved, facts(torch.bfloat16))
    assert drafter.block_size == 5
    assert drafter.max_draft_tokens == 4
    assert drafter.tap_layer_ids == (1, 3)
    assert (drafter.num_layers, drafter.num_kv_heads, drafter.head_dim) == (3, 2, 8)


def test_shards_load_like_one_file(
    saved: Path, tmp_path: Path, tensors: dict[str, Tensor], raw_config: dict[str, Any], facts: Facts
) -> None:
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text(json.dumps(raw_config))
    names = sorted(tensors)
    weight_map = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, sharded / shard)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    one, two = load_drafter(saved, facts()), load_drafter(sharded, facts())
    for a, b in zip(one._weights.layers, two._weights.layers, strict=True):
        assert torch.equal(a.qkv.dense_weight(), b.qkv.dense_weight())
        assert torch.equal(a.down.dense_weight(), b.down.dense_weight())
    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(DrafterCheckpointError, match=r"model-1\.safetensors"):
        load_drafter(sharded, facts())


@pytest.mark.parametrize(
    ("change", "field", "both"),
    [
        ({"num_layers": 8}, "num_target_layers", ("6", "8")),
        ({"hidden_size": 32}, "hidden_size", ("24", "32")),
        ({"vocab_size": 51}, "vocab_size", ("50", "51")),
    ],
)
def test_a_drafter_of_another_target_is_refused_with_both_values(
    saved: Path, facts: Facts, change: dict[str, int], field: str, both: tuple[str, str]
) -> None:
    with pytest.raises(DrafterMismatch) as caught:
        load_drafter(saved, facts(**change))
    assert caught.value.field == field
    assert all(value in str(caught.value) for value in both)


def test_a_fingerprint_in_the_checkpoint_must_be_the_targets(
    tmp_path: Path, raw_config: dict[str, Any], tensors: dict[str, Tensor], facts: Facts
) -> None:
    save_drafter(tmp_path, raw_config | {"target_fingerprint": "target-a"}, tensors)
    load_drafter(tmp_path, facts())
    with pytest.raises(DrafterMismatch, match="target_fingerprint: drafter target-a, target target-b"):
        load_drafter(tmp_path, facts(fingerprint="target-b"))


def test_a_missing_a_surplus_and_a_misshapen_tensor_are_named(
    saved: Path, tensors: dict[str, Tensor], facts: Facts
) -> None:
    name = "layers.1.self_attn.k_proj.weight"
    file = saved / "model.safetensors"
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    with pytest.raises(DrafterCheckpointError, match=f"1 of 36 tensors missing, first {name}"):
        load_drafter(saved, facts())
    save_file(tensors | {"markov_head.markov_w1.weight": torch.zeros(2)}, file)
    with pytest.raises(DrafterCheckpointError, match="markov_head"):
        load_drafter(saved, facts())
    save_file(tensors | {name: torch.zeros(8, 24)}, file)
    with pytest.raises(DrafterCheckpointError, match=rf"{name} has shape \[8, 24\], .* \[16, 24\]"):
        load_drafter(saved, facts())
    save_file(tensors | {name: torch.zeros(16, 24, dtype=torch.int32)}, file)
    with pytest.raises(DrafterCheckpointError, match="int32"):
        load_drafter(saved, facts())


def test_files_that_cannot_be_read_are_named(saved: Path, tmp_path: Path, facts: Facts) -> None:
    with pytest.raises(DrafterCheckpointError, match="no such file"):
        load_drafter(tmp_path / "nowhere", facts())
    (saved / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(DrafterCheckpointError, match=r"model\.safetensors"):
        load_drafter(saved, facts())
    (saved / "model.safetensors").unlink()
    with pytest.raises(DrafterCheckpointError, match="neither"):
        load_drafter(saved, facts())
    (saved / "config.json").write_text("[1]")
    with pytest.raises(DrafterCheckpointError, match="JSON object"):
        load_drafter(saved, facts())


def test_what_could_not_be_loaded_is_not_saved(
    tmp_path: Path, raw_config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    del tensors["fc.weight"]
    with pytest.raises(DrafterCheckpointError, match=r"fc\.weight"):
        save_drafter(tmp_path / "a", raw_config, tensors)
    with pytest.raises(DrafterConfigError):
        save_drafter(tmp_path / "b", raw_config | {"block_size": 1}, tensors)
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()
