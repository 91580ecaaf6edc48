"""DSpark: shifted slots, sequential heads and confidences against the formulas written plainly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.checkpoint import TargetFacts, load_drafter, save_drafter
from drafter.choice import ChoiceRule, choose
from drafter.dflash import BlockDrafter
from drafter.errors import DrafterCheckpointError
from drafter.proposal import KeyedChoice
from tests.drafter.conftest import HIDDEN, VOCAB
from tests.drafter.dspark_checkpoints import BLOCK, RANK, deepspec, random_weights, specforge, speculators
from tests.drafter.plain import Paged, plain_hidden, random_taps

Facts = Callable[..., TargetFacts]
KINDS = ["vanilla", "gated", "rnn"]
RULES = [
    ChoiceRule(),
    ChoiceRule(temperature=1.2, seed=9),
    ChoiceRule(temperature=0.8, top_k=9, top_p=0.9, seed=4),
]


def plain_tokens(
    kind: str,
    weights: dict[str, Tensor],
    hidden_SH: Tensor,
    logits_SV: Tensor,
    anchor: int,
    rule: ChoiceRule,
    first: int,
) -> tuple[list[int], list[float]]:
    """Tokens and confidences, from left to right, one request, one slot after the other."""
    w1, w2 = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    state, previous = torch.zeros(RANK, dtype=torch.float64), anchor
    tokens: list[int] = []
    confidences: list[float] = []
    for slot, (hidden, logits) in enumerate(zip(hidden_SH, logits_SV, strict=True)):
        embedded = w1[previous]
        confidence = weights["confidence_head.proj.weight"][0] @ torch.cat((hidden, embedded))
        confidences.append(float(torch.sigmoid(confidence + weights["confidence_head.proj.bias"][0])))
        if kind == "gated":
            gate = weights["markov_head.gate_proj.weight"] @ torch.cat((hidden, embedded))
            embedded = torch.sigmoid(gate + weights["markov_head.gate_proj.bias"]) * embedded
        elif kind == "rnn":
            joint = weights["markov_head.joint_proj.weight"] @ torch.cat((state, embedded, hidden))
            joint = joint + weights["markov_head.joint_proj.bias"]
            keep = torch.sigmoid(joint[:RANK])
            state = keep * state + (1 - keep) * torch.tanh(joint[RANK : 2 * RANK])
            embedded = torch.tanh(joint[2 * RANK :])
        previous = int(choose((logits + w2 @ embedded)[None], [rule], [first + slot])[0])
        tokens.append(previous)
    return tokens, confidences


def saved_drafter(path: Path, raw: dict[str, Any], facts: TargetFacts, **more: Tensor) -> BlockDrafter:
    save_drafter(path, raw, {**random_weights(raw), **more})
    return load_drafter(path, facts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES, ids=["greedy", "sampled", "filtered"])
def test_a_block_is_drafted_from_left_to_right_as_the_formulas_say(
    tmp_path: Path, facts: Facts, kind: str, rule: ChoiceRule
) -> None:
    raw, target = deepspec(kind), facts()
    weights = random_weights(raw)
    paged = Paged(saved_drafter(tmp_path, raw, target), torch.float64)
    for length in (11, 16):
        taps = random_taps(length, seed=length)
        paged.append(0, taps[:7], 0)
        paged.append(0, taps[7:], 7)  # context in chunks
        hidden = plain_hidden(raw, weights, target.embed_weight, taps, 9)
        logits = hidden @ target.lm_head_weight.T
        wanted = plain_tokens(kind, weights, hidden, logits, 9, rule, length + 1)
        proposal = paged.choose([0], [9], [length], BLOCK, KeyedChoice([rule], [length + 1]))
        assert proposal.tokens_BK[0].tolist() == wanted[0]
        assert proposal.confidences_BK is not None
        torch.testing.assert_close(proposal.confidences_BK[0], torch.tensor(wanted[1], dtype=torch.float64))
        block = paged.block([0], [9], [length], BLOCK)
        assert (block.hidden_BKH[0] - hidden).abs().max() < 1e-9
        assert (block.logits_BKV[0] - logits).abs().max() < 1e-9


def test_a_block_of_n_slots_drafts_n_tokens_one_more_than_dflash(tmp_path: Path, facts: Facts) -> None:
    drafter = saved_drafter(tmp_path / "dspark", deepspec(), facts())
    assert (drafter.block_size, drafter.max_draft_tokens, drafter.lookahead) == (BLOCK, BLOCK, BLOCK + 1)
    dflash_slots = saved_drafter(tmp_path / "slots", speculators(sample_from_anchor=False), facts())
    assert (dflash_slots.max_draft_tokens, dflash_slots.lookahead) == (BLOCK - 1, BLOCK)
    a, b = (Paged(each, torch.float64) for each in (drafter, dflash_slots))
    taps = random_taps(6, seed=1)
    a.append(0, taps, 0)
    b.append(0, taps, 0)
    # The same weights: slot j of one is slot j of the other, but drafts another position.
    one, other = a.logits([0], [4], [6], BLOCK)[0, 1:], b.logits([0], [4], [6], BLOCK - 1)[0]
    torch.testing.assert_close(one, other)  # some processors round five rows otherwise than four


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_drafts_the_same_alone_in_a_batch_and_with_fewer_drafts(
    tmp_path: Path, facts: Facts, kind: str
) -> None:
    paged = Paged(saved_drafter(tmp_path, specforge(kind), facts(torch.float32)), torch.float32)
    starts, anchors = [3, 17, 8], [1, 2, 3]
    for request, start in enumerate(starts):
        paged.append(request, random_taps(start, seed=10 + request, dtype=torch.float32), 0)
    firsts = [start + 1 for start in starts]
    together = paged.choose([0, 1, 2], anchors, starts, BLOCK, KeyedChoice(RULES, firsts))
    assert together.confidences_BK is not None
    for request in range(3):
        one = ([request], [anchors[request]], [starts[request]])
        for count in (1, 3, BLOCK):
            alone = paged.choose(*one, count, KeyedChoice([RULES[request]], [firsts[request]]))
            assert torch.equal(alone.tokens_BK[0], together.tokens_BK[request, :count])
            assert alone.confidences_BK is not None
            torch.testing.assert_close(alone.confidences_BK[0], together.confidences_BK[request, :count])


def test_all_dialects_of_one_drafter_draft_alike(tmp_path: Path, facts: Facts) -> None:
    tokens = []
    for dialect in (deepspec, specforge, speculators):
        drafter = saved_drafter(tmp_path / dialect.__name__, dialect("gated"), facts())
        assert (drafter.config.family, drafter.tap_layer_ids) == ("dspark", (1, 3))
        paged = Paged(drafter, torch.float64)
        paged.append(0, random_taps(9, seed=2), 0)
        tokens.append(paged.choose([0], [4], [9], BLOCK, KeyedChoice([RULES[1]], [10])).tokens_BK.tolist())
    assert tokens[0] == tokens[1] == tokens[2]


def test_heads_that_are_off_leave_the_plain_choice(tmp_path: Path, facts: Facts) -> None:
    drafter = saved_drafter(tmp_path, deepspec(markov_rank=0, enable_confidence_head=False), facts())
    paged = Paged(drafter, torch.float64)
    paged.append(0, random_taps(9, seed=2), 0)
    proposal = paged.choose([0], [4], [9], BLOCK, KeyedChoice([ChoiceRule()], [10]))
    assert torch.equal(proposal.tokens_BK, paged.logits([0], [4], [9], BLOCK).argmax(-1))
    assert proposal.confidences_BK is not None
    likeliest = paged.logits([0], [4], [9], BLOCK).softmax(-1).amax(-1)
    torch.testing.assert_close(proposal.confidences_BK, likeliest)


def test_a_confidence_head_over_hidden_states_alone_reads_no_token(tmp_path: Path, facts: Facts) -> None:
    raw = deepspec(confidence_head_with_markov=False)
    weights = random_weights(raw)
    paged = Paged(saved_drafter(tmp_path, raw, facts()), torch.float64)
    paged.append(0, random_taps(9, seed=2), 0)
    hidden = paged.block([0], [4], [9], BLOCK).hidden_BKH
    scores = hidden @ weights["confidence_head.proj.weight"][0] + weights["confidence_head.proj.bias"][0]
    found = paged.choose([0], [4], [9], BLOCK, KeyedChoice([ChoiceRule()], [10])).confidences_BK
    assert found is not None
    torch.testing.assert_close(found, scores.sigmoid())


def test_temperatures_of_a_calibrated_head_divide_its_logits(tmp_path: Path, facts: Facts) -> None:
    temperatures = [0.5, 1.0, 2.0, 3.0, 4.0]
    said = []
    for name, raw in (("raw", deepspec()), ("scaled", deepspec(confidence_temperatures=temperatures))):
        paged = Paged(saved_drafter(tmp_path / name, raw, facts()), torch.float64)
        paged.append(0, random_taps(9, seed=2), 0)
        for count in (3, BLOCK):
            found = paged.choose([0], [4], [9], count, KeyedChoice([ChoiceRule()], [10])).confidences_BK
            assert found is not None
            said.append(found[0].logit())
    for raw_logits, scaled in zip(said[:2], said[2:], strict=True):
        torch.testing.assert_close(raw_logits / torch.tensor(temperatures[: len(scaled)]), scaled)


def test_an_embedding_and_a_head_of_its_own_are_used_and_copies_of_the_targets_are_not_kept(
    tmp_path: Path, facts: Facts
) -> None:
    target, raw = facts(), deepspec()
    embed = torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    head = torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    more = {"embed_tokens.weight": embed, "lm_head.weight": head}
    paged = Paged(saved_drafter(tmp_path / "own", raw, target, **more), torch.float64)
    taps = random_taps(9, seed=2)
    paged.append(0, taps, 0)
    wanted = plain_hidden(raw, random_weights(raw), embed, taps, 4) @ head.T
    torch.testing.assert_close(paged.logits([0], [4], [9], BLOCK)[0], wanted)
    copies = {"embed_tokens.weight": target.embed_weight, "lm_head.weight": target.lm_head_weight}
    shared = saved_drafter(tmp_path / "copies", raw, target, **copies)
    assert shared._weights.embed_VH is target.embed_weight
    assert shared._weights.lm_head.dense_weight().data_ptr() == target.lm_head_weight.data_ptr()


def test_a_drafter_of_another_width_brings_its_own_embedding_and_head(tmp_path: Path, facts: Facts) -> None:
    raw = deepspec(hidden_size=16, target_hidden_size=HIDDEN)
    more = {
        "embed_tokens.weight": torch.randn(VOCAB, 16, dtype=torch.float64),
        "lm_head.weight": torch.randn(VOCAB, 16, dtype=torch.float64),
    }
    paged = Paged(saved_drafter(tmp_path / "narrow", raw, facts(), **more), torch.float64)
    taps = random_taps(9, seed=2)
    paged.append(0, taps, 0)
    weights = random_weights(raw)
    wanted = plain_hidden(raw, weights, more["embed_tokens.weight"], taps, 4) @ more["lm_head.weight"].T
    torch.testing.assert_close(paged.logits([0], [4], [9], BLOCK)[0], wanted)
    with pytest.raises(DrafterCheckpointError, match=r"embed_tokens\.weight is missing.*16.*24"):
        saved_drafter(tmp_path / "lacking", raw, facts())


def test_a_reduced_vocabulary_drafts_the_targets_ids(tmp_path: Path, facts: Facts) -> None:
    known = torch.tensor([0, 3, 4, 9, 17, 30, 31, 49])
    offsets = known - torch.arange(len(known))
    raw = speculators(draft_vocab_size=len(known))
    target = facts()
    drafter = saved_drafter(tmp_path / "few", raw, target, d2t=offsets)
    paged = Paged(drafter, torch.float64)
    paged.append(0, random_taps(9, seed=2), 0)
    # The whole vocabulary with nothing but -inf for what the drafter does not know.
    weights = random_weights(raw)
    hidden = paged.block([0], [4], [9], BLOCK).hidden_BKH[0]
    wide = torch.full((BLOCK, VOCAB), -torch.inf, dtype=torch.float64)
    wide[:, known] = hidden @ target.lm_head_weight[known].T
    w2 = torch.zeros(VOCAB, RANK, dtype=torch.float64)
    w2[known] = weights["markov_head.markov_w2.weight"]
    wanted = plain_tokens(
        "vanilla", weights | {"markov_head.markov_w2.weight": w2}, hidden, wide, 4, RULES[1], 10
    )
    found = paged.choose([0], [4], [9], BLOCK, KeyedChoice([RULES[1]], [10])).tokens_BK[0].tolist()
    assert found == wanted[0]
    assert set(found) <= set(known.tolist())
    with pytest.raises(DrafterCheckpointError, match="d2t"):
        saved_drafter(tmp_path / "unmapped", raw, target)
    with pytest.raises(DrafterCheckpointError, match="distinct ids under 50"):
        saved_drafter(tmp_path / "wrong", raw, target, d2t=offsets + 1)
