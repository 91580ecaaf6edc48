"""Writing and reading drafters, DFlash in z-lab's layout and DSpark in SpecForge's: config.json, model.safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from drafter.checkpoint import read_config, save_drafter
from drafter.config import MarkovKind
from drafter.training.llama import LlamaShape
from drafter.training.network import DraftNetwork


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """DSpark's heads: a Markov head of this rank (0: none) and kind, and a confidence head."""

    markov_rank: int
    markov_kind: MarkovKind


def drafter_config(
    target: LlamaShape,
    *,
    num_layers: int,
    block_size: int,
    tap_layer_ids: tuple[int, ...],
    mask_token_id: int,
    bos_token_id: int,
    eos_token_id: int,
    target_fingerprint: str,
    heads: HeadPlan | None = None,
    intermediate_size: int | None = None,
) -> dict[str, Any]:
    """config.json of a drafter as wide as the target: DSpark with `heads`, DFlash without.

    `intermediate_size` is the target's unless it says otherwise.
    """
    drafting: dict[str, Any] = {"mask_token_id": mask_token_id, "target_layer_ids": list(tap_layer_ids)}
    if heads is not None:
        drafting |= {
            "projector_type": "dspark",
            "markov_rank": heads.markov_rank,
            "markov_head_type": heads.markov_kind,
            "enable_confidence_head": True,
            "confidence_head_with_markov": heads.markov_rank > 0,
        }
    return {
        "architectures": ["DFlashDraftModel" if heads is None else "DSparkDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size or target.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_theta,
        "rope_parameters": {"rope_theta": target.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": num_layers,
        "layer_types": ["full_attention"] * num_layers,
        "initializer_range": 0.02,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": eos_token_id,
        "num_target_layers": target.num_layers,
        "block_size": block_size,
        "target_fingerprint": target_fingerprint,
        "dflash_config": drafting,
    }


def save_network(directory: Path, network: DraftNetwork, config: dict[str, Any]) -> None:
    """Write the drafter as bfloat16."""
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in network.state_dict().items()
    }
    save_drafter(directory, config, tensors)


def read_network(directory: Path, target_hidden_size: int) -> DraftNetwork:
    """Read a drafter back into its trainable form, float32."""
    network = DraftNetwork(read_config(directory), target_hidden_size)
    tensors = load_file(directory / "model.safetensors")
    network.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return network
