"""Drafter checkpoints on disk, in the z-lab layout: config.json beside safetensors, one file or sharded.

Loading checks everything before a tensor is used: the config against the target's facts, then every tensor's
name and shape against the config. A drafter with nothing amiss but trained for another target would still
produce right text and low acceptance, so a checkpoint may carry `target_fingerprint`, which then must equal
the target's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.dflash import BlockDrafter, DraftLayerWeights, DraftWeights
from drafter.errors import DrafterCheckpointError, DrafterMismatch
from drafter.linear import Linear

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a drafter must know of its target, and the two tensors it borrows.

    `lm_head` is the head laid out for its device, where the target has it; without it the drafter makes its own.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    embed_weight: Tensor  # [vocab, hidden]
    lm_head_weight: Tensor  # [vocab, hidden]
    fingerprint: str
    lm_head: Linear | None = None


def load_drafter(path: Path, target: TargetFacts) -> BlockDrafter:
    """Load a DFlash drafter for `target`, in the dtype and on the device of the target's embedding.

    Raises DrafterConfigError (a field of config.json), DrafterMismatch (drafter and target disagree) or
    DrafterCheckpointError (files or tensors).
    """
    config = read_config(path)
    check_fits(config, target)
    tensors = _read_tensors(path)
    _check_tensors(path, tensors, tensor_shapes(config))
    device, dtype = target.embed_weight.device, target.embed_weight.dtype
    placed = {name: tensor.to(device, dtype) for name, tensor in tensors.items()}
    return BlockDrafter(config, _assemble(config, placed, target))


def save_drafter(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors under `path`, tensors under z-lab's names.

    The config must parse and the tensors must fit it, so that what is saved can be loaded.
    """
    parsed = DrafterConfig.from_dict(config)
    _check_tensors(path, tensors, tensor_shapes(parsed))
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path / _SINGLE,
        metadata={"format": "pt"},
    )
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_config(path: Path) -> DrafterConfig:
    """Parse `path`/config.json. Raises DrafterCheckpointError (unreadable) or DrafterConfigError."""
    file = path / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DrafterCheckpointError(
            f"{file}: no such file; a drafter is a directory with config.json"
        ) from error
    except (OSError, ValueError) as error:
        raise DrafterCheckpointError(f"{file}: {error}") from error
    if not isinstance(raw, dict):
        raise DrafterCheckpointError(f"{file}: expected a JSON object, got {type(raw).__name__}")
    return DrafterConfig.from_dict(raw)


def check_fits(config: DrafterConfig, target: TargetFacts) -> None:
    """Raise DrafterMismatch when the drafter was not made for a target of this shape or fingerprint."""
    rows = (
        ("target_fingerprint", config.target_fingerprint or target.fingerprint, target.fingerprint),
        ("num_target_layers", config.num_target_layers, target.num_layers),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.hidden_size, target.hidden_size),  # embedding and head are shared
    )
    for field, ours, theirs in rows:
        if ours != theirs:
            raise DrafterMismatch(field, ours, theirs, "use the drafter that was trained for this target")


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its shape (11 per layer and 3 more)."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.tap_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_layers):
        shapes |= {
            f"layers.{layer}.input_layernorm.weight": (hidden,),
            f"layers.{layer}.self_attn.q_proj.weight": (q_rows, hidden),
            f"layers.{layer}.self_attn.k_proj.weight": (kv_rows, hidden),
            f"layers.{layer}.self_attn.v_proj.weight": (kv_rows, hidden),
            f"layers.{layer}.self_attn.o_proj.weight": (hidden, q_rows),
            f"layers.{layer}.self_attn.q_norm.weight": (head_dim,),
            f"layers.{layer}.self_attn.k_norm.weight": (head_dim,),
            f"layers.{layer}.post_attention_layernorm.weight": (hidden,),
            f"layers.{layer}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{layer}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{layer}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _read_tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in _tensor_files(path):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                    tensors[name] = shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise DrafterCheckpointError(f"{file}: cannot be read as safetensors: {error}") from error
    return tensors


def _tensor_files(path: Path) -> list[Path]:
    index = path / _INDEX
    if index.exists():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DrafterCheckpointError(f"{index}: weight_map cannot be read: {error!r}") from error
        return [path / shard for shard in shards]
    single = path / _SINGLE
    if not single.exists():
        raise DrafterCheckpointError(f"{path}: neither {_SINGLE} nor {_INDEX} is there")
    return [single]


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        raise DrafterCheckpointError(
            f"{path}: {len(missing)} of {len(shapes)} tensors missing, first {missing[0]}"
        )
    unexpected = sorted(tensors.keys() - shapes.keys())
    if unexpected:
        raise DrafterCheckpointError(
            f"{path}: {len(unexpected)} tensors that this config.json has no place for, first {unexpected[0]}"
        )
    for name, shape in shapes.items():
        found = tuple(tensors[name].shape)
        if found != shape:
            raise DrafterCheckpointError(
                f"{path}: {name} has shape {list(found)}, config.json asks for {list(shape)}"
            )
        if not tensors[name].is_floating_point():
            raise DrafterCheckpointError(
                f"{path}: {name} has dtype {tensors[name].dtype}, expected floating point"
            )


def _assemble(config: DrafterConfig, tensors: Mapping[str, Tensor], target: TargetFacts) -> DraftWeights:
    def layer(index: int) -> DraftLayerWeights:
        def weight(name: str) -> Tensor:
            return tensors[f"layers.{index}.{name}.weight"]

        return DraftLayerWeights(
            input_norm_H=weight("input_layernorm"),
            qkv=Linear(torch.cat([weight(f"self_attn.{part}_proj") for part in "qkv"])),
            q_norm_D=weight("self_attn.q_norm"),
            k_norm_D=weight("self_attn.k_norm"),
            o=Linear(weight("self_attn.o_proj")),
            post_norm_H=weight("post_attention_layernorm"),
            gate_up=Linear(torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")])),
            down=Linear(weight("mlp.down_proj")),
        )

    return DraftWeights(
        fc_HX=tensors["fc.weight"],
        hidden_norm_H=tensors["hidden_norm.weight"],
        norm_H=tensors["norm.weight"],
        layers=tuple(layer(index) for index in range(config.num_layers)),
        embed_VH=target.embed_weight,
        lm_head=target.lm_head or Linear(target.lm_head_weight),
    )
