"""A target of a few thousand random weights with a DSpark drafter inside its checkpoint, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter.checkpoint import tensor_shapes
from drafter.config import DrafterConfig
from tests.device import DEVICE
from tests.workers.tiny_checkpoints import config_of, random_tensors, write_directory
from workers.assembly import Models, load_models
from workers.config import PairSpec, WorkerConfig

VOCAB, WINDOW, STAGES = 11, 20, 2


def embedded_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """The target's config.json; a window of 20, a block of 3 drafts."""
    return config_of(
        family,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        eos_token_id=2,
        **{
            "num_key_value_heads": 1,
            "dspark_block_size": 3,
            "dspark_noise_token_id": 7,
            "dspark_target_layer_ids": [0],
            "dspark_markov_rank": 6,
            "dspark_markov_head_type": "vanilla",
            "dspark_window_size": WINDOW,
        }
        | changes,
    )


def stage_name(plain: str, stages: int) -> str:
    """The name that a tensor of a drafter's own checkpoint has among the stages."""
    before = {"fc.weight": "mtp.0.main_proj.weight", "hidden_norm.weight": "mtp.0.main_norm.weight"}
    if plain in before:
        return before[plain]
    if plain.startswith("layers."):
        return f"mtp.{plain.removeprefix('layers.')}"
    return f"mtp.{stages - 1}.{plain}"


def stage_tensors(config: dict[str, Any], stages: int = STAGES, seed: int = 2) -> dict[str, Tensor]:
    """Random stages as the config demands them, confidence head included, float64."""
    parsed = DrafterConfig.embedded(config, (f"mtp.{stages - 1}.confidence_head.proj.weight",), stages)
    generator = torch.Generator().manual_seed(seed)
    return {
        stage_name(name, stages): torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3
        + (len(shape) == 1)
        for name, shape in tensor_shapes(parsed).items()
    }


def write_embedded(
    directory: Path, config: dict[str, Any], num_shards: int = 1, stages: int = STAGES
) -> Path:
    tensors = random_tensors(config, seed=1) | stage_tensors(config, stages)
    return write_directory(directory, config, tensors, num_shards)


def load_embedded_pair(directory: Path, family: str = "llama", **changes: Any) -> Models:
    """Write and load it as a worker does."""
    return load_models(
        embedded_worker(write_embedded(directory / "target", embedded_config(family, **changes)))
    )


def embedded_worker(path: Path, **more: Any) -> WorkerConfig:
    spec = PairSpec(name="embedded", target=str(path))
    return WorkerConfig(role="aggregated", pair=spec, dtype="float64", device=DEVICE.type, **more)  # type: ignore[arg-type]
