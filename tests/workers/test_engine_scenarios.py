"""Cases that broke other split servers, against the real engines over loopback. Every case ends at its baseline."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvmanager.ids import RequestId
from tests.workers.split_pair import SplitPair, config, run_aggregated
from transceiver.loopback import Faults
from workers.assembly import Models
from workers.errors import AdmissionTimeout, InvalidRequest, Overloaded, RequestCancelled
from workers.request import ReserveRequest, SamplingParams

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def test_s31_the_same_prompt_twice_leaves_the_context_worker_at_its_baseline(
    models: Models, prompts: list[list[int]]
) -> None:
    pair = SplitPair(models)
    first = pair.ask(prompts[0], GREEDY)
    pair.run()
    second = pair.ask(prompts[0], GREEDY)
    pair.run()
    assert pair.outcomes[first].tokens == pair.outcomes[second].tokens
    assert pair.usage() == pair.baseline
    assert pair.context.counters.transfers_done == 2


def test_s34_a_small_context_pool_and_slow_writes_neither_deadlock_nor_reuse_pages_early(
    models: Models, prompts: list[list[int]]
) -> None:
    """33 pages hold one longest prompt; writes take up to a second, so pages must stay pinned until they are sent."""
    golden = run_aggregated(models, prompts, GREEDY)
    pair = SplitPair(
        models,
        context=config("context", pages=34, max_batch=4),
        faults=Faults(max_write_delay_s=1.0),
        seed=5,
    )
    ids = [pair.ask(prompt, GREEDY) for prompt in prompts]
    pair.run()
    assert [pair.outcomes[i].tokens for i in ids] == [g.tokens for g in golden]


def test_s35_a_prompt_that_ends_at_once_stays_pinned_until_its_slow_transfer_ends(
    models: Models, prompts: list[list[int]]
) -> None:
    golden = run_aggregated(models, [prompts[0]], GREEDY)[0]
    pair = SplitPair(models, faults=Faults(max_write_delay_s=3.0), seed=1)
    request_id = pair.ask(prompts[0], GREEDY)
    pinned_without_slot = 0
    while not pair.outcomes[request_id].tokens:
        pair.tick()
        usage = pair.context.ledger.usage()
        pinned_without_slot += usage.slots_in_use == 0 and usage.target_pages_in_use > 0
    assert pinned_without_slot > 10, "the row must be free while the pages are still being read"
    pair.run()
    assert pair.outcomes[request_id].tokens == golden.tokens


def test_s41_a_request_larger_than_the_pool_is_refused_at_once_and_others_go_on(
    models: Models, prompts: list[list[int]]
) -> None:
    pair = SplitPair(models, generation=config("generation", pages=34, max_batch=4))
    running = pair.ask(prompts[0], GREEDY)
    pair.tick()
    with pytest.raises(InvalidRequest, match="512"):
        pair.ask([5] * 500, SamplingParams(max_tokens=40))
    pair.outcomes.popitem()
    pair.run()
    assert pair.outcomes[running].finish == "length"


def test_s46_a_prompt_over_the_context_workers_limit_is_refused_and_the_reservation_returns(
    models: Models, prompts: list[list[int]]
) -> None:
    small = msgspec.structs.replace(config("context"), max_seq_len=64)
    pair = SplitPair(models, context=small)
    too_long = pair.ask([9] * 65, GREEDY)
    fits = pair.ask(prompts[0][:40], GREEDY)
    pair.run()
    refused = pair.outcomes[too_long].refused
    assert isinstance(refused, InvalidRequest)
    assert "64" in str(refused)
    assert pair.outcomes[too_long].tokens == []
    assert pair.outcomes[fits].finish == "length"


def test_s49_a_first_token_that_ends_the_request_is_a_success(
    models: Models, prompts: list[list[int]]
) -> None:
    first = run_aggregated(models, [prompts[0]], GREEDY)[0].tokens[0]
    pair = SplitPair(models)
    stopped = pair.ask(prompts[0], SamplingParams(max_tokens=24, stop_token_ids=(first,)))
    pair.run()
    assert pair.outcomes[stopped].tokens == [first]
    assert pair.outcomes[stopped].finish == "stop"
    assert pair.outcomes[stopped].context_done


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_s50_max_tokens_counts_the_first_token(
    models: Models, prompts: list[list[int]], max_tokens: int
) -> None:
    golden = run_aggregated(models, [prompts[1]], GREEDY)[0].tokens
    pair = SplitPair(models)
    request_id = pair.ask(prompts[1], msgspec.structs.replace(GREEDY, max_tokens=max_tokens))
    pair.run()
    assert pair.outcomes[request_id].tokens == golden[:max_tokens]
    assert pair.outcomes[request_id].finish == "length"


def test_s58_transfers_have_ids_of_their_own(models: Models, prompts: list[list[int]]) -> None:
    pair = SplitPair(models)
    ids = [pair.ask(prompts[0], GREEDY) for _ in range(3)]
    pair.run()
    transfers = {
        outcome.reservation.transfer_id
        for outcome in pair.outcomes.values()
        if outcome.reservation is not None
    }
    assert len(transfers) == 3
    assert transfers.isdisjoint(ids)


def test_s59_eight_live_requests_hold_eight_distinct_slots_equal_in_both_ledgers(
    models: Models, prompts: list[list[int]]
) -> None:
    pair = SplitPair(models, context=config("context", chunk=512))  # all land before one ends
    long = msgspec.structs.replace(GREEDY, max_tokens=200)
    ids = [pair.ask(prompts[index % len(prompts)], long) for index in range(8)]
    while pair.generation.num_running < 8:
        pair.tick()
    ledger = pair.generation.ledger
    assert ledger.draft is not None
    slots = [ledger.slot(request_id) for request_id in ids]
    assert len(set(slots)) == 8
    assert [ledger.draft.slot(request_id) for request_id in ids] == slots
    assert ledger.dummy_slot not in slots
    pair.run()


def test_s59_ten_times_max_batch_requests_leave_the_context_slots_at_their_baseline(
    models: Models, prompts: list[list[int]]
) -> None:
    pair = SplitPair(models, context=config("context", max_batch=2))
    short = msgspec.structs.replace(GREEDY, max_tokens=2)
    ids = [pair.ask(prompts[index % len(prompts)][:20], short) for index in range(20)]
    pair.run()
    assert all(pair.outcomes[i].finish == "length" for i in ids)
    usage = pair.context.ledger.usage()
    assert usage.slots_in_use == usage.draft_slots_in_use == usage.leases == 0


@pytest.mark.parametrize("after_ticks", [0, 1, 2, 3, 5, 8, 12])
def test_a_cancel_at_any_moment_returns_everything_and_disturbs_nobody(
    models: Models, prompts: list[list[int]], after_ticks: int
) -> None:
    golden = run_aggregated(models, [prompts[1]], GREEDY)[0].tokens
    pair = SplitPair(models, faults=Faults(max_delay_s=0.03, max_write_delay_s=0.05), seed=after_ticks)
    gone, stays = pair.ask(prompts[0], GREEDY), pair.ask(prompts[1], GREEDY)
    for _ in range(after_ticks):
        pair.tick()
    pair.context.cancel(gone)
    pair.generation.cancel(gone)
    pair.generation.cancel(gone)
    pair.run()
    outcome = pair.outcomes[gone]
    # A fast machine has answered within that many ticks: then the answer is whole.
    done = outcome.finish == "length" and len(outcome.tokens) == GREEDY.max_tokens
    assert done or outcome.finish == "cancelled" or isinstance(outcome.refused, RequestCancelled)
    assert pair.outcomes[stays].tokens == golden


def test_a_long_prompt_stops_before_its_next_chunk_when_cancelled(
    models: Models, prompts: list[list[int]]
) -> None:
    """S05 at engine level: what is not computed yet is never computed."""
    pair = SplitPair(models, context=config("context", chunk=16))
    request_id = pair.ask((prompts[0] * 8)[:320], GREEDY)
    while not pair.context.counters.prompt_tokens_computed:
        pair.tick()
    computed = pair.context.counters.prompt_tokens_computed
    pair.context.cancel(request_id)
    pair.generation.cancel(request_id)
    pair.run()
    assert pair.context.counters.prompt_tokens_computed == computed < 320


def test_chunks_are_pushed_while_later_chunks_are_computed(models: Models, prompts: list[list[int]]) -> None:
    pair = SplitPair(models, context=config("context", chunk=16))
    request_id = pair.ask((prompts[0] * 8)[:160], GREEDY)
    pool = pair.generation._runner._target_attention.storage.pool  # type: ignore[attr-defined]
    arrived_early = False
    while pair.context.counters.prompt_tokens_computed < 160 - 16:
        pair.tick()
        reservation = pair.outcomes[request_id].reservation
        arrived_early |= reservation is not None and bool(pool[reservation.target_pages[0]].any())
    assert arrived_early, "no page arrived before the last chunk was computed"
    pair.run()


def test_a_lossy_link_delays_answers_and_changes_none(models: Models, prompts: list[list[int]]) -> None:
    golden = run_aggregated(models, prompts, GREEDY)
    faults = Faults(loss=0.3, duplication=0.3, max_delay_s=0.1, max_write_delay_s=0.1)
    pair = SplitPair(models, faults=faults, seed=3)
    ids = [pair.ask(prompt, GREEDY) for prompt in prompts]
    pair.run()
    assert [pair.outcomes[i].tokens for i in ids] == [g.tokens for g in golden]


def test_a_dead_context_worker_ends_requests_in_an_error_and_returns_their_pages(
    models: Models, prompts: list[list[int]]
) -> None:
    pair = SplitPair(models, context=config("context", chunk=16))
    request_id = pair.ask((prompts[0] * 8)[:160], GREEDY, ttl_s=2.0)
    while not pair.context.counters.prompt_tokens_computed:
        pair.tick()
    for _ in range(2_000):
        pair.tick(context=False)
        if pair.outcomes[request_id].over:
            break
    assert pair.outcomes[request_id].finish == "error"
    assert "EXPIRED" in pair.outcomes[request_id].error
    assert pair.generation.ledger.usage() == pair.baseline[1]


def test_waiting_requests_are_bounded_and_time_out(models: Models, prompts: list[list[int]]) -> None:
    one = msgspec.structs.replace(config("generation", max_batch=1), max_waiting=2)
    pair = SplitPair(models, generation=one)
    first = pair.ask(prompts[0], msgspec.structs.replace(GREEDY, max_tokens=200))
    pair.tick()
    late = pair.ask(prompts[1], GREEDY, ttl_s=0.05)
    pair.ask(prompts[1], GREEDY)
    with pytest.raises(Overloaded, match="max_waiting"):
        pair.ask(prompts[1], GREEDY)
    rejected = pair.outcomes.popitem()
    assert not rejected[1].over
    pair.run()
    assert isinstance(pair.outcomes[late].refused, AdmissionTimeout)
    assert pair.outcomes[first].finish == "length"


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("temperature", SamplingParams(max_tokens=4, temperature=-0.1)),
        ("temperature", SamplingParams(max_tokens=4, temperature=float("nan"))),
        ("top_p", SamplingParams(max_tokens=4, top_p=0.0)),
        ("min_p", SamplingParams(max_tokens=4, min_p=1.5)),
        ("logit_bias", SamplingParams(max_tokens=4, logit_bias=((10**6, 1.0),))),
        ("logit_bias", SamplingParams(max_tokens=4, logit_bias=((3, 1.0), (3, 2.0)))),
        ("logit_bias", SamplingParams(max_tokens=4, logit_bias=((3, float("inf")),))),
        ("frequency_penalty", SamplingParams(max_tokens=4, frequency_penalty=float("inf"))),
        ("presence_penalty", SamplingParams(max_tokens=4, presence_penalty=float("nan"))),
        ("repetition_penalty", SamplingParams(max_tokens=4, repetition_penalty=0.0)),
        ("prompt", SamplingParams(max_tokens=4, repetition_penalty=1.1)),  # and no token of it
        ("prompt", SamplingParams(max_tokens=4, presence_penalty=0.5, resumed_tokens=2)),
        ("resumed_tokens", SamplingParams(max_tokens=4, resumed_tokens=4)),
        ("stop_token_ids", SamplingParams(max_tokens=4, stop_token_ids=(10**6,))),
        ("top_k", SamplingParams(max_tokens=4, top_k=-1)),
        ("max_tokens", SamplingParams(max_tokens=0)),
    ],
)
def test_values_that_no_sampler_can_honour_name_their_field(
    models: Models, field: str, sampling: SamplingParams
) -> None:
    pair = SplitPair(models)
    request = ReserveRequest(request_id="x", num_prompt_tokens=3, sampling=sampling, ttl_s=1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        pair.generation.reserve(request, 0.0)
    assert caught.value.field == field


def test_logprobs_come_for_every_token_the_first_included(models: Models, prompts: list[list[int]]) -> None:
    """S53: the first token's log probability travels with the hand-off."""
    pair = SplitPair(models)
    collected: list[float] = []
    pair.ask(prompts[0], msgspec.structs.replace(GREEDY, logprobs=2, max_tokens=12))
    original = pair.generation.step

    def step(now_s: float) -> list[object]:
        events = original(now_s)
        for event in events:
            output = getattr(event, "output", None)
            if output is not None:
                assert len(output.logprobs) == len(output.token_ids)
                collected.extend(entry.logprob for entry in output.logprobs)
                assert all(len(entry.top) == 2 for entry in output.logprobs)
                assert all(e.token_id == t for e, t in zip(output.logprobs, output.token_ids, strict=True))
        return list(events)

    pair.generation.step = step  # type: ignore[method-assign,assignment]
    pair.run()
    assert len(collected) == 12
    assert all(value <= 0.0 for value in collected)


def test_transfers_are_counted_by_the_state_that_they_end_in(
    models: Models, prompts: list[list[int]]
) -> None:
    """One loses its sender, one is cancelled, one gets no sender in time, one is done."""
    pair = SplitPair(models, faults=Faults(max_write_delay_s=0.5), seed=1)
    pair.ask(prompts[0], GREEDY)
    while not pair.context.counters.prompt_tokens_computed:
        pair.tick()
    for _ in range(3):
        pair.tick()  # the two have spoken of the transfer
    pair.restart("context", told=True)
    pair.run()
    cancelled = pair.ask(prompts[1], GREEDY)
    while not pair.context.num_transfers:
        pair.tick()
    pair.generation.cancel(cancelled)
    pair.run()
    assert pair.context.counters.transfers_cancelled == 1
    pair.ask(prompts[0], GREEDY, ttl_s=1.0)
    while not all(outcome.over for outcome in pair.outcomes.values()):
        pair.tick(context=False)
    pair.run()
    pair.ask(prompts[0], GREEDY)
    pair.run()
    ends = pair.generation.counters
    assert (ends.transfers_cancelled, ends.transfers_failed) == (1, 1)
    assert (ends.transfers_expired, ends.transfers_done) == (1, 1)


def test_steps_without_drafts_do_not_count_as_drafted(models: Models, prompts: list[list[int]]) -> None:
    pair = SplitPair(models)
    pair.ask(prompts[0], msgspec.structs.replace(GREEDY, draft_tokens=0))
    pair.run()
    decode = pair.generation.decode
    assert decode.decode_steps == GREEDY.max_tokens - 1
    assert (decode.drafted_steps, decode.drafted_tokens) == (0, 0)
    pair.ask(prompts[0], GREEDY)
    pair.run()
    assert decode.drafted_tokens == GREEDY.max_tokens - 1
    assert decode.drafted_steps == decode.decode_steps - decode.drafted_tokens


def test_s01_after_bursts_of_cancelled_long_prompts_a_probe_is_served_at_once(
    models: Models, prompts: list[list[int]]
) -> None:
    """Four bursts, more of each than fits; every client leaves at a random moment. (make flood: with processes.)"""
    pair, chance = SplitPair(models, context=config("context", pages=80)), random.Random(1)
    for _ in range(4):
        leaving: dict[int, list[RequestId]] = {}
        for _ in range(24):
            prompt = [chance.randrange(256) for _ in range(chance.randint(200, 440))]
            leaving.setdefault(chance.randrange(40), []).append(pair.ask(prompt, GREEDY))
        for tick in range(40):
            pair.tick()
            for request_id in leaving.get(tick, ()):
                pair.generation.cancel(request_id)
                pair.context.cancel(request_id)
        probe = pair.ask(prompts[0], GREEDY)
        ticks = 0
        while not pair.outcomes[probe].tokens:
            pair.tick()
            ticks += 1
        assert ticks < 100, "nothing of the burst is in its way"
        pair.run()
        assert pair.outcomes[probe].finish == "length"
