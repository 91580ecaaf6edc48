"""Every drafter family on a GPU: captured steps draft what launches from Python do, and tokens stay the target's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvmanager.ids import RequestId
from tests.workers.random_pair import VOCAB, dflash2, dspark, write_random_pair
from tests.workers.split_pair import config as small_config
from workers.aggregated import AggregatedEngine
from workers.assembly import Models, build, load_models
from workers.config import PairSpec
from workers.request import SamplingParams, SubmitRequest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # the target's, and the drafter's fields
    "dflash": ("llama", {}),
    "dflash2": ("llama", dflash2()),
    "dspark": ("llama", dspark("rnn")),
    "dflash for a mixture of experts": ("qwen3_moe", {}),
    "dflash of some tokens": ("llama", {}),
    "dspark of some tokens": ("llama", dspark("vanilla")),
}
SMALL: dict[str, Any] = {"dtype": "bfloat16", "device": "cuda"}
HEADS = {"head_dim": 64}  # flashinfer's smallest
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=64, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.9, top_k=7, seed=5),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    family, drafting = FAMILIES[request.param]
    pair = write_random_pair(tmp_path_factory.mktemp("pair"), drafting | HEADS, family, **HEADS)
    spec = PairSpec(name="random", target=str(pair.target_path), drafter=str(pair.drafter_path))
    some = 7 if request.param.endswith("of some tokens") else 0
    return load_models(small_config("aggregated", **SMALL, pair=spec, draft_vocab=some))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("live", [1, 3, 4])
def test_captured_steps_draft_what_eager_ones_do(family: Models, live: int, sampling: str) -> None:
    engine = build(small_config("aggregated", **SMALL), family).engine
    assert isinstance(engine, AggregatedEngine)
    assert family.drafter is not None
    for index in range(live):
        prompt = tuple((index * 5 + i * i + i) % VOCAB for i in range(9 + index))
        engine.submit(
            SubmitRequest(
                request_id=RequestId(str(index)), prompt_token_ids=prompt, sampling=SAMPLINGS[sampling]
            )
        )
    while len(engine._decoding) < live:
        engine.step(0.0)
    captured, runner, sampler = engine.decode._step, engine._runner, engine.decode._sampler
    assert type(captured).__name__ == "CapturedStep"
    count = family.drafter.max_draft_tokens
    equal, total = [0] * count, [0] * count
    while engine._decoding:
        sequences = list(engine._decoding)
        starts = engine.ledger.lengths_of([each.request_id for each in sequences])
        choice = sampler.draft_choice(sequences, [start + 1 for start in starts])
        expected = runner.draft(sequences, count, choice).tokens_BK
        for asked in range(1, count + 1):  # a shorter block is the beginning of a longer one
            captured.run(sequences, asked)
            found = captured._drafted[: len(sequences), :asked]  # type: ignore[attr-defined]
            equal[asked - 1] += int((found == expected[:, :asked]).sum())
            total[asked - 1] += found.numel()
        engine.step(0.0)
    engine.check()
    assert total[-1] > 60
    # Rounding in bfloat16 may tip a near tie.
    assert all(same >= 0.9 * of for same, of in zip(equal, total, strict=True)), (equal, total)
