"""Targets as training sees them: the batched model, and what a drafter's config must say of it."""

from __future__ import annotations

from pathlib import Path

import torch

from drafter.training.llama import Llama, LlamaShape
from workers.models.errors import CheckpointError
from workers.models.gguf_source import GgufSource
from workers.models.huggingface import HuggingFaceSource
from workers.models.source import TensorSource, check_tensors


def load_target(path: Path, dtype: torch.dtype, device: torch.device) -> tuple[Llama, str]:
    """The target, frozen, and its fingerprint. Raises CheckpointError, also for a target that is not a plain Llama."""
    source: TensorSource = HuggingFaceSource(path) if path.is_dir() else GgufSource(path)
    config = source.config
    if config.family != "llama" or not config.tie_word_embeddings:
        raise CheckpointError(path, "training supports Llama-style targets with tied embeddings")
    model = Llama(
        LlamaShape(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_theta=config.rope.theta,
            rms_norm_eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
        )
    )
    model.load_weights({f"model.{name}": source.read(name) for name in check_tensors(source)})
    return model.to(device, dtype).requires_grad_(False).eval(), source.fingerprint()
