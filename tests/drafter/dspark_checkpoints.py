"""Random tiny DSpark checkpoints in the dialects of their trainers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafter.checkpoint import tensor_shapes
from drafter.config import DrafterConfig
from tests.drafter.conftest import NETWORK, TARGET_LAYERS, VOCAB

BLOCK, MASK, RANK = 5, 7, 6


def deepspec(kind: str = "vanilla", **changes: Any) -> dict[str, Any]:
    """All fields at the top level."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        **NETWORK,
        "num_target_layers": TARGET_LAYERS,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": [1, 3],
        "num_anchors": 512,
        "markov_rank": RANK,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    } | changes


def specforge(kind: str = "vanilla", **changes: Any) -> dict[str, Any]:
    """Drafting fields nested; the confidence head follows from its weight in the loss."""
    return {
        "architectures": ["DSparkDraftModel"],
        **NETWORK,
        "num_target_layers": TARGET_LAYERS,
        "block_size": BLOCK,
        "dflash_config": {
            "attention_mode": "gqa",
            "mask_token_id": MASK,
            "target_layer_ids": [1, 3],
            "projector_type": "dspark",
            "markov_rank": RANK,
            "markov_head_type": kind,
            "confidence_head_alpha": 1.0,
            "confidence_head_with_markov": True,
        },
    } | changes


def speculators(kind: str = "vanilla", **changes: Any) -> dict[str, Any]:
    """The network under a key of its own, taps counted from the embedding's output."""
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.4.0",
        "transformer_layer_config": NETWORK,
        "draft_vocab_size": VOCAB,
        "block_size": BLOCK,
        "aux_hidden_state_layer_ids": [2, 4],
        "mask_token_id": MASK,
        "markov_rank": RANK,
        "markov_head_type": kind,
    } | changes


def random_weights(raw: dict[str, Any], seed: int = 3) -> dict[str, Tensor]:
    """Every tensor that the checkpoint must have, float64."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3 + (len(shape) == 1)
        for name, shape in tensor_shapes(DrafterConfig.from_dict(raw)).items()
    }
