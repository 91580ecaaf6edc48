"""A target and a drafter of a few thousand random weights, in float64: every step is cheap and exact."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from drafter.checkpoint import TargetFacts, load_drafter, save_drafter, tensor_shapes
from drafter.config import DrafterConfig
from drafter.fingerprint import drafter_fingerprint
from drafter.ranks import ALONE
from tests.device import DEVICE
from tests.drafter.conftest import NETWORK
from tests.workers.tiny_checkpoints import config_of, random_tensors, write_directory
from workers.assembly import Models
from workers.backend import TorchBackend
from workers.group.ranks import GroupRanks
from workers.models.load import load_decoder
from workers.pairs import ModelPair

VOCAB = 11  # so few that drafts of a random drafter are accepted now and then


def load_random_pair(
    directory: Path,
    drafting: Mapping[str, Any] | None = None,
    vocabulary: Collection[int] | None = None,
    **target_fields: Any,
) -> Models:
    """Write both checkpoints, arguments as below, and load them as `workers.assembly.load_models` would.

    vocabulary: what the drafter may say.
    """
    return load_pair(write_random_pair(directory, drafting, **target_fields), vocabulary=vocabulary)


def write_random_pair(
    directory: Path, drafting: Mapping[str, Any] | None = None, family: str = "llama", **target_fields: Any
) -> ModelPair:
    """Write both checkpoints.

    `drafting` changes fields of the drafter's config.json, which is a DFlash drafter's otherwise; `target_fields` those
    of the target's.
    """
    config = config_of(
        family,
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": VOCAB,
            "max_position_embeddings": 512,
            "eos_token_id": 2,
            **target_fields,
        },
    )
    target = write_directory(directory / "target", config, random_tensors(config, seed=1))
    draft_config = {**_draft_config(), **(drafting or {})}
    parsed = DrafterConfig.from_dict(draft_config)
    shapes = tensor_shapes(parsed)
    if parsed.hidden_size != parsed.target_hidden_size:  # then it cannot borrow the target's
        own = (parsed.vocab_size, parsed.hidden_size)
        shapes |= {"embed_tokens.weight": own, "lm_head.weight": own}
    generator = torch.Generator().manual_seed(2)
    tensors = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    if draft_config.get("draft_vocab_size", VOCAB) < VOCAB:
        tensors["d2t"] = torch.tensor([0, *[1] * (draft_config["draft_vocab_size"] - 1)])  # it lacks token 1
    drafter_path = directory / "drafter"
    save_drafter(drafter_path, draft_config, tensors)
    return ModelPair("random", target, drafter_path)


def load_pair(
    pair: ModelPair,
    ranks: GroupRanks | None = None,
    *,
    attention_dp: bool = False,
    expert_parallel: bool = False,
    vocabulary: Collection[int] | None = None,
) -> Models:
    """Load both checkpoints in float64, as one rank of several if `ranks` says so."""
    decoder = load_decoder(
        pair.target_path,
        torch.float64,
        DEVICE,
        ranks=ranks or ALONE,
        attention_dp=attention_dp,
        expert_parallel=expert_parallel,
    )
    if pair.drafter_path is None:
        return Models(pair, decoder, None, None, TorchBackend(DEVICE), ranks)
    facts = TargetFacts(
        hidden_size=decoder.config.hidden_size,
        vocab_size=decoder.config.vocab_size,
        num_layers=decoder.config.num_layers,
        embed_weight=decoder.embed_weight,
        lm_head_weight=decoder.lm_head_weight,
        lm_head=decoder.lm_head,
        fingerprint=decoder.fingerprint,
        ranks=decoder.ranks,
    )
    drafter = load_drafter(pair.drafter_path, facts, vocabulary=vocabulary)
    fingerprint = drafter_fingerprint(pair.drafter_path)
    return Models(pair, decoder, drafter, fingerprint, TorchBackend(DEVICE), ranks)


def dspark(kind: str, **more: Any) -> dict[str, Any]:
    """A DSpark drafter for the same target: as many drafts as the DFlash one, from one slot less."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "dflash_config": None,
        "block_size": 3,
        "mask_token_id": 7,
        "target_layer_ids": [0],
        "markov_rank": 6,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    } | more


def dflash2(**more: Any) -> dict[str, Any]:
    """A DFlash 2 drafter for the same target, of as many drafts."""
    sizes = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 2}
    return {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0], **sizes},
    } | more


# Nothing of it is the target's: hidden size 32, two heads over one, head size 16.
ANOTHER_SHAPE: dict[str, Any] = {
    "hidden_size": 24,
    "target_hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def _draft_config() -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        **NETWORK,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "layer_types": ["full_attention"],
        "num_target_layers": 2,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0]},
    }
