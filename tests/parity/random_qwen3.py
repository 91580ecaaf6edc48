"""Random tiny Qwen3 models as transformers makes them, float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

HIDDEN, LAYERS = 48, 6


def small_config(vocab_size: int, **changes: Any) -> Any:
    """A Qwen3Config of hidden size 48, 6 layers, 4 heads over 2 of size 16."""
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 80,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return transformers.Qwen3Config(**fields | changes)


def write_target(path: Path, vocab_size: int) -> Any:
    """A model whose logits are spread, so that no two are near a tie; saved under `path` and returned."""
    torch.manual_seed(0)
    target = transformers.Qwen3ForCausalLM(small_config(vocab_size)).to(torch.float64).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    target.save_pretrained(path)
    return target


def randomized(model: Any) -> Any:
    """The model in float64, matrices around 0 and norms around 1."""
    torch.manual_seed(3)
    model = model.to(torch.float64).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
            if parameter.dim() == 1:
                parameter.add_(1.0)
    return model
