"""Writes a target as a Hugging Face directory, so that code that is not ours runs on our very weights.

Quantized GGUF tensors are written as the float32 values we compute with. No tokenizer is written: the peers are
given token ids.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from workers.models.gguf_source import GgufSource
from workers.models.source import expected_tensors


def export_target(gguf: Path, directory: Path) -> Path:
    """Write config.json and model.safetensors of `gguf` under `directory`; returns it. Llama family only."""
    source = GgufSource(gguf)
    config = source.config
    if config.family != "llama" or config.rope.rope_type != "default":
        raise ValueError(
            f"{gguf}: only a plain Llama is exported, not {config.family} / {config.rope.rope_type}"
        )
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": source.read(name).float().contiguous()
        for name in expected_tensors(config)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return directory
