"""With drafting on, sampled tokens follow the target's own distribution: every family and setting, scheduled or not.

Steps are taken again and again from one state under other seeds. The first token that a step emits, and the second
where a draft was accepted, are counted and compared with the probabilities computed plainly from the target's logits.
(The second's noise is its own, so an accepted first token says nothing about it but what it follows.) Planted mistakes
fail the same test.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import workers.assembly
import workers.step
from drafter.penalties import BlockRows
from drafter.proposal import DraftChoice
from drafter.verify import accept
from kvmanager.ids import RequestId
from tests.drafter.test_choice import chi_squared_p
from tests.workers.embedded_pair import load_embedded_pair
from tests.workers.families import FAMILIES
from tests.workers.random_pair import VOCAB
from tests.workers.split_pair import Outcome, config, run_aggregated
from tests.workers.test_block_scheduling import Whim
from workers.aggregated import AggregatedEngine
from workers.assembly import Models, build
from workers.request import SamplingParams, SubmitRequest
from workers.runner import PromptChunk
from workers.sampler import Sampler
from workers.sequence import Sequence
from workers.step import Trim

BATCH, STEPS = 32, 24
PROMPT, ANCHOR = [3, 1, 4, 1, 5, 9, 2], 6
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "top-k and top-p": {"temperature": 1.4, "top_k": 6, "top_p": 0.9},
    "min-p": {"temperature": 1.6, "min_p": 0.2},
    "bias": {"temperature": 1.0, "logit_bias": ((4, 2.0), (6, -100.0))},
    "penalties": {
        "temperature": 1.2,
        "frequency_penalty": 0.8,
        "presence_penalty": 0.7,
        "repetition_penalty": 1.5,
    },
    "all of them": {
        "temperature": 1.1,
        "top_p": 0.95,
        "min_p": 0.05,
        "logit_bias": ((4, 1.5),),
        "frequency_penalty": -0.9,
        "presence_penalty": -0.4,
        "repetition_penalty": 0.7,
        "stop_token_ids": (1, 3),
        "min_tokens": 2,
    },
}
# Neither a shape nor a window changes how tokens are chosen.
EMBEDDED = "dspark embedded"
KINDS = [*(name for name in FAMILIES if "shape" not in name and "window" not in name), EMBEDDED]
# Drafts with confidences: a head's, or DFlash's own probabilities.
CONFIDENT = [
    name for name in KINDS if name == "dflash" or (name.startswith("dspark") and "without" not in name)
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Models]:
    torch.set_num_threads(1)
    rows = {name: row.load for name, row in FAMILIES.items() if name in KINDS}
    rows[EMBEDDED] = load_embedded_pair
    return {name: load(tmp_path_factory.mktemp("pair")) for name, load in rows.items()}


Behind = tuple[Tensor, Tensor]
"""The target's logits behind prompt and anchor, [V], and behind one token more, [V, V]."""


@pytest.fixture(scope="module")
def behind(loaded: dict[str, Models]) -> dict[str, Behind]:
    """For each family: an embedded drafter's target is its own, all others have one."""
    own, shared = logits_behind(loaded[EMBEDDED]), logits_behind(loaded["dflash"])
    return {name: own if name == EMBEDDED else shared for name in KINDS}


def logits_behind(models: Models) -> Behind:
    engine = engine_of(models)
    contexts = [[*PROMPT, ANCHOR], *([*PROMPT, ANCHOR, first] for first in range(VOCAB))]
    rows = []
    with torch.inference_mode():
        for context in contexts:
            sequence = engine._limits.sequence(RequestId("x"), tuple(context), SamplingParams(max_tokens=1))
            engine.ledger.reserve(sequence.request_id, len(context))
            (logits,) = engine._runner.prefill([PromptChunk(sequence, 0, len(context))])
            assert logits is not None
            rows.append(logits[0])
            engine.ledger.free(sequence.request_id)
    return rows[0], torch.stack(rows[1:])


def engine_of(models: Models) -> AggregatedEngine:
    small = msgspec.structs.replace(
        config("aggregated", max_batch=BATCH, dtype="float64"), max_seq_len=32, max_waiting=BATCH
    )
    engine = build(small, models).engine
    assert isinstance(engine, AggregatedEngine)
    return engine


def plain_distribution(logits_V: Tensor, sampling: SamplingParams, output: list[int]) -> Tensor:
    """What the settings promise behind prompt and output, the obvious way."""
    logits_V = logits_V.double().clone()
    for token, bias in sampling.logit_bias:
        logits_V[token] += bias
    for token in {*PROMPT, *output}:
        by = sampling.repetition_penalty
        logits_V[token] = logits_V[token] / by if logits_V[token] > 0 else logits_V[token] * by
    for token in set(output):
        logits_V[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    if len(output) < sampling.min_tokens:
        logits_V[list(sampling.stop_token_ids)] = -torch.inf
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


def sampled_p(models: Models, behind: Behind, setting: dict[str, Any], trim: Trim | None = None) -> float:
    """The smaller p-value of a step's first and second token under many seeds."""
    engine = engine_of(models)
    ids = [RequestId(str(row)) for row in range(BATCH)]
    plain = SamplingParams(max_tokens=8, ignore_eos=True)
    for request_id in ids:
        engine.submit(SubmitRequest(request_id=request_id, prompt_token_ids=tuple(PROMPT), sampling=plain))
    with torch.inference_mode():
        engine._admit()
        while engine._prefilling:
            engine._prefill()
        emitted = [
            tokens
            for step in range(STEPS)
            for tokens in emitted_by(engine, ids, SamplingParams(max_tokens=8, **setting), step * BATCH, trim)
        ]
    sampling = SamplingParams(max_tokens=8, **setting)
    first = torch.bincount(torch.tensor([tokens[0] for tokens in emitted]), minlength=VOCAB)
    pairs = torch.zeros((VOCAB, VOCAB), dtype=torch.int64)
    for tokens in emitted:
        if len(tokens) > 1:
            pairs[tokens[0], tokens[1]] += 1
    # A drafter that is sure of what the other settings rule out may have no draft accepted there.
    assert pairs.sum() > 0 or setting != SETTINGS["plain"], "some drafts were accepted"
    first_probs = plain_distribution(behind[0], sampling, [ANCHOR])
    then = [plain_distribution(row, sampling, [ANCHOR, token]) for token, row in enumerate(behind[1])]
    expected = pairs.sum(dim=1, keepdim=True) * torch.stack(then)
    first_p = chi_squared_p(first, len(emitted) * first_probs)
    return min(first_p, chi_squared_p(pairs.flatten(), expected.flatten())) if pairs.sum() else first_p


def emitted_by(
    engine: AggregatedEngine, ids: list[RequestId], sampling: SamplingParams, seed: int, trim: Trim | None
) -> list[list[int]]:
    """What a step from the same state emits for each request, under seeds from `seed` on. It commits nothing."""
    sequences = []
    for row, request_id in enumerate(ids):
        seeded = msgspec.structs.replace(sampling, seed=seed + row)
        sequence = engine._limits.sequence(request_id, tuple(PROMPT), seeded)
        sequence.take([ANCHOR])
        sequences.append(sequence)
    found = engine.decode._step.run(sequences, engine.decode._max_draft_tokens, trim)
    return [targets[: accepted + 1] for targets, accepted in zip(found.targets, found.accepted, strict=True)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", KINDS)
def test_tokens_follow_the_targets_distribution(
    loaded: dict[str, Models], behind: dict[str, Behind], family: str, setting: str
) -> None:
    assert sampled_p(loaded[family], behind[family], SETTINGS[setting]) > 0.01


@pytest.mark.parametrize("setting", ["plain", "all of them"])
@pytest.mark.parametrize("family", CONFIDENT)
def test_they_do_so_whatever_number_of_drafts_is_verified(
    loaded: dict[str, Models], behind: dict[str, Behind], family: str, setting: str
) -> None:
    trim = partial(Whim(7).trim, [RequestId(str(row)) for row in range(BATCH)])
    assert sampled_p(loaded[family], behind[family], SETTINGS[setting], trim) > 0.01


# Mistakes


def accept_all(draft_BK: Tensor, target_BK1: Tensor) -> Tensor:
    """The draft is taken for the target's choice."""
    target_BK1[:, : draft_BK.shape[1]] = draft_BK
    return torch.full((draft_BK.shape[0],), draft_BK.shape[1])


class ByArgmax(Sampler):
    """A sampled draft is accepted when it is the drafter's likeliest token: equality of argmax under q."""

    def __init__(self) -> None:
        self._best: list[Tensor] = []

    def draft_choice(self, sequences: Items[Sequence], first_positions: Items[int]) -> DraftChoice:
        self._best.clear()
        return Noting(super().draft_choice(sequences, first_positions), self._best)

    def accept(self, draft_BK: Tensor, target_BK1: Tensor) -> Tensor:
        best_BK = torch.cat(self._best, dim=1)
        target_BK1[:, :-1] = torch.where(draft_BK == best_BK, draft_BK, target_BK1[:, :-1])
        return accept(draft_BK, target_BK1)


@dataclass(frozen=True)
class Noting:
    """Notes the likeliest drafts, [B, K] altogether."""

    inner: DraftChoice
    best: list[Tensor]

    @property
    def greedy(self) -> bool:
        return self.inner.greedy

    def one(self, logits_BV: Tensor, draft: int) -> Tensor:
        self.best.append(logits_BV.argmax(dim=-1)[:, None])
        return self.inner.one(logits_BV, draft)

    def all(self, logits_BKV: Tensor) -> Tensor:
        self.best.append(logits_BKV.argmax(dim=-1))
        return self.inner.all(logits_BKV)


@pytest.mark.parametrize("mistake", ["all", "argmax under q"])
@pytest.mark.parametrize("family", KINDS)
def test_drafts_accepted_for_being_drafted_are_found_out(
    loaded: dict[str, Models],
    behind: dict[str, Behind],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    mistake: str,
) -> None:
    if mistake == "all":
        monkeypatch.setattr(workers.step, "accept", accept_all)
    else:
        planted = ByArgmax()
        monkeypatch.setattr(workers.assembly, "Sampler", lambda: planted)
        monkeypatch.setattr(workers.step, "accept", planted.accept)
    assert sampled_p(loaded[family], behind[family], SETTINGS["plain"]) < 0.001


# Token for token


def without_and_with_drafts(
    models: Models, setting: dict[str, Any], **more: Any
) -> tuple[list[Outcome], list[Outcome]]:
    asked = SamplingParams(max_tokens=16, ignore_eos=True, seed=5, logprobs=2, **setting)
    prompts = [PROMPT, PROMPT[:3], [8, 8, 2, 0, 6]]
    undrafted = msgspec.structs.replace(asked, draft_tokens=0)
    return tuple(
        run_aggregated(models, prompts, each, dtype="float64", **more) for each in (undrafted, asked)
    )  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("family", "setting"),
    [*((family, "all of them") for family in KINDS), *(("dflash", setting) for setting in SETTINGS)],
)
def test_drafting_changes_no_sampled_token_and_no_log_probability(
    loaded: dict[str, Models], family: str, setting: str
) -> None:
    without, drafted = without_and_with_drafts(loaded[family], SETTINGS[setting])
    assert [each.tokens for each in drafted] == [each.tokens for each in without]
    for one, other in zip(without, drafted, strict=True):
        assert [each.token_id for each in other.logprobs] == other.tokens
        for here, there in zip(one.logprobs, other.logprobs, strict=True):
            assert here.logprob == pytest.approx(there.logprob, abs=1e-9)
            assert [token for token, _ in here.top] == [token for token, _ in there.top]
    if setting == "bias":
        assert not any(6 in each.tokens for each in drafted)


@pytest.mark.parametrize("family", ["dflash", "dspark rnn"])
def test_penalties_that_forget_the_block_are_found_out(
    loaded: dict[str, Models], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    def forgetful(drafts_BK: Tensor, counts: Items[int]) -> BlockRows:
        return BlockRows(
            [b for b, count in enumerate(counts) for _ in range(count + 1)], [0] * (sum(counts) + len(counts))
        )

    monkeypatch.setattr(BlockRows, "behind", forgetful)
    without, drafted = without_and_with_drafts(loaded[family], SETTINGS["all of them"])
    assert [each.tokens for each in drafted] != [each.tokens for each in without]
