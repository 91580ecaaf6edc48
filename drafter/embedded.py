"""A drafter inside its target's checkpoint: which one it is, and its files read as a checkpoint of its own.

A DSpark drafter may lie in the target's directory as stages `mtp.0`, `mtp.1`, ...; each is one layer of the drafter's,
the first and the last carry what stands before and behind the layers. config.json is the target's, so the network's
shape is the target's too, and has the drafting fields beside its own; how many stages there are shows in the tensors
only. Names here, and the ones that a drafter's own checkpoint has for the same things (`drafter.checkpoint`):

    dspark_block_size, dspark_markov_rank, dspark_markov_head_type    without the prefix
    dspark_noise_token_id, dspark_target_layer_ids                    mask_token_id, target_layer_ids
    dspark_window_size                                                (none: such a drafter keeps all context)
    mtp.0.main_proj, mtp.0.main_norm                                  fc, hidden_norm
    mtp.I.input_layernorm, mtp.I.self_attn.*, mtp.I.mlp.* ...         layers.I.*
    mtp.LAST.norm, mtp.LAST.markov_head.*, mtp.LAST.confidence_head.* norm, markov_head.*, confidence_head.*
    model.embed_tokens, lm_head                                       the target's, borrowed

What such a drafter sees of the context is a rolling window, whose keys are rotated by the base frequencies alone,
whatever scaling the target has. Standard library only: pairs are resolved, and sized, before torch is imported.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter.errors import DrafterCheckpointError, DrafterConfigError
from kvmanager.shape import EMBEDDED_WINDOW

_STAGE = re.compile(r"mtp\.(\d+)\.(.+)")
_NETWORK = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "vocab_size",
    "rms_norm_eps",
)
_BEFORE = {"main_proj.weight": "fc.weight", "main_norm.weight": "hidden_norm.weight"}
_BEHIND = ("norm.", "markov_head.", "confidence_head.")
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StageTensor:
    """Where a file holds one tensor of a stage."""

    file: Path
    offset: int
    size_bytes: int


def is_embedded(config: Mapping[str, Any]) -> bool:
    """Whether this is the config.json of a target with a drafter inside."""
    return config.get("dspark_block_size") is not None


def embeds_drafter(directory: Path) -> bool:
    """Whether the target in this directory has a drafter inside; False for what is no such directory."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and is_embedded(config)


def stage_tensors(directory: Path) -> dict[str, StageTensor]:
    """The tensors of all stages, by their names in the files. Raises DrafterCheckpointError."""
    found: dict[str, StageTensor] = {}
    for file in _files(directory):
        try:
            with file.open("rb") as stream:
                header_bytes = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(header_bytes))
            for name, entry in header.items():
                if _STAGE.fullmatch(name):
                    first, end = entry["data_offsets"]
                    found[name] = StageTensor(file, 8 + header_bytes + first, end - first)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DrafterCheckpointError(f"{file}: cannot be read as safetensors: {error!r}") from error
    return found


def num_stages(directory: Path, names: Iterable[str]) -> int:
    """How many stages these tensors make up. Raises DrafterCheckpointError for none, and for a gap."""
    stages = sorted({int(match[1]) for name in names if (match := _STAGE.fullmatch(name))})
    if not stages:
        raise DrafterCheckpointError(
            f"{directory}: config.json has dspark_block_size, but no tensor mtp.0.* is there"
        )
    if stages != list(range(len(stages))):
        raise DrafterCheckpointError(f"{directory}: stages {stages} of mtp.N.* do not follow one another")
    return len(stages)


def plain_name(name: str, stages: int) -> str:
    """What a checkpoint of the drafter alone would call this tensor."""
    match = _STAGE.fullmatch(name)
    assert match is not None
    stage, rest = int(match[1]), match[2]
    if stage == 0 and rest in _BEFORE:
        return _BEFORE[rest]
    if stage == stages - 1 and rest.startswith(_BEHIND):
        return rest
    return f"layers.{stage}.{rest}"


def plain_fields(config: Mapping[str, Any], names: Iterable[str], stages: int) -> dict[str, Any]:
    """The fields that the config.json of the drafter alone would have. Raises DrafterConfigError for a missing one."""
    for field in ("dspark_noise_token_id", "dspark_target_layer_ids"):
        if config.get(field) is None:
            raise DrafterConfigError(field, "missing")
    rank = config.get("dspark_markov_rank") or 0
    fields = {field: config[field] for field in _NETWORK if config.get(field) is not None}
    rope = config.get("rope_parameters") or {}
    fields |= {
        "rope_theta": rope.get("rope_theta") or config.get("rope_theta"),
        "num_hidden_layers": stages,
        "num_target_layers": config.get("num_hidden_layers"),
        "block_size": config["dspark_block_size"],
        "mask_token_id": config["dspark_noise_token_id"],
        "target_layer_ids": config["dspark_target_layer_ids"],
        "window_size": config.get("dspark_window_size", EMBEDDED_WINDOW),
        "sample_from_anchor": True,
        "markov_rank": rank,
        "markov_head_type": config.get("dspark_markov_head_type") or "vanilla",
        "enable_confidence_head": any(f"mtp.{stages - 1}.confidence_head." in name for name in names),
        "confidence_head_with_markov": rank > 0,
    }
    return fields


def stages_fingerprint(directory: Path) -> str:
    """Digest of the drafter's tensors, names and bytes, in name order, and of the config.json that they share."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for name, place in sorted(stage_tensors(directory).items()):
        digest.update(name.encode())
        with place.file.open("rb") as stream:
            stream.seek(place.offset)
            digest.update(stream.read(place.size_bytes))
    return digest.hexdigest()


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.is_file():
        return sorted(directory.glob("*.safetensors"))
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({directory / file for name, file in weight_map.items() if _STAGE.fullmatch(name)})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DrafterCheckpointError(f"{index}: weight_map cannot be read: {error!r}") from error
