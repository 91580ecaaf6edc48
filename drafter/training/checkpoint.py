"""Writing and reading drafters in z-lab's DFlash layout: config.json and model.safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from drafter.checkpoint import read_config, save_drafter
from drafter.training.llama import LlamaShape
from drafter.training.network import DraftNetwork


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
) -> dict[str, Any]:
    """config.json of a drafter whose layers are as wide as the target's."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
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
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(tap_layer_ids)},
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
