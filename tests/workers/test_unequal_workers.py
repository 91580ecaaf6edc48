"""Workers of one pair that are built differently answer as one worker does: the same tokens, in as many steps."""

from __future__ import annotations

import msgspec
import pytest

from tests.workers.split_pair import SplitPair, config, run_aggregated
from transceiver.errors import HandshakeRefused
from workers.assembly import Models
from workers.config import WorkerConfig
from workers.request import Role, SamplingParams

PROMPTS = [[(5 * n + n * n * k) % 11 for n in range(61 + k)] for k in (1, 2, 3)]
SAMPLED = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=2)


def worker(role: Role, **more: object) -> WorkerConfig:
    return msgspec.structs.replace(config(role), **{"dtype": "float64", **more})


def assert_answers_as_one_worker(models: Models, context: WorkerConfig, generation: WorkerConfig) -> None:
    golden = run_aggregated(models, PROMPTS, SAMPLED, dtype="float64")
    pair = SplitPair(models, context=context, generation=generation)
    multiple = max(context.page_size, generation.page_size)
    ids = [pair.ask(prompt, SAMPLED, position_multiple=multiple) for prompt in PROMPTS]
    pair.run()
    for request_id, one in zip(ids, golden, strict=True):
        outcome = pair.outcomes[request_id]
        assert outcome.tokens == one.tokens
        assert outcome.stats is not None
        assert one.stats is not None
        assert outcome.stats.decode_steps == one.stats.decode_steps
        assert outcome.stats.prompt_tokens_computed == 0
    here, there = pair.context.counters, pair.generation.counters
    assert (here.kv_bytes_target, here.kv_bytes_draft) == (there.kv_bytes_target, there.kv_bytes_draft)
    assert there.kv_bytes_draft > 0


@pytest.mark.parametrize("draft_kv", ["mirrored", "unified"])
@pytest.mark.parametrize(("here", "there"), [(16, 32), (32, 16), (32, 64), (64, 16)])
def test_s64_different_page_sizes_change_neither_tokens_nor_steps(
    random_models: Models, here: int, there: int, draft_kv: str
) -> None:
    assert_answers_as_one_worker(
        random_models,
        worker("context", page_size=here, draft_kv=draft_kv),
        worker("generation", page_size=there, draft_kv=draft_kv),
    )


@pytest.mark.parametrize("layouts", [("strided", "dense"), ("dense", "strided"), ("dense", "dense")])
def test_different_pool_layouts_change_neither_tokens_nor_steps(
    random_models: Models, layouts: tuple[str, str]
) -> None:
    assert_answers_as_one_worker(
        random_models,
        worker("context", pool_layout=layouts[0]),
        worker("generation", pool_layout=layouts[1]),
    )


def test_pools_of_different_page_counts_change_neither_tokens_nor_steps(random_models: Models) -> None:
    assert_answers_as_one_worker(
        random_models,
        msgspec.structs.replace(worker("context"), kv=config("context", pages=40).kv),
        msgspec.structs.replace(worker("generation"), kv=config("generation", pages=300).kv),
    )


def test_s61_different_numbers_of_draft_tokens_are_allowed(random_models: Models) -> None:
    assert_answers_as_one_worker(
        random_models, worker("context", draft_tokens=1), worker("generation", draft_tokens="full")
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"draft_kv": "unified"}, "draft mode differs: 'mirrored' here, 'unified' at the peer"),
        ({"verify": "checksum"}, "content check differs: 'tag' here, 'checksum' at the peer"),
        ({"drafting": False}, "draft model differs"),
    ],
)
def test_s61_workers_that_cannot_work_together_are_refused_with_both_values(
    random_models: Models, change: dict[str, object], words: str
) -> None:
    models = random_models
    if change.get("drafting") is False:
        models = Models(models.pair, models.decoder, None, None)
    other = worker("generation", **change)
    pair = SplitPair(random_models, context=worker("context"), generation=worker("generation"))
    pair._builds["generation"] = (other, models)
    with pytest.raises(HandshakeRefused, match=words):
        pair.restart("generation", told=True)
