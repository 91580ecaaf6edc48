"""Verifying only some of the drafts, of each request another number, changes steps and no token."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import msgspec
import pytest

from drafter.policy import BlockLengthPolicy
from kvmanager.ids import RequestId
from tests.workers.random_pair import VOCAB, dspark, load_random_pair
from tests.workers.split_pair import SplitPair, config, run_aggregated
from workers.aggregated import AggregatedEngine
from workers.assembly import Models, build
from workers.engine import Emitted
from workers.request import SamplingParams, SubmitRequest

SMALL: dict[str, Any] = {"dtype": "float64", "page_size": 4}
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1)
SAMPLED = msgspec.structs.replace(GREEDY, temperature=0.8, top_p=0.95, seed=3)


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    directory = tmp_path_factory.mktemp("pair")
    return load_random_pair(directory, dspark("gated") if request.param == "dspark" else None)


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 5 + i * i * seed + i) % VOCAB for i in range(length)]


PROMPTS = [prompt(length, seed) for seed, length in enumerate((1, 4, 5, 13), 1)]


class Whim(BlockLengthPolicy):
    """Drafts in full and verifies what chance says."""

    def __init__(self, seed: int) -> None:
        super().__init__(3)
        self._random = random.Random(seed)
        self.seen: list[list[int]] = []

    trims = True

    def trim(self, requests: Items[RequestId], confidences: Items[Items[float]]) -> list[int]:
        assert len(requests) == len(confidences)
        assert all(0.0 < confidence < 1.0 for drafts in confidences for confidence in drafts)
        self.seen.append([self._random.randint(0, len(drafts)) for drafts in confidences])
        return self.seen[-1]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", [1, 2])
def test_any_choice_of_drafts_to_verify_leaves_tokens_and_log_probabilities(
    models: Models, sampling: SamplingParams, seed: int
) -> None:
    golden = run_aggregated(models, PROMPTS, msgspec.structs.replace(sampling, draft_tokens=0), **SMALL)
    engine = build(config("aggregated", **SMALL), models).engine
    assert isinstance(engine, AggregatedEngine)
    engine.decode._policy = whim = Whim(seed)
    tokens: dict[str, list[int]] = {str(row): [] for row in range(len(PROMPTS))}
    logprobs: dict[str, list[float]] = {row: [] for row in tokens}
    steps, tried = 0, [0, 0, 0]
    for row, each in zip(tokens, PROMPTS, strict=True):
        engine.submit(
            SubmitRequest(request_id=RequestId(row), prompt_token_ids=tuple(each), sampling=sampling)
        )
    while not engine.idle:
        for event in engine.step(0.0):
            if not isinstance(event, Emitted):
                continue
            row = event.output.request_id
            tokens[row] += event.output.token_ids
            logprobs[row] += [each.logprob for each in event.output.logprobs]
            if event.output.stats is not None:
                steps += event.output.stats.decode_steps
                tried = [a + b for a, b in zip(tried, event.output.stats.drafted_by_position, strict=True)]
        engine.check()
    assert list(tokens.values()) == [each.tokens for each in golden]
    for row, each in zip(tokens, golden, strict=True):
        assert logprobs[row] == pytest.approx([one.logprob for one in each.logprobs], abs=1e-9)
    assert any(len(set(counts)) > 1 for counts in whim.seen), "requests were trimmed apart"
    assert tried[0] > tried[1] > tried[2] > 0, "only what was verified counts as drafted"
    assert steps < sum(each.stats.decode_steps for each in golden if each.stats is not None)


def test_an_adaptive_worker_schedules_and_says_the_same_split(models: Models) -> None:
    golden = run_aggregated(models, PROMPTS, msgspec.structs.replace(SAMPLED, draft_tokens=0), **SMALL)
    adaptive = {**SMALL, "draft_tokens": "adaptive"}
    pair = SplitPair(models, context=config("context", **SMALL), generation=config("generation", **adaptive))
    assert pair.generation.decode._policy.trims
    ids = [pair.ask(each, SAMPLED) for each in PROMPTS]
    pair.run()
    assert [pair.outcomes[request_id].tokens for request_id in ids] == [each.tokens for each in golden]


def test_a_fixed_number_and_a_drafter_without_confidences_are_not_trimmed(
    models: Models, tmp_path: Path
) -> None:
    fixed = SplitPair(models, context=config("context", **SMALL), generation=config("generation", **SMALL))
    assert not fixed.generation.decode._policy.trims
    silent = load_random_pair(tmp_path, dspark("gated", enable_confidence_head=False))
    adaptive = {**SMALL, "draft_tokens": "adaptive"}
    pair = SplitPair(silent, context=config("context", **SMALL), generation=config("generation", **adaptive))
    assert not pair.generation.decode._policy.trims
