"""The smollm2 pair with heads that two and four ranks can share.

Target and drafter have nine heads over three of keys and values. Here they have three more over a fourth, all of whose
weights are zeros: they add zeros to every sum, and the pair says what smollm2 says, with its acceptance.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from drafter.checkpoint import save_drafter
from tests.workers.tiny_checkpoints import config_of, write_directory
from workers.config import PairSpec
from workers.models.gguf_source import GgufSource
from workers.models.source import expected_tensors
from workers.pairs import resolve_pair

HEADS, KV_HEADS, HEAD_DIM = 12, 4, 64


def write_even_pair(directory: Path) -> PairSpec:
    """Write both checkpoints, in bfloat16."""
    pair = resolve_pair("smollm2")
    assert pair.drafter_path is not None
    source = GgufSource(pair.target_path)
    known = source.config
    tensors = {f"model.{name}": _even(name, source.read(name)) for name in expected_tensors(known)}
    config = config_of(
        "llama",
        hidden_size=known.hidden_size,
        intermediate_size=known.intermediate_size,
        num_hidden_layers=known.num_layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=known.vocab_size,
        max_position_embeddings=known.max_position_embeddings,
        rms_norm_eps=known.rms_norm_eps,
        rope_theta=known.rope.theta,
        tie_word_embeddings=known.tie_word_embeddings,
        bos_token_id=known.bos_token_id,
        eos_token_id=known.eos_token_ids[0],
    )
    target = write_directory(directory / "target", config, tensors)
    drafting = json.loads((pair.drafter_path / "config.json").read_text())
    del drafting["target_fingerprint"]  # of the target as it is published
    drafting |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    drafts = load_file(pair.drafter_path / "model.safetensors")
    drafter = directory / "drafter"
    save_drafter(drafter, drafting, {name: _even(name, tensor) for name, tensor in drafts.items()})
    return PairSpec(name="", target=str(target), drafter=str(drafter))


def _even(name: str, tensor: Tensor) -> Tensor:
    tensor = tensor.to(torch.bfloat16)
    if ".q_proj." in name:
        tensor = F.pad(tensor, (0, 0, 0, HEADS * HEAD_DIM - len(tensor)))
    elif ".k_proj." in name or ".v_proj." in name:
        tensor = F.pad(tensor, (0, 0, 0, KV_HEADS * HEAD_DIM - len(tensor)))
    elif ".o_proj." in name:
        tensor = F.pad(tensor, (0, HEADS * HEAD_DIM - tensor.shape[1]))
    return tensor.contiguous()
