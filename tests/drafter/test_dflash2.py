"""DFlash 2: convolutions along the block and the candidate selector, against the formulas written plainly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter.checkpoint import TargetFacts, load_drafter, save_drafter
from drafter.choice import ChoiceRule, choose
from drafter.errors import DrafterCheckpointError
from drafter.proposal import KeyedChoice
from tests.drafter.conftest import HIDDEN, VOCAB, dflash2
from tests.drafter.dspark_checkpoints import random_weights
from tests.drafter.plain import Paged, plain_hidden, random_taps

Facts = Callable[..., TargetFacts]
DRAFTS = 4
RULES = [
    ChoiceRule(),
    ChoiceRule(temperature=1.2, seed=9),
    ChoiceRule(temperature=0.8, top_k=3, top_p=0.9, seed=4),
]


def weights_of(raw: dict[str, Any]) -> dict[str, Tensor]:
    """Random ones, with codebooks so large that the walk decides."""
    return {
        name: tensor * 4 if "codebook" in name else tensor for name, tensor in random_weights(raw).items()
    }


def loaded(path: Path, raw: dict[str, Any], target: TargetFacts, **more: Tensor) -> Paged:
    save_drafter(path, raw, weights_of(raw) | more)
    return Paged(load_drafter(path, target), target.embed_weight.dtype)


def plain_tokens(
    raw: dict[str, Any],
    weights: dict[str, Tensor],
    hidden_KH: Tensor,
    logits_KV: Tensor,
    anchor: int,
    rule: ChoiceRule,
    first: int,
) -> list[int]:
    """One request, one slot after the other, one candidate after the other."""
    predecessors = weights["candidate_selector.predecessor_codebook"]
    successors = weights["candidate_selector.successor_codebook"]
    previous, tokens = anchor, []
    for draft, (hidden, logits) in enumerate(zip(hidden_KH, logits_KV, strict=True)):
        gate = weights["candidate_selector.hidden_projection.weight"] @ hidden
        scores = torch.full_like(logits, -torch.inf)
        for candidate in logits.argsort(descending=True)[: raw["dflash_config"]["selector_top_k"]].tolist():
            edge = torch.dot(predecessors[previous] * gate, successors[candidate])
            scores[candidate] = logits[candidate] + edge
        previous = int(choose(scores[None], [rule], [first + draft])[0])
        tokens.append(previous)
    return tokens


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("reach", [1, 2, 3, 9])
def test_a_block_is_convolved_and_walked_as_the_formulas_say(
    tmp_path: Path, facts: Facts, raw_config: dict[str, Any], rule: ChoiceRule, reach: int
) -> None:
    raw, target = dflash2(raw_config, conv_kernel_size=reach), facts()
    weights = weights_of(raw)
    paged = loaded(tmp_path, raw, target)
    changed = 0
    for length in (11, 16):
        taps = random_taps(length, seed=length)
        paged.append(0, taps[:7], 0)
        paged.append(0, taps[7:], 7)  # context in chunks
        hidden = plain_hidden(raw, weights, target.embed_weight, taps, 9)[1:]
        logits = hidden @ target.lm_head_weight.T
        for count in (DRAFTS, 2):
            block = paged.block([0], [9], [length], count)
            assert (block.hidden_BKH[0] - hidden[:count]).abs().max() < 1e-9
            assert (block.logits_BKV[0] - logits[:count]).abs().max() < 1e-9
        wanted = plain_tokens(raw, weights, hidden, logits, 9, rule, length + 1)
        found = paged.choose([0], [9], [length], DRAFTS, KeyedChoice([rule], [length + 1]))
        assert found.tokens_BK[0].tolist() == wanted
        assert found.confidences_BK is None
        changed += logits.argmax(dim=-1).tolist() != wanted
    assert changed


WINDOWED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 6,
}
MASKS: dict[str, dict[str, Any]] = {
    "causal windows": WINDOWED,
    "windows that see ahead": WINDOWED | {"is_causal": False},
    "a window smaller than the block": WINDOWED | {"is_causal": False, "sliding_window": 3},
    "all causal": WINDOWED | {"is_causal": True},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("family", ["dflash", "dflash2"])
def test_each_layer_sees_what_its_mask_lets_it_see(
    tmp_path: Path, facts: Facts, raw_config: dict[str, Any], family: str, masks: dict[str, Any]
) -> None:
    raw = (dflash2(raw_config) if family == "dflash2" else raw_config) | masks
    target = facts()
    paged = loaded(tmp_path / "drafter", raw, target)
    lengths = [17, 2, 6]
    for request, length in enumerate(lengths):
        paged.append(request, random_taps(length, request), 0)
    hidden_BKH = paged.block([0, 1, 2], [5, 6, 9], lengths, DRAFTS).hidden_BKH
    for request, (anchor, length) in enumerate(zip((5, 6, 9), lengths, strict=True)):
        context = random_taps(length, request)
        weights = random_weights(raw) if family == "dflash" else weights_of(raw)
        plain_SH = plain_hidden(raw, weights, target.embed_weight, context, anchor)
        unmasked_SH = plain_hidden(raw_config | raw | UNMASKED, weights, target.embed_weight, context, anchor)
        torch.testing.assert_close(hidden_BKH[request].cpu(), plain_SH[1:], rtol=0, atol=1e-9)
        assert length == 2 or not torch.allclose(plain_SH, unmasked_SH), "the mask matters here"


UNMASKED: dict[str, Any] = {"layer_types": ["full_attention"] * 3, "is_causal": False}


def test_a_request_drafts_the_same_alone_in_a_batch_and_with_fewer_drafts(
    tmp_path: Path, facts: Facts, raw_config: dict[str, Any]
) -> None:
    paged = loaded(tmp_path, dflash2(raw_config), facts(torch.float32))
    starts, anchors = [3, 17, 8], [1, 2, 3]
    for request, start in enumerate(starts):
        paged.append(request, random_taps(start, seed=10 + request, dtype=torch.float32), 0)
    firsts = [start + 1 for start in starts]
    together = paged.choose([0, 1, 2], anchors, starts, DRAFTS, KeyedChoice(RULES, firsts)).tokens_BK
    for request in range(3):
        one = ([request], [anchors[request]], [starts[request]])
        for count in (1, 3, DRAFTS):
            alone = paged.choose(*one, count, KeyedChoice([RULES[request]], [firsts[request]]))
            assert torch.equal(alone.tokens_BK[0], together[request, :count])


def test_codebooks_may_be_named_as_modules_or_as_published(
    tmp_path: Path, facts: Facts, raw_config: dict[str, Any]
) -> None:
    raw = dflash2(raw_config)
    paged = loaded(tmp_path, raw, facts())
    file = tmp_path / "model.safetensors"
    renamed = {f"{name}.weight" if "codebook" in name else name: t for name, t in load_file(file).items()}
    save_file(renamed, file)
    again = Paged(load_drafter(tmp_path, facts()), torch.float64)
    tokens = []
    for each in (paged, again):
        each.append(0, random_taps(9, seed=2), 0)
        tokens.append(each.choose([0], [4], [9], DRAFTS, KeyedChoice([RULES[1]], [10])).tokens_BK.tolist())
    assert tokens[0] == tokens[1]


def test_a_drafter_of_another_width_brings_its_own_embedding_and_head(
    tmp_path: Path, facts: Facts, raw_config: dict[str, Any]
) -> None:
    raw = dflash2(raw_config) | {"hidden_size": 18, "target_hidden_size": HIDDEN}
    embed, head = (torch.randn(VOCAB, 18, dtype=torch.float64) for _ in range(2))
    paged = loaded(tmp_path, raw, facts(), **{"embed_tokens.weight": embed, "lm_head.weight": head})
    taps = random_taps(9, seed=2)
    paged.append(0, taps, 0)
    wanted = plain_hidden(raw, weights_of(raw), embed, taps, 4)[1:] @ head.T
    torch.testing.assert_close(paged.logits([0], [4], [9], DRAFTS)[0], wanted)


def test_a_missing_convolution_is_named(tmp_path: Path, facts: Facts, raw_config: dict[str, Any]) -> None:
    raw = dflash2(raw_config)
    loaded(tmp_path, raw, facts())
    file = tmp_path / "model.safetensors"
    lacking = load_file(file)
    del lacking["layers.1.mlp_conv.base_kernel"]
    save_file(lacking, file)
    with pytest.raises(
        DrafterCheckpointError, match=r"1 of 51 tensors missing, first layers\.1\.mlp_conv\.base"
    ):
        load_drafter(tmp_path, facts())
