"""Engines on a GPU, with the built-in smollm2 pair: captured steps, exact float32, acceptance length when split."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from cluster.prompt_sets import builtin_prompts
from drafter.penalties import BlockRows
from kvmanager.ids import RequestId
from kvmanager.layout import DraftKv
from tests.workers.split_pair import SplitPair
from tests.workers.split_pair import config as small_config
from workers.aggregated import AggregatedEngine
from workers.assembly import Models, build, load_models
from workers.config import DtypeName, PairSpec, WorkerConfig
from workers.device_name import DeviceName
from workers.engine import Engine
from workers.request import Role, SamplingParams, SubmitRequest
from workers.step import EagerStep
from workers.tokenizer import Tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def config(role: Role, **changes: object) -> WorkerConfig:
    plain = small_config(role, chunk=256)
    fields = {"pair": PairSpec(name="smollm2"), "dtype": "bfloat16", "device": "cuda", "max_seq_len": 1024}
    return msgspec.structs.replace(plain, **fields | changes)


def load(dtype: DtypeName, device: DeviceName) -> Models:
    return load_models(config("aggregated", dtype=dtype, device=device))


def submit(engine: Engine, request_id: str, prompt: list[int], sampling: SamplingParams) -> None:
    assert isinstance(engine, AggregatedEngine)
    engine.submit(
        SubmitRequest(request_id=RequestId(request_id), prompt_token_ids=tuple(prompt), sampling=sampling)
    )


@pytest.fixture(scope="module")
def half() -> Models:
    return load("bfloat16", "cuda")


@pytest.fixture(scope="module")
def chats(half: Models) -> list[list[int]]:
    tokenizer = Tokenizer.from_path(half.pair.target_path)
    prompts = builtin_prompts(32)
    return [tokenizer.apply_chat_template([{"role": "user", "content": p.text}])[-400:] for p in prompts]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def test_float32_tokens_are_those_of_the_cpu_without_drafting(chats: list[list[int]]) -> None:
    sampling = SamplingParams(max_tokens=32, ignore_eos=True)
    plain = SamplingParams(max_tokens=32, ignore_eos=True, draft_tokens=0)
    cpu = run_with(load("float32", "cpu"), chats, plain, dtype="float32", device="cpu")
    gpu = run_with(load("float32", "cuda"), chats, sampling, dtype="float32")
    differing = [index for index, pair in enumerate(zip(cpu, gpu, strict=True)) if pair[0] != pair[1]]
    assert not differing


def test_prompts_that_share_a_step_say_what_they_say_alone(chats: list[list[int]]) -> None:
    models, short = load("float32", "cuda"), [chat[-40:] for chat in chats]
    sampling = SamplingParams(max_tokens=32, ignore_eos=True)
    alone, packed = (
        run_with(models, short, sampling, dtype="float32", packed_tokens=tokens) for tokens in (0, 256)
    )
    assert packed == alone


def run_with(
    models: Models, prompts: list[list[int]], sampling: SamplingParams, **changes: object
) -> list[list[int]]:
    engine = build(config("aggregated", **changes), models).engine
    answers: dict[RequestId, list[int]] = {RequestId(str(index)): [] for index in range(len(prompts))}
    for request_id, prompt in zip(answers, prompts, strict=True):
        submit(engine, request_id, prompt, sampling)
    while not engine.idle:
        for event in engine.step(0.0):
            output = getattr(event, "output", None)
            if output is not None:
                answers[output.request_id].extend(output.token_ids)
    engine.check()
    return list(answers.values())


@pytest.mark.parametrize("live", [1, 3, 4])
@pytest.mark.parametrize("num_draft", [0, 3, 7])
def test_captured_steps_score_as_eager_ones(
    half: Models, chats: list[list[int]], live: int, num_draft: int
) -> None:
    """The same requests, stepped by the graphs and by launches from Python, neither committed."""
    assembly = build(config("aggregated"), half)
    engine = assembly.engine
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    for index in range(live):
        submit(engine, str(index), chats[index], sampling)
    while len(engine._decoding) < live:  # type: ignore[attr-defined]
        engine.step(0.0)
    sequences = engine._decoding  # type: ignore[attr-defined]
    runner = engine._runner  # type: ignore[attr-defined]
    eager = EagerStep(runner=runner, sampler=engine.decode._sampler, clock=lambda: 0.0)
    captured = engine.decode._step
    assert type(captured).__name__ == "CapturedStep"
    expected = eager.run(sequences, num_draft)
    expected_logits = expected.logits_BWV.float().clone()
    found = captured.run(sequences, num_draft)
    assert found.logits_BWV.shape == expected.logits_BWV.shape
    anchor = found.logits_BWV[:, 0].float(), expected_logits[:, 0]
    assert torch.corrcoef(torch.stack([x.flatten() for x in anchor]))[0, 1] > 0.999
    again = captured.run(sequences, num_draft)
    assert (again.targets, again.accepted) == (found.targets, found.accepted), "a step changes nothing"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_captured_steps_penalise_as_a_cpu_does(
    half: Models, chats: list[list[int]], temperature: float
) -> None:
    """The choice of every row, from the logits that the step computed, and the drafts that it made."""
    engine = build(config("aggregated"), half).engine
    asked = SamplingParams(
        max_tokens=64,
        temperature=temperature,
        seed=3,
        frequency_penalty=0.9,
        presence_penalty=-0.4,
        repetition_penalty=1.3,
        min_tokens=60,
    )
    live, num_draft = 4, 7
    for index in range(live):
        penalised = asked if index else msgspec.structs.replace(asked, frequency_penalty=0.0)
        submit(engine, str(index), chats[index], penalised)
    while len(engine._decoding) < live:  # type: ignore[attr-defined]
        engine.step(0.0)
    for _ in range(6):
        engine.step(0.0)
    sequences = engine._decoding  # type: ignore[attr-defined]
    step, sampler = engine.decode._step, engine.decode._sampler
    found = step.run(sequences, num_draft)
    rows = BlockRows.behind(step._drafted[:live, :num_draft].cpu(), [num_draft] * live)  # type: ignore[attr-defined]
    wide_NV = sampler.adjusted(found.logits_BWV.flatten(0, 1).cpu(), sequences, rows)
    owners = [sequences[b] for b in rows.requests]
    positions = [s.num_tokens + ahead for s, ahead in zip(owners, rows.ahead, strict=True)]
    chosen_N = sampler.choose(wide_NV, [s.sampling for s in owners], positions)
    assert chosen_N.view(live, -1).tolist() == found.targets
    plain_NV = found.logits_BWV.flatten(0, 1).cpu()
    assert not torch.equal(wide_NV.argmax(dim=-1), plain_NV.argmax(dim=-1)), "penalties matter here"


def test_padding_never_changes_what_live_requests_say(half: Models, chats: list[list[int]]) -> None:
    sampling = SamplingParams(max_tokens=48, ignore_eos=True)
    three = run_with(half, chats[:3], sampling, max_batch=4)
    assert [len(answer) for answer in three] == [48] * 3
    assert run_with(half, chats[:3], sampling, max_batch=4) == three


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft_kv", ["mirrored", "unified"])
def test_split_accepts_as_many_drafts_as_aggregated(
    half: Models, chats: list[list[int]], draft_kv: DraftKv, temperature: float
) -> None:
    """One request at a time, so that rounding is the same on both sides and shipping is all that differs."""
    sampling = SamplingParams(max_tokens=64, temperature=temperature, seed=3)
    options = {"draft_kv": draft_kv, "max_batch": 1}
    split = SplitPair(half, context=config("context", **options), generation=config("generation", **options))
    aggregated = build(config("aggregated", **options), half).engine
    for index, prompt in enumerate(chats[:16]):
        split.ask(prompt, sampling)
        split.run()
        submit(aggregated, str(index), prompt, sampling)
        while not aggregated.idle:
            aggregated.step(0.0)
    stats = [outcome.stats for outcome in split.outcomes.values()]
    al_split = sum(s.decode_tokens for s in stats if s) / sum(s.decode_steps for s in stats if s)
    al_aggregated = aggregated.decode.decode_tokens / aggregated.decode.decode_steps
    assert al_split > 1.3, "the drafter drafts"
    assert abs(al_split / al_aggregated - 1) <= 0.01
