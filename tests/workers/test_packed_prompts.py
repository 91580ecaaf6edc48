"""Short prompts that share a prefill step: each says what it says alone, and its drafter drafts as well."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from kvmanager.ids import RequestId
from kvmanager.ledgers import Ledger
from tests.workers.embedded_pair import load_embedded_pair
from tests.workers.families import FAMILIES
from tests.workers.random_pair import VOCAB
from tests.workers.split_pair import Outcome, SplitPair, account, answers, config
from workers.assembly import Models, build
from workers.limits import EngineLimits
from workers.prefill import next_chunks
from workers.request import SamplingParams

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, top_p=0.95, seed=3)
SMALL: dict[str, Any] = {"dtype": "float64", "page_size": 4, "chunk": 128}
PACKED: dict[str, Any] = SMALL | {"packed_tokens": 128}
# More than a window of the embedded drafter, of the window's length, and far less; more of them than slots.
LENGTHS = (9, 1, 40, 4, 16, 80, 3, 17, 5, 61)


@pytest.fixture(scope="module", params=[*FAMILIES, "dspark embedded"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    directory = tmp_path_factory.mktemp("pair")
    if request.param == "dspark embedded":
        return load_embedded_pair(directory)
    return FAMILIES[request.param].load(directory)


def prompts() -> list[list[int]]:
    return [
        [(seed * 5 + i * i * seed + i) % VOCAB for i in range(length)]
        for seed, length in enumerate(LENGTHS, 1)
    ]


def computed(outcomes: list[Outcome]) -> list[int]:
    """Prompt tokens of each, by the worker that answered."""
    return [each.stats.prompt_tokens_computed for each in outcomes if each.stats is not None]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_answers_and_acceptance_are_those_of_prompts_that_have_steps_of_their_own(
    models: Models, sampling: SamplingParams
) -> None:
    alone, packed = (build(config("aggregated", **options), models).engine for options in (SMALL, PACKED))
    golden, found = (answers(engine, prompts(), sampling) for engine in (alone, packed))
    assert len(account(golden)) == len(LENGTHS)
    assert account(found) == account(golden)
    assert computed(found) == computed(golden)
    assert packed.counters.steps < alone.counters.steps
    assert packed.counters.prompt_tokens_computed == alone.counters.prompt_tokens_computed


def test_split_answers_as_one_worker_does_whoever_computes_the_prompts(models: Models) -> None:
    golden = answers(build(config("aggregated", **SMALL), models).engine, prompts(), GREEDY)
    pair = SplitPair(models, context=config("context", **PACKED), generation=config("generation", **PACKED))
    ids = [pair.ask(prompt, GREEDY, local_prefill_tokens=5) for prompt in prompts()]
    pair.run()
    found = [pair.outcomes[request_id] for request_id in ids]
    assert account(found) == account(golden)
    assert pair.context.counters.prompt_tokens_computed == sum(length for length in LENGTHS if length > 5)


def test_prompts_with_drafts_and_without_have_steps_of_their_own(models: Models) -> None:
    plain = msgspec.structs.replace(GREEDY, draft_tokens=0)
    golden = answers(build(config("aggregated", **SMALL), models).engine, prompts(), plain)
    pair = SplitPair(models, context=config("context", **PACKED), generation=config("generation", **PACKED))
    ids = [pair.ask(prompt, plain if place % 3 else GREEDY) for place, prompt in enumerate(prompts())]
    pair.run()
    assert [pair.outcomes[request_id].tokens for request_id in ids] == [each.tokens for each in golden]


class Lengths:
    """As much of a ledger as chunks are chosen by: what is computed of each prompt, and the rank that has it."""

    def __init__(self, computed: list[int], ranks: list[int]) -> None:
        self._computed, self._ranks = computed, ranks

    def length(self, request: RequestId) -> int:
        return self._computed[int(request)]

    def rank_of(self, request: RequestId) -> int:
        return self._ranks[int(request)]


@pytest.mark.parametrize(
    ("packed_tokens", "prompts", "computed", "chunks"),
    [
        pytest.param(0, [5, 5], [0, 0], [(0, 0, 5)], id="none"),
        pytest.param(20, [5, 15, 1], [0, 0, 0], [(0, 0, 5), (1, 0, 15)], id="as many as fit"),
        pytest.param(20, [10, 30, 10], [0, 0, 0], [(0, 0, 10), (2, 0, 10)], id="past one that does not"),
        pytest.param(20, [10, 30], [0, 24], [(0, 0, 10), (1, 24, 30)], id="what is left of one"),
        pytest.param(20, [90, 5], [0, 0], [(0, 0, 32)], id="none beside a long chunk"),
        pytest.param(20, [90, 5], [80, 0], [(0, 80, 90), (1, 0, 5)], id="beside its last chunk"),
        pytest.param(32, [64, 1], [0, 0], [(0, 0, 32)], id="none beside a full chunk"),
    ],
)
def test_a_step_has_a_chunk_of_the_first_prompt_and_whole_rests_of_others(
    packed_tokens: int, prompts: list[int], computed: list[int], chunks: list[tuple[int, int, int]]
) -> None:
    found = chosen(packed_tokens, prompts, computed, [0] * len(prompts))
    assert found == chunks


def test_ranks_that_keep_requests_apart_have_a_chunk_each() -> None:
    assert chosen(0, [5, 6, 7, 8], [0] * 4, [1, 1, 0, 1]) == [(0, 0, 5), (2, 0, 7)]


def chosen(
    packed_tokens: int, prompts: list[int], computed: list[int], ranks: list[int]
) -> list[tuple[int, int, int]]:
    limits = EngineLimits(
        vocab_size=VOCAB,
        max_seq_len=128,
        max_waiting=8,
        chunk_tokens=32,
        page_size=4,
        max_draft_tokens=0,
        eos_token_ids=frozenset(),
        packed_tokens=packed_tokens,
    )
    sequences = [
        limits.sequence(RequestId(str(place)), (0,) * length, GREEDY) for place, length in enumerate(prompts)
    ]
    found = next_chunks(sequences, cast(Ledger, Lengths(computed, ranks)), limits)
    return [(int(chunk.sequence.request_id), chunk.start, chunk.end) for chunk in found]
