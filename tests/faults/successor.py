"""A constructed DSpark pair in which a draft depends on the token before and on nothing else.

Its target says to each token its successor: no layer adds anything, and the output head's row of a token is the
embedding of its predecessor. The drafter's own head says nothing; its Markov head knows most successors. So it shows
what becomes of a sequential head, which has nothing to do on the pair `tiny`: there the context decides every token.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from drafter.checkpoint import save_drafter, tensor_shapes
from drafter.config import DrafterConfig
from tests.workers.tiny_checkpoints import config_of, random_tensors, write_directory
from workers.assembly import Models, load_models
from workers.config import PairSpec, WorkerConfig

VOCABULARY = 264
KNOWN_SHARE = 0.85
_RANK = 48


def load_successor(directory: Path) -> Models:
    """Write both checkpoints and load them."""
    chance = torch.Generator().manual_seed(3)
    cycle = torch.randperm(VOCABULARY, generator=chance)
    predecessor = torch.empty_like(cycle)
    predecessor[cycle] = cycle.roll(1)
    config = config_of(
        "llama", num_hidden_layers=2, vocab_size=VOCABULARY, max_position_embeddings=2048, eos_token_id=256
    )
    tensors = _mute(random_tensors(config, seed=4))
    tensors["model.norm.weight"] = torch.ones(config["hidden_size"])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][predecessor]
    target = write_directory(directory / "target", config, tensors)
    drafting = _drafter_config(config["hidden_size"])
    drafter = {
        name: torch.randn(shape, generator=chance) * 0.1 + (len(shape) == 1)
        for name, shape in tensor_shapes(DrafterConfig.from_dict(drafting)).items()
    }
    codes_VR = torch.nn.functional.normalize(torch.randn(VOCABULARY, _RANK, generator=chance), dim=-1)
    known_V1 = torch.rand(VOCABULARY, 1, generator=chance) < KNOWN_SHARE
    drafter["markov_head.markov_w1.weight"] = codes_VR
    drafter["markov_head.markov_w2.weight"] = 10 * codes_VR[predecessor] * known_V1
    drafter["lm_head.weight"] = torch.zeros(VOCABULARY, config["hidden_size"])
    save_drafter(directory / "drafter", drafting, _mute(drafter))
    spec = PairSpec(name="successor", target=str(target), drafter=str(directory / "drafter"))
    return load_models(WorkerConfig(role="aggregated", pair=spec))


def _mute(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let no layer add anything to the embedding."""
    silent = ("o_proj.weight", "down_proj.weight")
    return {
        name: torch.zeros_like(tensor) if name.endswith(silent) else tensor
        for name, tensor in tensors.items()
    }


def _drafter_config(hidden_size: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "layer_types": ["full_attention"],
        "num_target_layers": 2,
        "block_size": 7,
        "mask_token_id": 259,
        "target_layer_ids": [0],
        "markov_rank": _RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }
