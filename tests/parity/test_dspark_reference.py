"""Our DSpark against SpecForge's modules, which are DeepSpec's: network, every head, confidences, tokens.

SpecForge's own helper for a whole block (`_sample_draft_tokens`) leaves the first slot out, though training scores it;
so the reference's head is asked for all slots, as DeepSpec's evaluator does. The reference computes norms and rotary
angles in float32 even in a float64 model.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.checkpoint import TargetFacts, load_drafter
from drafter.choice import ChoiceRule
from drafter.proposal import KeyedChoice
from tests.drafter.plain import Paged
from tests.parity.random_qwen3 import HIDDEN, LAYERS, randomized, small_config

pytestmark = [
    pytest.mark.parity,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
pytest.importorskip("specforge")

BLOCK, VOCAB = 7, 101
LARGEST_DIFFERENCE = 1e-6  # of values of about 1


def dspark_module() -> ModuleType:
    """The module alone: its package imports training code of other families, with dependencies of their own."""
    name = "specforge.modeling.draft"
    if name not in sys.modules:
        found = importlib.util.find_spec("specforge.modeling")
        assert found is not None
        assert found.submodule_search_locations is not None
        package = ModuleType(name)
        package.__path__ = [str(Path(place) / "draft") for place in found.submodule_search_locations]
        sys.modules[name] = package
    return importlib.import_module(f"{name}.dspark")


def reference_of(kind: str, rank: int) -> Any:
    """A random drafter of the reference's class, float64."""
    config = small_config(VOCAB, num_hidden_layers=3, attn_implementation="eager")
    config.architectures = ["DSparkDraftModel"]
    config.num_target_layers = LAYERS
    config.block_size = BLOCK
    config.dflash_config = {
        "attention_mode": "gqa",
        "mask_token_id": 100,
        "target_layer_ids": [0, 2, 4],
        "projector_type": "dspark",
        "markov_rank": rank,
        "markov_head_type": kind,
        "confidence_head_alpha": 1.0,
        "enable_confidence_head": True,
        "confidence_head_with_markov": rank > 0,
    }
    return randomized(dspark_module().DSparkDraftModel(config))


@pytest.mark.parametrize("chunks", [[37], [16, 21], [1, 9, 3, 24]], ids=str)
@pytest.mark.parametrize(("kind", "rank"), [("vanilla", 8), ("gated", 8), ("rnn", 8), ("vanilla", 0)])
def test_blocks_equal_the_references_in_one_piece_and_in_chunks(
    tmp_path: Path, kind: str, rank: int, chunks: list[int]
) -> None:
    reference = reference_of(kind, rank)
    reference.save_pretrained(tmp_path)
    torch.manual_seed(5)
    embedding, head = (torch.randn(VOCAB, HIDDEN, dtype=torch.float64) for _ in range(2))
    taps = torch.randn(1, sum(chunks), 3 * HIDDEN, dtype=torch.float64)
    anchor, start = 9, sum(chunks)
    theirs = reference_block(reference, embedding, head, taps, anchor)

    facts = TargetFacts(HIDDEN, VOCAB, LAYERS, embedding, head, fingerprint="")
    paged = Paged(load_drafter(tmp_path, facts), torch.float64)
    begin = 0
    for size in chunks:
        paged.append(0, taps[0, begin : begin + size], begin)
        begin += size
    block = paged.block([0], [anchor], [start], BLOCK)
    proposal = paged.choose([0], [anchor], [start], BLOCK, KeyedChoice([ChoiceRule()], [start + 1]))
    assert proposal.tokens_BK.tolist() == theirs["tokens"].tolist()
    assert proposal.confidences_BK is not None
    scale = float(theirs["hidden"].abs().max())
    worst = {
        "hidden": float((block.hidden_BKH - theirs["hidden"]).abs().max()) / scale,
        "confidences": float((proposal.confidences_BK - theirs["confidences"]).abs().max()),
    }
    print(kind, rank, chunks, worst)
    assert max(worst.values()) <= LARGEST_DIFFERENCE


def reference_block(
    reference: Any, embedding: Tensor, head: Tensor, taps: Tensor, anchor: int
) -> dict[str, Tensor]:
    """Hidden states, greedy tokens and confidences of all slots behind the whole context."""
    start = taps.shape[1]
    ids = torch.tensor([[anchor] + [reference.mask_token_id] * (BLOCK - 1)])
    with torch.inference_mode():
        hidden = reference(
            position_ids=torch.arange(start + BLOCK)[None],
            noise_embedding=embedding[ids],
            target_hidden=taps,
            past_key_values=None,
            use_cache=False,
        )
        logits = hidden @ head.T
        if reference.markov_head is None:
            tokens = logits.argmax(-1)
        else:
            tokens, _ = reference.markov_head.sample_block_tokens(
                logits, first_prev_token_ids=ids[:, 0], hidden_states=hidden
            )
        previous = torch.cat((ids[:, :1], tokens[:, :-1]), dim=1)
        confidences = reference.predict_confidence(hidden, prev_token_ids=previous).sigmoid()
    return {"hidden": hidden, "tokens": tokens, "confidences": confidences}
