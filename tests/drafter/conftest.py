"""A tiny random drafter in z-lab layout, and the target facts it fits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.checkpoint import TargetFacts, save_drafter, tensor_shapes
from drafter.config import DrafterConfig
from tests.device import DEVICE

HIDDEN, VOCAB, TARGET_LAYERS = 24, 50, 6
NETWORK: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "layer_types": ["full_attention"] * 2,
}


@pytest.fixture
def raw_config() -> dict[str, Any]:
    """A config.json in the old dialect: block_size and rotary settings at the top level."""
    return {
        "architectures": ["DFlashDraftModel"],
        **NETWORK,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention"] * 3,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "num_target_layers": TARGET_LAYERS,
        "block_size": 5,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 3]},
    }


def dflash2(raw: dict[str, Any], **drafting: Any) -> dict[str, Any]:
    """A DFlash config.json as a DFlash 2 one."""
    sizes = {"conv_kernel_size": 2, "conv_group_size": 6, "selector_rank": 4, "selector_top_k": 5}
    return raw | {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": raw["dflash_config"] | sizes | drafting,
    }


@pytest.fixture
def tensors(raw_config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3 + (len(shape) == 1)
        for name, shape in tensor_shapes(DrafterConfig.from_dict(raw_config)).items()
    }


@pytest.fixture
def saved(tmp_path: Path, raw_config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """The checkpoint on disk."""
    save_drafter(tmp_path / "drafter", raw_config, tensors)
    return tmp_path / "drafter"


@pytest.fixture
def facts() -> Callable[..., TargetFacts]:
    """Facts of the target the drafter fits; keyword arguments replace some."""

    def make(dtype: torch.dtype = torch.float64, **changes: Any) -> TargetFacts:
        generator = torch.Generator().manual_seed(4)
        fields: dict[str, Any] = {
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB,
            "num_layers": TARGET_LAYERS,
            "embed_weight": torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(
                DEVICE, dtype
            ),
            "lm_head_weight": torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(
                DEVICE, dtype
            ),
            "fingerprint": "target-a",
        }
        return TargetFacts(**fields | changes)

    return make
