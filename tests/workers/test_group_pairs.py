"""A context worker of some ranks feeds a generation worker of others: tokens and steps are those of one worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmanager.ids import RequestId
from tests.workers.group_of_threads import TIMEOUT_S
from tests.workers.group_pair import GroupPair, ProcessPair
from tests.workers.random_pair import VOCAB, dflash2, dspark, load_pair, write_random_pair
from tests.workers.split_pair import config, run_aggregated
from workers.assembly import Models
from workers.config import WorkerConfig
from workers.group.plan import Prefill
from workers.group.ranks import GroupRanks
from workers.pairs import ModelPair
from workers.request import HoldRequest, Reservation, Role, SamplingParams, ShipRequest
from workers.sequence import Sequence

SAMPLED = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, top_p=0.95, seed=3)
PROMPTS = [[(seed * 5 + i * i * seed + i) % VOCAB for i in range(9 + 6 * seed)] for seed in (1, 2, 3)]
PAGE_SIZE, CHUNK = 4, 8
TARGET_HEADS, DRAFT_HEADS = 2, 4
HEAD_DIM, LAYERS, DRAFT_LAYERS, FLOAT64 = 8, 2, 1, 8
SMALL: dict[str, Any] = {"dtype": "float64", "page_size": PAGE_SIZE, "chunk": CHUNK}
PAIRS = [(context, generation) for context in (1, 2, 4) for generation in (1, 2, 4)]


pytestmark = pytest.mark.usefixtures("one_thread")


def write_pair(directory: Path, drafting: dict[str, Any] | None = None) -> ModelPair:
    """Two KV heads of the target and four of the drafter: of four ranks, two hold the same target head."""
    heads = {"num_attention_heads": 4, "head_dim": HEAD_DIM}
    return write_random_pair(
        directory,
        (drafting or dflash2()) | heads | {"num_key_value_heads": DRAFT_HEADS},
        "qwen3",
        **heads,
        num_key_value_heads=TARGET_HEADS,
    )


def threads(pair: ModelPair, sizes: tuple[int, int], **options: Any) -> GroupPair:
    def load(_: WorkerConfig, ranks: GroupRanks) -> Models:
        return load_pair(pair, ranks if ranks.size > 1 else None)

    return GroupPair(load, sizes, small("context", **options), small("generation", **options))


def processes(directory: Path, sizes: tuple[int, int]) -> GroupPair:
    return ProcessPair(directory, sizes, small("context"), small("generation"))


def small(role: Role, **options: Any) -> WorkerConfig:
    return config(role, **SMALL | options)


def bytes_of(layers: int, heads: int, num_ranks: int) -> int:
    """Of all prompts' pages, over all ranks of a receiver: a head that several ranks hold is shipped to each."""
    pages = sum(-(-len(prompt) // PAGE_SIZE) for prompt in PROMPTS)
    return pages * PAGE_SIZE * layers * 2 * max(heads, num_ranks) * HEAD_DIM * FLOAT64


def assert_answers_as_one_worker(pair: ModelPair, groups: GroupPair, receiving_ranks: int) -> None:
    try:
        golden = run_aggregated(load_pair(pair), PROMPTS, SAMPLED, **SMALL)
        asked = groups.answer(PROMPTS, SAMPLED)
        found = [groups.outcomes[request_id] for request_id in asked]
        context, generation = (groups._assemblies[role].port for role in ("context", "generation"))
        assert context is not None
        assert generation is not None
        stats = context.stats(), generation.stats()
    finally:
        groups.close()
    for outcome, one in zip(found, golden, strict=True):
        assert outcome.stats is not None
        assert one.stats is not None
        assert outcome.tokens == one.tokens
        assert outcome.stats.accepted_by_position == one.stats.accepted_by_position
        assert outcome.stats.decode_steps == one.stats.decode_steps
        assert outcome.stats.prompt_tokens_computed == 0
    assert sum(position for each in found if each.stats for position in each.stats.accepted_by_position) > 0
    bytes_target = bytes_of(LAYERS, TARGET_HEADS, receiving_ranks)
    bytes_draft = bytes_of(DRAFT_LAYERS, DRAFT_HEADS, receiving_ranks)
    for counters in (groups.context.counters, groups.generation.counters):
        assert (counters.kv_bytes_target, counters.kv_bytes_draft) == (bytes_target, bytes_draft)
    for side in stats:
        assert (side.sending, side.receiving, side.quarantined, side.done) == (0, 0, 0, len(PROMPTS))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (4, 2)])
def test_unequal_groups_answer_as_one_worker_does(tmp_path: Path, sizes: tuple[int, int]) -> None:
    pair = write_pair(tmp_path)
    assert_answers_as_one_worker(pair, threads(pair, sizes), sizes[1])


def test_groups_of_processes_answer_over_nixl_as_one_worker_does(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    assert_answers_as_one_worker(pair, processes(tmp_path, (2, 2)), 2)


def test_pages_that_both_groups_have_cached_are_neither_computed_nor_shipped_again(tmp_path: Path) -> None:
    groups = threads(write_pair(tmp_path), (2, 4))
    try:
        first = [groups.outcomes[request_id].tokens for request_id in groups.answer(PROMPTS, SAMPLED)]
        computed = groups.context.counters.prompt_tokens_computed
        shipped = groups.generation.counters.kv_bytes_draft
        again = [groups.outcomes[request_id] for request_id in groups.answer(PROMPTS, SAMPLED)]
        assert [outcome.tokens for outcome in again] == first
        assert [outcome.reservation.first_position for outcome in again if outcome.reservation] == [
            (len(prompt) - 1) // PAGE_SIZE * PAGE_SIZE for prompt in PROMPTS
        ]
        assert groups.context.counters.prompt_tokens_computed - computed < computed / 4
        assert groups.generation.counters.kv_bytes_draft - shipped < shipped / 4
    finally:
        groups.close()


def test_a_prompt_that_a_group_holds_is_shipped_when_there_is_room_for_it(tmp_path: Path) -> None:
    """By then every rank's forward has long been over; each still ships its own share."""
    pair = write_pair(tmp_path)
    prompt = PROMPTS[2]
    (golden,) = run_aggregated(load_pair(pair), [prompt], SAMPLED, **SMALL)
    groups = threads(pair, (2, 1))
    granted: dict[RequestId, Reservation] = {}
    groups._prefill = granted.__setitem__  # type: ignore[method-assign]
    held = RequestId("held")
    try:
        groups.now_s = time.monotonic()
        groups.context.hold(
            HoldRequest(
                request_id=held, prompt_token_ids=tuple(prompt), sampling=SAMPLED, ttl_s=60.0, lease_s=60.0
            ),
            groups.now_s,
        )
        while not groups.context.counters.prompts_held:
            groups.tick()
        asked = groups.ask(prompt, SAMPLED)
        while asked not in granted:
            groups.tick()
        groups.context.ship(
            ShipRequest(
                request_id=asked,
                held_id=held,
                num_prompt_tokens=len(prompt),
                reservation=granted[asked],
                ttl_s=60.0,
            ),
            groups.now_s,
        )
        groups.run()
        assert groups.outcomes[asked].tokens == golden.tokens
    finally:
        groups.close()


def test_a_rank_s_pages_wait_for_its_own_forward_and_not_for_the_first_rank_s(tmp_path: Path) -> None:
    pair = write_pair(tmp_path)
    prompt = PROMPTS[0][:CHUNK]
    (golden,) = run_aggregated(load_pair(pair), [prompt], SAMPLED, **SMALL)
    groups = threads(pair, (2, 2))
    late = threading.Event()
    follower = groups.followers["context"][0]
    prefill = follower._work.prefill

    def slow(sequences: Items[Sequence], step: Prefill) -> list[torch.Tensor | None]:
        computed = prefill(sequences, step)
        late.wait(TIMEOUT_S)
        return computed

    follower._work.prefill = slow  # type: ignore[method-assign]
    try:
        groups.now_s = time.monotonic()
        asked = groups.ask(prompt, SAMPLED)
        while not groups.context.num_transfers or groups.context.num_running:
            groups.tick()
        for _ in range(200):  # the first rank has computed all; its own pages may go
            groups.tick()
        assert not groups.outcomes[asked].tokens
        assert follower._server is not None
        endpoint = follower._server._port._endpoint  # type: ignore[attr-defined]
        (sending,) = endpoint._book._sending._open.values()
        assert [lane.shipped for lane in sending.lanes] == [0, 0]
        late.set()
        groups.run()
        assert groups.outcomes[asked].tokens == golden.tokens
    finally:
        late.set()
        groups.close()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("drafting", [dflash2(), dspark("rnn")], ids=["dflash2", "dspark"])
@pytest.mark.parametrize("draft_kv", ["mirrored", "unified"])
@pytest.mark.parametrize("sizes", PAIRS)
def test_all_pairs_of_groups_answer_as_one_worker_does(
    tmp_path: Path, sizes: tuple[int, int], draft_kv: str, drafting: dict[str, Any]
) -> None:
    pair = write_pair(tmp_path, drafting)
    assert_answers_as_one_worker(pair, threads(pair, sizes, draft_kv=draft_kv), sizes[1])


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", PAIRS)
def test_all_pairs_of_groups_of_processes_answer_over_nixl_as_one_worker_does(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    pair = write_pair(tmp_path)
    assert_answers_as_one_worker(pair, processes(tmp_path, sizes), sizes[1])
