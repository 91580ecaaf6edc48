"""Ranks with requests of their own answer as one rank does, and none of them reads another's pages."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from kvmanager.ids import RequestId
from kvmanager.ledgers import DividedLedger
from kvmanager.shape import KvShape
from kvmanager.sizing import SizingRequest
from kvmanager.sizing import size as plan_size
from tests.workers.group_of_threads import group
from tests.workers.random_pair import VOCAB, dflash2, dspark, load_pair, write_random_pair
from tests.workers.split_pair import answers, config, run_aggregated
from tests.workers.test_groups import GREEDY, HEADS, SAMPLED, SAMPLINGS, account
from workers.aggregated import AggregatedEngine
from workers.assembly import Assembly, Models, build
from workers.engine import Computed
from workers.group.errors import GroupBroken
from workers.group.follow import Follower
from workers.group.ranks import GroupRanks, Seat
from workers.pairs import ModelPair
from workers.request import SubmitRequest
from workers.runner import ModelRunner
from workers.step import StepOutcome
from workers.storage import KvStorage

SMALL: dict[str, Any] = {"dtype": "float64", "page_size": 4, "chunk": 8, "max_batch": 4}
PROMPTS = [[(seed * 5 + i * i * seed + i) % VOCAB for i in range(7 + 4 * seed)] for seed in range(1, 6)]


pytestmark = pytest.mark.usefixtures("one_thread")


def loading(pair: ModelPair, *, expert_parallel: bool = False) -> Any:
    def load(ranks: GroupRanks) -> Models:
        return load_pair(pair, ranks, attention_dp=True, expert_parallel=expert_parallel)

    return load


def ledger_of(assembly: Assembly) -> DividedLedger:
    ledger = assembly.engine.ledger
    assert isinstance(ledger, DividedLedger)
    return ledger


@pytest.mark.parametrize(
    ("family", "kv_heads", "drafting", "size"),
    [
        ("llama", 2, {}, 2),
        ("qwen3", 1, dspark("rnn"), 2),
        ("qwen2", 2, dflash2(), 4),
        ("llama", 1, dspark("vanilla", draft_vocab_size=7), 2),
        ("qwen3", 4, None, 2),
    ],
)
def test_ranks_with_requests_of_their_own_answer_as_one_rank_does(
    tmp_path: Path, family: str, kv_heads: int, drafting: dict[str, Any] | None, size: int
) -> None:
    """Heads need not divide: every rank has all of them. One request leaves all other ranks without any."""
    heads = HEADS | {"num_key_value_heads": kv_heads}
    pair = write_random_pair(tmp_path, (drafting or {}) | heads, family, **heads)
    if drafting is None:
        pair = replace(pair, drafter_path=None)
    alone = load_pair(pair)
    counts = (1, len(PROMPTS), len(PROMPTS))
    plans = [(PROMPTS[:count], sampling) for count, sampling in zip(counts, SAMPLINGS, strict=True)]
    golden = [run_aggregated(alone, prompts, sampling, **SMALL) for prompts, sampling in plans]
    with group(size, loading(pair), config("aggregated", attention_dp=True, **SMALL)) as assembly:
        found = [answers(assembly.engine, prompts, sampling) for prompts, sampling in plans]
        assert ledger_of(assembly).target_geometry.num_kv_heads == kv_heads
    assert [account(each) for each in found] == [account(each) for each in golden]
    for one, other in zip(golden[1], found[1], strict=True):  # the sampled ones, which ask for them
        assert [each.logprob for each in other.logprobs] == pytest.approx([p.logprob for p in one.logprobs])
        assert len(other.logprobs) == len(other.tokens)


def test_a_prompt_is_found_on_its_own_rank_or_computed_anew_and_never_read_elsewhere(tmp_path: Path) -> None:
    """Pools hold NaN at first, so a page read on a rank that did not write it would show in tokens."""
    pair = write_random_pair(tmp_path)
    first = [(7 * i * i + 3) % VOCAB for i in range(33)]
    alike = [[*first, *range(1, 3 + extra)] for extra in range(6)]
    alone = load_pair(pair)
    sizes = SMALL | {"pages": 40, "max_seq_len": 96}
    golden = [run_aggregated(alone, each, GREEDY, prefix_cache=False, **sizes) for each in ([first], alike)]
    setting = config("aggregated", attention_dp=True, **sizes)
    with group(2, loading(pair), setting, change=lambda _, follower: poison(runner_of(follower))) as assembly:
        poison(runner_of(assembly.engine))
        ledger, counters = ledger_of(assembly), assembly.engine.counters
        found = [answers(assembly.engine, each, GREEDY) for each in ([first], alike)]
        assert [account(each) for each in found] == [account(each) for each in golden]
        # Five of these pages are there when the others come; their second rank computes them once more, for the rest.
        assert counters.cached_prompt_tokens > 3 * 32
        cached = [each.usage().cached_pages for each in ledger.ledgers]
        assert min(cached) >= 8
        assembly.engine.check()


def test_every_rank_computes_a_prompt_of_its_own_at_a_time(tmp_path: Path) -> None:
    pair = write_random_pair(tmp_path)
    prompts = [
        [(index + 3 * seed) % VOCAB for index in range(length)] for seed, length in enumerate((24, 40, 16))
    ]
    with group(2, loading(pair), config("aggregated", attention_dp=True, **SMALL)) as assembly:
        engine = assembly.engine
        assert isinstance(engine, AggregatedEngine)
        for index, prompt in enumerate(prompts):
            engine.submit(
                SubmitRequest(
                    request_id=RequestId(str(index)), prompt_token_ids=tuple(prompt), sampling=GREEDY
                )
            )
        computed: list[list[str]] = []
        with torch.inference_mode():
            while not engine.idle:
                computed.append([e.request_id for e in engine.step(0.0) if isinstance(e, Computed)])
    # Chunks of eight tokens. The third prompt is the first rank's, behind its first.
    assert computed[:5] == [["0", "1"]] * 3 + [["1", "2"]] * 2
    assert not any(computed[5:])


def runner_of(owner: Any) -> ModelRunner:
    """Of a following rank or of the engine of the first one."""
    runner: ModelRunner = (owner._work if isinstance(owner, Follower) else owner._runner)._runner
    return runner


def pools_of(runner: ModelRunner) -> list[KvStorage]:
    """Target and draft."""
    return [each.storage for each in (runner._target_attention, runner._draft_attention)]  # type: ignore[union-attr]


def poison(runner: ModelRunner) -> None:
    for storage in pools_of(runner):
        storage.pool.fill_(torch.nan)


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["shares of experts", "whole experts"])
def test_ranks_with_requests_of_their_own_share_the_experts_of_a_mixture(
    tmp_path: Path, expert_parallel: bool
) -> None:
    pair = write_random_pair(tmp_path, dspark("vanilla"), "qwen3_moe", mlp_only_layers=[1])
    golden = run_aggregated(load_pair(pair), PROMPTS[:3], SAMPLED, **SMALL)
    setting = config("aggregated", attention_dp=True, expert_parallel=expert_parallel, **SMALL)
    with group(2, loading(pair, expert_parallel=expert_parallel), setting) as assembly:
        assert account(answers(assembly.engine, PROMPTS[:3], SAMPLED)) == account(golden)


@pytest.mark.parametrize("apart", [True, False], ids=["all heads", "shares of heads"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_allocates_what_the_plan_says_of_one(tmp_path: Path, size: int, apart: bool) -> None:
    """With all heads of both models, or with a share of them: of four ranks two hold the same head of the target."""
    heads = {"num_attention_heads": 4, "head_dim": 8}
    kv_heads = {"target": 2, "drafter": 4}
    pair = write_random_pair(
        tmp_path,
        dspark("rnn") | heads | {"num_key_value_heads": kv_heads["drafter"]},
        "qwen3",
        **heads,
        num_key_value_heads=kv_heads["target"],
    )
    shapes = [
        KvShape.from_config(json.loads((tmp_path / part / "config.json").read_text())) for part in kv_heads
    ]
    plan = plan_size(
        SizingRequest(
            target=shapes[0],
            drafter=shapes[1],
            max_seq_len=48,
            max_batch=SMALL["max_batch"],
            budget_bytes=1 << 20,
            tensor_parallel=size,
            attention_dp=apart,
            page_size=SMALL["page_size"],
            dtype="float64",
        )
    )
    assert plan.plan is not None
    held = [count if apart else max(count // size, 1) for count in kv_heads.values()]
    assert [geometry.num_kv_heads for geometry in plan.demand.geometries] == held
    sizes = SMALL | {"pages": plan.plan.num_target_pages, "max_seq_len": 48}
    followers: list[Follower] = []
    setting = config("aggregated", attention_dp=apart, **sizes)

    def load(ranks: GroupRanks) -> Models:
        return load_pair(pair, ranks, attention_dp=apart)

    with group(size, load, setting, change=lambda _, f: followers.append(f)) as assembly:
        assembly.beat()
        engine = assembly.engine
        answers(engine, PROMPTS[:1], GREEDY)
        runners = [runner_of(each) for each in (engine, *followers)]
    assert len(runners) == size
    for target, draft in map(pools_of, runners):
        assert (target.size_bytes, draft.size_bytes) == (plan.plan.target_bytes, plan.plan.draft_bytes)
        assert (target.geometry, draft.geometry) == plan.demand.geometries
    facts = assembly.facts
    assert facts.kv_bytes_per_token_target + facts.kv_bytes_per_token_draft == plan.demand.bytes_per_token
    assert facts.max_batch == (size if apart else 1) * SMALL["max_batch"]


def test_a_rank_that_fails_at_its_own_requests_ends_the_group(tmp_path: Path) -> None:
    pair = write_random_pair(tmp_path)
    left: list[BaseException] = []

    def fail(rank: int, follower: Follower) -> None:
        def run(*_: object, **__: object) -> StepOutcome:
            raise MemoryError("no memory is left")

        if rank == 1:
            follower._work._step.run = run  # type: ignore[attr-defined]

    setting = config("aggregated", attention_dp=True, **SMALL)
    with group(3, loading(pair), setting, change=fail, errors=left) as assembly:
        answers(assembly.engine, PROMPTS[:1], GREEDY)  # the first rank's alone
        with pytest.raises(GroupBroken):
            answers(assembly.engine, PROMPTS, GREEDY)
    assert sorted(type(error).__name__ for error in left) == ["GroupBroken", "MemoryError"]


@pytest.mark.soak
def test_ranks_in_processes_of_their_own_answer_as_one_rank_does(tmp_path: Path) -> None:
    pair = write_random_pair(tmp_path)
    golden = run_aggregated(load_pair(pair), PROMPTS, SAMPLED, **SMALL)
    setting = config("aggregated", attention_dp=True, **SMALL)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    seats = [Seat(rank=rank, size=2) for rank in range(2)]
    told = [msgspec.json.encode(value).decode() for value in (seats[1], setting)]
    command = [sys.executable, "-m", "tests.workers.group_rank", str(tmp_path), *told, str(store.port)]
    follower = subprocess.Popen(command)
    try:
        assembly = build(setting, load_pair(pair, GroupRanks(seats[0], store), attention_dp=True))
        assert account(answers(assembly.engine, PROMPTS, SAMPLED)) == account(golden)
        assembly.close()
        assert follower.wait(timeout=60) == 0
    finally:
        follower.kill()
        follower.wait()
