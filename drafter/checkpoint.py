"""Drafter checkpoints on disk, of any dialect: config.json beside safetensors, one file or sharded.

Loading checks everything before a tensor is used: the config against the target's facts, then every tensor's
name and shape against the config. A drafter with nothing amiss but trained for another target would still
produce right text and low acceptance, so a checkpoint may carry `target_fingerprint`, which then must equal
the target's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.config import DrafterConfig, check_tap
from drafter.dflash import BlockDrafter, DraftLayerWeights, DraftWeights
from drafter.dflash2 import RENAMED_TENSORS, added_shapes, convolutions, selector
from drafter.dspark import head_shapes, sequential_head
from drafter.embedded import is_embedded, num_stages, plain_name, stage_tensors
from drafter.errors import DrafterCheckpointError, DrafterMismatch
from drafter.layers import TORCH_OPS, LayerOps
from drafter.linear import Linear
from drafter.proposal import DraftHead, IndependentHead
from drafter.ranks import (
    ALONE,
    Ranks,
    share_of,
    share_of_heads,
    summed,
    vocabulary_head,
    vocabulary_share,
    whole_vocabulary,
)
from drafter.vocabulary import narrowed

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAPS = ("d2t", "t2d")  # draft id -> offset of its target id; target id -> whether the drafter knows it
_OF_THE_TARGET = ("verifier_norm.weight", "verifier_lm_head.weight")  # what training needed of it; not read


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a drafter must know of its target, and the two tensors it borrows.

    `lm_head` is the head laid out for its device, where the target has it; without it the drafter makes its own.
    `ranks`: among whom the target, and so the drafter, is divided; both tensors are then a rank's `vocabulary_share`.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    embed_weight: Tensor  # [vocab, hidden]
    lm_head_weight: Tensor  # [vocab, hidden]
    fingerprint: str
    lm_head: Linear | None = None
    ranks: Ranks = ALONE


def load_drafter(
    path: Path, target: TargetFacts, ops: LayerOps = TORCH_OPS, vocabulary: Collection[int] | None = None
) -> BlockDrafter:
    """Load a drafter for `target`, in the dtype and on the device of the target's embedding.

    `path`: the drafter's directory, or the target's own when the drafter is inside.
    `ops`: how that device computes what lies between matrix products.
    `vocabulary`: the target's ids of those tokens that it may say; None for all that it knows.

    Raises DrafterConfigError (a field of config.json), DrafterMismatch (drafter and target disagree),
    DrafterCheckpointError (files or tensors), DraftVocabularyError, or UnevenShares (a drafter that its ranks cannot
    divide).
    """
    config = read_config(path)
    check_fits(config, target)
    tensors: Mapping[str, Tensor]
    tensors = _read_stages(path) if config.family == "dspark_embedded" else _read_tensors(path)
    _check_tensors(path, tensors, config)
    device, dtype = target.embed_weight.device, target.embed_weight.dtype
    token_ids = _token_ids(path, config, tensors)
    if vocabulary is not None or token_ids is not None:
        config, tensors, token_ids = narrowed(config, tensors, token_ids, vocabulary, target.ranks.size)
    placed = {name: tensor.to(device, dtype) for name, tensor in tensors.items() if name not in _MAPS}
    if token_ids is not None:
        token_ids = token_ids.to(device)
    weights = _assemble(config, placed, target, token_ids)
    return BlockDrafter(config, weights, _head(config, placed), ops, target.ranks)


def save_drafter(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors under `path`, tensors under the layout's names.

    The config must parse and the tensors must fit it, so that what is saved can be loaded.
    """
    parsed = DrafterConfig.from_dict(config)
    _check_tensors(path, tensors, parsed)
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
    if is_embedded(raw):
        names = stage_tensors(path)
        return DrafterConfig.embedded(raw, names, num_stages(path, names))
    return DrafterConfig.from_dict(raw)


def check_fits(config: DrafterConfig, target: TargetFacts) -> None:
    """Raise DrafterMismatch when the drafter was not made for a target of this shape or fingerprint."""
    rows = (
        ("target_fingerprint", config.target_fingerprint or target.fingerprint, target.fingerprint),
        ("num_target_layers", config.num_target_layers or target.num_layers, target.num_layers),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("hidden_size", config.target_hidden_size, target.hidden_size),
    )
    for field, ours, theirs in rows:
        if ours != theirs:
            raise DrafterMismatch(field, ours, theirs, "use the drafter that was trained for this target")
    for tap in config.tap_layer_ids:
        check_tap(tap, target.num_layers)


def tensor_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint must have and its shape: 11 per layer, 3 more, and those of its family."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.tap_layer_ids) * config.target_hidden_size),
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
    if config.dflash2 is not None:
        shapes |= added_shapes(config, config.dflash2)
    return shapes | head_shapes(config)


def _optional_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors that a checkpoint may have instead of borrowing the target's."""
    return {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
    }


def _read_tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in _tensor_files(path):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                    tensors[RENAMED_TENSORS.get(name, name)] = shard.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise DrafterCheckpointError(f"{file}: cannot be read as safetensors: {error}") from error
    return tensors


def _read_stages(path: Path) -> dict[str, Tensor]:
    """The drafter inside the target at `path`, under the names of a checkpoint of its own; nothing else is read."""
    places = stage_tensors(path)
    stages = num_stages(path, places)
    tensors: dict[str, Tensor] = {}
    for file in sorted({place.file for place in places.values()}):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in [name for name, place in places.items() if place.file == file]:
                    tensors[plain_name(name, stages)] = shard.get_tensor(name)
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


def _check_tensors(path: Path, tensors: Mapping[str, Tensor], config: DrafterConfig) -> None:
    shapes, optional = tensor_shapes(config), _optional_shapes(config)
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        raise DrafterCheckpointError(
            f"{path}: {len(missing)} of {len(shapes)} tensors missing, first {missing[0]}"
        )
    unexpected = sorted(tensors.keys() - shapes.keys() - optional.keys() - {*_MAPS, *_OF_THE_TARGET})
    if unexpected:
        raise DrafterCheckpointError(
            f"{path}: {len(unexpected)} tensors that this config.json has no place for, first {unexpected[0]}"
        )
    for name, shape in (shapes | optional).items():
        if name not in tensors:
            continue
        found = tuple(tensors[name].shape)
        if found != shape:
            raise DrafterCheckpointError(
                f"{path}: {name} has shape {list(found)}, config.json asks for {list(shape)}"
            )
        if not tensors[name].is_floating_point():
            raise DrafterCheckpointError(
                f"{path}: {name} has dtype {tensors[name].dtype}, expected floating point"
            )
    if config.hidden_size != config.target_hidden_size:
        for name in optional:
            if name not in tensors:
                raise DrafterCheckpointError(
                    f"{path}: {name} is missing: a drafter of hidden size {config.hidden_size} cannot borrow that "
                    f"of a target of hidden size {config.target_hidden_size}"
                )


def _token_ids(path: Path, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The target's ids of the drafter's tokens, int64; None when the drafter knows all of them."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    offsets = tensors.get("d2t")
    if offsets is None or tuple(offsets.shape) != (config.draft_vocab_size,) or offsets.is_floating_point():
        raise DrafterCheckpointError(
            f"{path}: a drafter of {config.draft_vocab_size} of {config.vocab_size} tokens needs an integer tensor "
            f"d2t of that many offsets"
        )
    token_ids = offsets.long() + torch.arange(config.draft_vocab_size)
    if len(token_ids.unique()) != len(token_ids) or not 0 <= int(token_ids.min()) <= int(token_ids.max()) < (
        config.vocab_size
    ):
        raise DrafterCheckpointError(f"{path}: d2t does not map to distinct ids under {config.vocab_size}")
    return token_ids


def _assemble(
    config: DrafterConfig, tensors: Mapping[str, Tensor], target: TargetFacts, token_ids: Tensor | None
) -> DraftWeights:
    ranks = target.ranks
    heads = share_of_heads(config.num_heads, config.num_kv_heads, ranks)
    q, kv = heads.q_rows(config.head_dim), heads.kv_rows(config.head_dim)
    inner = share_of("intermediate_size", config.intermediate_size, ranks)

    def layer(index: int) -> DraftLayerWeights:
        def weight(name: str) -> Tensor:
            return tensors[f"layers.{index}.{name}.weight"]

        around_attention, around_mlp = (
            (None, None) if config.dflash2 is None else convolutions(config.dflash2, tensors, index)
        )
        return DraftLayerWeights(
            input_norm_H=weight("input_layernorm"),
            qkv=Linear(
                torch.cat(
                    [
                        weight(f"self_attn.{part}_proj")[rows]
                        for part, rows in (("q", q), ("k", kv), ("v", kv))
                    ]
                )
            ),
            q_norm_D=weight("self_attn.q_norm"),
            k_norm_D=weight("self_attn.k_norm"),
            o=summed(weight("self_attn.o_proj")[:, q], None, ranks),
            post_norm_H=weight("post_attention_layernorm"),
            gate_up=Linear(torch.cat([weight("mlp.gate_proj")[inner], weight("mlp.up_proj")[inner]])),
            down=summed(weight("mlp.down_proj")[:, inner], None, ranks),
            attention_conv=around_attention,
            mlp_conv=around_mlp,
        )

    return DraftWeights(
        fc_HX=tensors["fc.weight"],
        hidden_norm_H=tensors["hidden_norm.weight"],
        norm_H=tensors["norm.weight"],
        layers=tuple(layer(index) for index in range(config.num_layers)),
        embed_VH=_own_or(target.embed_weight, _shared(tensors.get("embed_tokens.weight"), ranks)),
        lm_head=_output_head(tensors.get("lm_head.weight"), target, token_ids),
        token_ids=token_ids,
    )


def _shared(own_VH: Tensor | None, ranks: Ranks) -> Tensor | None:
    return None if own_VH is None else vocabulary_share(own_VH, ranks)


def _own_or(borrowed_VH: Tensor, own_VH: Tensor | None) -> Tensor:
    """The drafter's own tensor; the target's when there is none, or when it is a copy that would only take memory."""
    return borrowed_VH if own_VH is None or torch.equal(own_VH, borrowed_VH) else own_VH


def _output_head(own_VH: Tensor | None, target: TargetFacts, token_ids: Tensor | None) -> Linear:
    ranks = target.ranks
    if token_ids is not None:
        if own_VH is None:
            own_VH = whole_vocabulary(target.lm_head_weight, target.vocab_size, ranks)[token_ids]
        return vocabulary_head(vocabulary_share(own_VH, ranks), len(token_ids), ranks)
    share_VH = _own_or(target.lm_head_weight, _shared(own_VH, ranks))
    if share_VH is target.lm_head_weight and target.lm_head is not None:
        return target.lm_head
    return vocabulary_head(share_VH, target.vocab_size, ranks)


def _head(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> DraftHead:
    if config.dflash2 is not None:
        return selector(config.dflash2, tensors)
    return sequential_head(config, tensors) or IndependentHead()
