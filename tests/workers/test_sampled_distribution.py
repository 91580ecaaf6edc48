"""With drafting on, sampled tokens follow the target's own distribution: every family and setting.

Pairs of tokens that follow a prompt are counted over many seeds and compared with the probabilities computed plainly
from the target's logits: the token of the prefill, and the first that a decode step emits behind a draft block. A
planted mistake shows that the test can fail.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import workers.step
from kvmanager.ids import RequestId
from tests.drafter.test_choice import chi_squared_p
from tests.workers.random_pair import VOCAB, dflash2, dspark, load_random_pair
from tests.workers.split_pair import config, run_aggregated
from workers.aggregated import AggregatedEngine
from workers.assembly import Models, build
from workers.engine import Emitted
from workers.request import SamplingParams, SubmitRequest

SEEDS = 160
PROMPT = [3, 1, 4, 1, 5, 9, 2]
FAMILIES: dict[str, dict[str, Any] | None] = {
    "dflash": None,
    "dflash2": dflash2(),
    "dspark": dspark("rnn"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "top-k and top-p": {"temperature": 1.4, "top_k": 6, "top_p": 0.9},
    "min-p": {"temperature": 1.6, "min_p": 0.2},
    "bias": {"temperature": 1.0, "logit_bias": ((4, 2.0), (6, -100.0))},
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return load_random_pair(tmp_path_factory.mktemp("pair"), FAMILIES[request.param])


def next_logits(models: Models, contexts: list[list[int]]) -> Tensor:
    """Logits [N, V] behind each context, from one forward of the engine's own target."""
    engine = small_engine(models)
    rows = []
    for index, context in enumerate(contexts):
        sequence = engine._limits.sequence(str(index), tuple(context), SamplingParams(max_tokens=1), "")  # type: ignore[arg-type]
        engine.ledger.reserve(sequence.request_id, len(context))
        logits = engine._runner.prefill_chunk(sequence, 0, len(context))
        assert logits is not None
        rows.append(logits[0])
        engine.ledger.free(sequence.request_id)
    return torch.stack(rows)


def plain_distribution(logits_V: Tensor, sampling: SamplingParams) -> Tensor:
    """What the settings promise, the obvious way: bias, temperature, min-p, top-k, top-p."""
    logits_V = logits_V.double().clone()
    for token, bias in sampling.logit_bias:
        logits_V[token] += bias
    probs = (logits_V / sampling.temperature).softmax(-1)
    probs[probs < sampling.min_p * probs.max()] = 0
    order = probs.argsort(descending=True)
    if sampling.top_k:
        probs[order[sampling.top_k :]] = 0
    probs /= probs.sum()
    reached = 0.0
    for token in order.tolist():
        if reached >= sampling.top_p:
            probs[token] = 0
        reached += float(probs[token])
    return probs / probs.sum()


def pair_distribution(models: Models, sampling: SamplingParams) -> Tensor:
    """Probabilities of (first, second) token, [V * V]."""
    with torch.inference_mode():
        first = plain_distribution(next_logits(models, [PROMPT])[0], sampling)
        behind = next_logits(models, [[*PROMPT, token] for token in range(VOCAB)])
    second = torch.stack([plain_distribution(row, sampling) for row in behind])
    return (first[:, None] * second).flatten()


def counted(pairs: list[list[int]]) -> Tensor:
    return torch.bincount(torch.tensor([a * VOCAB + b for a, b in pairs]), minlength=VOCAB * VOCAB)


def sampled(models: Models, setting: dict[str, Any]) -> list[list[int]]:
    """The first two tokens under each seed; the second comes from a step that verified a block of drafts."""
    engine = small_engine(models)
    pairs: dict[str, list[int]] = {str(seed): [] for seed in range(SEEDS)}
    for seed, request_id in enumerate(pairs):
        asked = SamplingParams(max_tokens=2, ignore_eos=True, seed=seed, **setting)
        engine.submit(
            SubmitRequest(request_id=RequestId(request_id), prompt_token_ids=tuple(PROMPT), sampling=asked)
        )
    with torch.inference_mode():
        while not engine.idle:
            for event in engine.step(0.0):
                if isinstance(event, Emitted):
                    pairs[event.output.request_id] += event.output.token_ids
    engine.check()
    assert engine.decode.drafted_steps == SEEDS
    return list(pairs.values())


def small_engine(models: Models) -> AggregatedEngine:
    small = msgspec.structs.replace(
        config("aggregated", max_batch=SEEDS, dtype="float64"), max_seq_len=32, max_waiting=SEEDS
    )
    engine = build(small, models).engine
    assert isinstance(engine, AggregatedEngine)
    return engine


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_tokens_follow_the_targets_distribution(family: Models, setting: str) -> None:
    sampling = SamplingParams(max_tokens=2, **SETTINGS[setting])
    expected = SEEDS * pair_distribution(family, sampling)
    assert chi_squared_p(counted(sampled(family, SETTINGS[setting])), expected) > 0.01


def test_a_planted_mistake_fails(family: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes the draft for the target's choice follows the drafter's distribution."""

    def all_of_them(draft_BK: Tensor, target_BK1: Tensor) -> Tensor:
        target_BK1[:, : draft_BK.shape[1]] = draft_BK
        return torch.full((draft_BK.shape[0],), draft_BK.shape[1])

    monkeypatch.setattr(workers.step, "accept", all_of_them)
    sampling = SamplingParams(max_tokens=2, **SETTINGS["plain"])
    expected = SEEDS * pair_distribution(family, sampling)
    assert chi_squared_p(counted(sampled(family, SETTINGS["plain"])), expected) < 0.001


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_drafting_changes_no_sampled_token(family: Models, setting: str) -> None:
    asked = SamplingParams(max_tokens=16, ignore_eos=True, seed=5, **SETTINGS[setting])
    prompts = [PROMPT, PROMPT[:3], [8, 8, 2, 0, 6]]
    without = run_aggregated(family, prompts, msgspec.structs.replace(asked, draft_tokens=0), dtype="float64")
    drafted = run_aggregated(family, prompts, asked, dtype="float64")
    assert [each.tokens for each in drafted] == [each.tokens for each in without]
    if SETTINGS[setting].get("logit_bias"):
        assert not any(6 in each.tokens for each in drafted)
