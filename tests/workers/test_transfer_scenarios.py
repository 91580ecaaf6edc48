"""Cases between the two legs of a request that broke other split servers: aborts, deaths, lost words, re-used pages.

Real engines and ledgers over loopback, with random weights; a lease lasts 0.6 s here. Every case ends at its baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch

from kvmanager.ids import PageId, RequestId, TransferId
from tests.workers.split_pair import TICK_S, Outcome, SplitPair, config, run_aggregated
from transceiver import content, wire
from transceiver.loopback import Faults
from transceiver.port import Ready
from transceiver.records import Timing
from workers.assembly import Models, build
from workers.config import WorkerConfig
from workers.context import ContextEngine
from workers.errors import InvalidRequest, TransferBroke
from workers.request import PrefillRequest, Reservation, Role, SamplingParams

TIMING = Timing(lease_s=0.6, heartbeat_s=0.1, quiesce_s=0.2, linger_s=0.5)
LEASE_TICKS = round((TIMING.lease_s) / TICK_S) + 2
ANSWER = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.2, seed=3)
PROMPTS = [[(7 * n + n * n * k) % 11 for n in range(37)] for k in (1, 2, 3)]


def small(role: Role, *, pages: int | None = None, chunk: int = 8, **more: object) -> WorkerConfig:
    made = config(role, pages=pages, max_batch=4, chunk=chunk)
    return msgspec.structs.replace(made, **{"dtype": "float64", "page_size": 4, "max_seq_len": 96, **more})


def pair_of(models: Models, **more: object) -> SplitPair:
    fields: dict[str, object] = {
        "context": small("context"),
        "generation": small("generation"),
        "timing": TIMING,
    }
    return SplitPair(models, **{**fields, **more})  # type: ignore[arg-type]


def golden(models: Models, prompt: Sequence[int], sampling: SamplingParams = ANSWER) -> list[int]:
    return run_aggregated(models, [prompt], sampling, dtype="float64")[0].tokens


def tick_until_granted(pair: SplitPair, request_id: RequestId) -> Reservation:
    while (reservation := pair.outcomes[request_id].reservation) is None:
        pair.tick()
    return reservation


def tick_until_computing(pair: SplitPair) -> None:
    while not pair.context.counters.prompt_tokens_computed:
        pair.tick()


def prefill_of(pair: SplitPair, request_id: RequestId, reservation: Reservation, name: str) -> PrefillRequest:
    return PrefillRequest(
        request_id=RequestId(name),
        prompt_token_ids=pair.prompts[request_id],
        sampling=pair.sampling[request_id],
        reservation=reservation,
        ttl_s=5.0,
    )


def test_s03_pages_of_an_aborted_request_are_not_reused_while_its_late_write_is_under_way(
    random_models: Models,
) -> None:
    """The pool holds one request, so B gets A's pages; A's write takes up to two seconds."""
    pair = pair_of(
        random_models,
        generation=small("generation", pages=15, max_seq_len=52),
        faults=Faults(max_write_delay_s=2.0),
        seed=4,
    )
    a = pair.ask(PROMPTS[0], ANSWER)
    while not pair.hub._workers[pair._assemblies["context"].facts.epoch].pending:
        pair.tick()
    pair.generation.cancel(a)
    pair.context.cancel(a)
    pair.hub.faults = Faults()
    b = pair.ask(PROMPTS[1], ANSWER)
    while not pair.outcomes[b].tokens:
        pair.tick()
    pair.now_s += 3.0  # whatever of A is still under way arrives now, while B decodes
    pair.run()
    assert pair.outcomes[a].finish == "cancelled"
    assert pair.outcomes[b].tokens == golden(random_models, PROMPTS[1])


def test_s04_pages_of_an_aborted_request_return_although_its_writer_died_before_it_could_say_so(
    random_models: Models,
) -> None:
    pair = pair_of(random_models)
    a = pair.ask(PROMPTS[0], ANSWER, ttl_s=60.0)
    tick_until_granted(pair, a)
    while not pair.generation._port._here._book._receiving.granted:  # type: ignore[attr-defined]
        pair.tick()
    pair.generation.cancel(a)
    pair.restart("context", told=False)
    for _ in range(LEASE_TICKS):
        pair.tick()
    assert (pair.generation.num_transfers, pair.generation.num_quarantined) == (0, 1)
    assert pair.generation.idle
    pair.tell_of_deaths()
    pair.tick()
    assert pair.generation.num_quarantined == 0
    assert pair.generation.ledger.usage() == pair.baseline[1]


@pytest.mark.parametrize("writer", ["stalled", "busy"])
def test_a_write_that_lands_ten_seconds_late_hits_nobody(random_models: Models, writer: str) -> None:
    """A's error is told after a lease; its pages go to B only when the write is over. C gets others meanwhile."""
    pair = pair_of(
        random_models,
        generation=small("generation", pages=30, max_seq_len=52),
        faults=Faults(max_write_delay_s=0.001),
    )
    a = pair.ask(PROMPTS[0], ANSWER)
    pending = pair.hub._workers[pair._assemblies["context"].facts.epoch].pending
    while not pending:
        pair.tick()
    for write, (_, posted) in pending.items():
        pending[write] = (pair.now_s + 10.0, posted)
    lands_s = pair.now_s + 10.0
    if writer == "busy":
        pair.context.cancel(a)
    for _ in range(LEASE_TICKS):
        pair.tick(context=writer == "busy")
    assert pair.outcomes[a].finish == "error"
    assert (pair.generation.num_transfers, pair.generation.num_quarantined) == (0, 1)
    assert pair.generation.ledger.usage().slots_in_use == 0
    if writer == "stalled":
        c = SecondContext(pair, random_models).serve(pair.ask(PROMPTS[2], ANSWER))
        assert c.tokens == golden(random_models, PROMPTS[2])
        pair._prefill = SplitPair._prefill.__get__(pair)  # type: ignore[method-assign]
        while pair.now_s < lands_s - 4.0:
            pair.tick(context=False)
    others = [pair.ask(prompt, ANSWER) for prompt in PROMPTS[1:]]
    while pair.now_s < lands_s - 2 * TICK_S:
        pair.tick()
        assert pair.generation.num_quarantined
    pair.run()
    assert pair.now_s > lands_s
    assert pair.generation.num_quarantined == 0
    assert [pair.outcomes[i].tokens for i in others] == [golden(random_models, p) for p in PROMPTS[1:]]


def test_s09_a_request_dropped_between_its_two_legs_costs_the_reservation_a_lease_and_no_more(
    random_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(random_models)
    monkeypatch.setattr(pair, "_prefill", lambda request_id, reservation: None)
    a = pair.ask(PROMPTS[0], ANSWER, ttl_s=480.0)
    for _ in range(LEASE_TICKS):
        pair.tick()
    assert pair.outcomes[a].finish == "error"
    assert "nothing was heard of its sender" in pair.outcomes[a].error
    assert pair.usage() == pair.baseline


def test_a_queue_longer_than_the_lease_loses_no_reservation(random_models: Models) -> None:
    """Prompts wait for a context worker that is busy for many leases: heartbeats keep what they wait for."""
    pair = pair_of(random_models, context=small("context", pages=12, max_seq_len=40, chunk=4))
    ids = [pair.ask(PROMPTS[k], ANSWER) for k in range(3)]
    while pair.context.num_waiting < 2:
        pair.tick()
    busy, pair.context._prefill = pair.context._prefill, lambda: None  # type: ignore[method-assign]
    for _ in range(5 * LEASE_TICKS):
        pair.tick()
    pair.context._prefill = busy  # type: ignore[method-assign]
    pair.run()
    assert [pair.outcomes[i].tokens for i in ids] == [golden(random_models, prompt) for prompt in PROMPTS]


def test_a_queued_prompt_whose_reservation_is_gone_leaves_the_queue(random_models: Models) -> None:
    pair = pair_of(random_models, context=small("context", pages=12, max_seq_len=40))
    first, queued = pair.ask(PROMPTS[0], ANSWER), pair.ask(PROMPTS[1], ANSWER)
    while pair.context.num_waiting < 1:
        pair.tick()
    busy, pair.context._prefill = pair.context._prefill, lambda: None  # type: ignore[method-assign]
    pair.generation.cancel(queued)
    for _ in range(round(2 * TIMING.heartbeat_s / TICK_S)):
        pair.tick()
    assert pair.context.num_waiting == 0
    pair.context._prefill = busy  # type: ignore[method-assign]
    pair.run()
    assert pair.outcomes[first].tokens == golden(random_models, PROMPTS[0])
    assert isinstance(pair.outcomes[queued].refused, TransferBroke)


class SecondContext:
    """Another context worker of the same generation worker."""

    def __init__(self, pair: SplitPair, models: Models) -> None:
        assembly = build(small("context"), models, pair._port)
        assert isinstance(assembly.engine, ContextEngine)
        assert assembly.port is not None
        self.engine = assembly.engine
        self.epoch = assembly.facts.epoch
        self._pair = pair
        assembly.port.connect(pair._assemblies["generation"].facts.hello)

    def serve(self, request_id: RequestId, max_ticks: int = 400) -> Outcome:
        """Run the request's prompt here; the pair's own context worker is not stepped."""
        pair = self._pair
        pair._prefill = lambda granted, reservation: self.engine.prefill(  # type: ignore[method-assign]
            prefill_of(pair, granted, reservation, granted), pair.now_s
        )
        for _ in range(max_ticks):
            pair.tick(context=False)
            with torch.inference_mode():
                self.engine.step(pair.now_s)
            if pair.outcomes[request_id].over:
                break
        return pair.outcomes[request_id]


def test_s12_requests_that_wait_for_a_dead_context_worker_hold_up_neither_cancels_nor_other_workers(
    random_models: Models,
) -> None:
    pair = pair_of(random_models)
    waiting = [pair.ask(prompt, ANSWER) for prompt in PROMPTS]
    pair.tick(context=False)
    pair.generation.cancel(waiting[0])
    pair.tick(context=False)
    assert pair.outcomes[waiting[0]].finish == "cancelled"
    other = SecondContext(pair, random_models)
    served = other.serve(pair.ask(PROMPTS[1], ANSWER))
    assert served.tokens == golden(random_models, PROMPTS[1])
    for _ in range(LEASE_TICKS):
        pair.tick(context=False)
    assert [pair.outcomes[i].finish for i in waiting] == ["cancelled", "error", "error"]
    assert pair.generation.ledger.usage() == pair.baseline[1]


def test_s13_every_seventh_message_lost_delays_answers_and_changes_none(random_models: Models) -> None:
    pair = pair_of(random_models)
    count = 0

    def drop(source: object, destination: object, message: bytes) -> bool:
        nonlocal count
        count += 1
        return count % 7 == 0

    pair.hub.drop = drop
    ids = [pair.ask(PROMPTS[k % 3], ANSWER) for k in range(12)]
    pair.run()
    assert count > 28
    for k, request_id in enumerate(ids):
        assert pair.outcomes[request_id].tokens == golden(random_models, PROMPTS[k % 3])


def test_s14_a_write_that_fails_on_the_context_worker_is_an_error_on_the_generation_worker_in_under_a_second(
    random_models: Models,
) -> None:
    pair = pair_of(random_models, faults=Faults(write_failure=1.0))
    a = pair.ask(PROMPTS[0], ANSWER, ttl_s=300.0)
    tick_until_computing(pair)
    began_s = pair.now_s
    while not pair.outcomes[a].over:
        pair.tick()
    assert pair.now_s - began_s < 1.0
    pair.run()
    assert "injected fault" in pair.outcomes[a].error or isinstance(pair.outcomes[a].refused, TransferBroke)


def test_s16_a_context_worker_that_accepts_and_never_answers_keeps_nobody_waiting_past_the_lease(
    random_models: Models,
) -> None:
    pair = pair_of(random_models)
    a = pair.ask(PROMPTS[0], ANSWER, ttl_s=300.0)
    pair.tick(context=False)
    assert pair.context.num_waiting == 1
    for _ in range(LEASE_TICKS):
        pair.tick(context=False)
    assert pair.outcomes[a].finish == "error"
    assert pair.generation.ledger.usage() == pair.baseline[1]
    pair.run()  # it wakes: what it held ends too


@pytest.mark.parametrize("spoil", ["consumed", "unknown transfer", "pages out of range", "another's pages"])
def test_s18_a_reservation_that_is_replayed_or_wrong_is_refused_and_disturbs_nobody(
    random_models: Models, spoil: str
) -> None:
    pair = pair_of(random_models)
    a = pair.ask(PROMPTS[0], ANSWER)
    good = tick_until_granted(pair, a)
    pair.run()
    b = pair.ask(PROMPTS[1], ANSWER)
    theirs = tick_until_granted(pair, b)
    replace = msgspec.structs.replace
    bad = {
        "consumed": good,
        "unknown transfer": replace(good, transfer_id=TransferId("made up")),
        "pages out of range": replace(
            good, transfer_id=TransferId("x"), target_pages=(*good.target_pages[:-1], PageId(10**6))
        ),
        "another's pages": replace(good, transfer_id=TransferId("y"), target_pages=theirs.target_pages),
    }[spoil]
    stray = RequestId("stray")
    pair.outcomes[stray] = Outcome()
    try:
        pair.context.prefill(prefill_of(pair, a, bad, stray), pair.now_s)
    except TransferBroke as refused:
        pair.outcomes[stray].refused = refused
    pair.run()
    assert isinstance(pair.outcomes[stray].refused, TransferBroke)
    assert pair.outcomes[b].tokens == golden(random_models, PROMPTS[1])


def test_s18_a_reservation_whose_lease_is_over_is_refused(
    random_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(random_models)
    monkeypatch.setattr(pair, "_prefill", lambda request_id, reservation: kept.append(reservation))
    kept: list[Reservation] = []
    a = pair.ask(PROMPTS[0], ANSWER)
    for _ in range(LEASE_TICKS):
        pair.tick()
    assert pair.outcomes[a].finish == "error"
    late = RequestId("late")
    pair.outcomes[late] = Outcome()
    pair.context.prefill(prefill_of(pair, a, kept[0], late), pair.now_s)
    pair.run()
    assert isinstance(pair.outcomes[late].refused, TransferBroke)


@pytest.mark.parametrize("role", ["context", "generation"])
def test_s23_a_restarted_worker_with_another_pool_elsewhere_is_written_and_read_by_its_new_tables(
    random_models: Models, role: Role
) -> None:
    pair = pair_of(random_models)
    pair.ask(PROMPTS[0], ANSWER)
    pair.run()
    pair._builds[role] = (small(role, pages=40), random_models)
    pair.restart(role, told=True)
    pair.baseline = pair.usage()
    b = pair.ask(PROMPTS[1], ANSWER)
    pair.run()
    assert pair.outcomes[b].tokens == golden(random_models, PROMPTS[1])


def test_s25_a_blocked_pair_heals_without_touching_other_pairs(random_models: Models) -> None:
    pair = pair_of(random_models)
    first = pair.ask(PROMPTS[0], ANSWER)
    pair.run()
    blocked = pair._assemblies["context"].facts.epoch
    pair.hub.drop = lambda source, destination, message: blocked in (source, destination)
    cut_off = pair.ask(PROMPTS[0], ANSWER)
    own_prefill = pair._prefill
    while not pair.outcomes[cut_off].over:
        pair.tick()
    assert pair.outcomes[cut_off].finish == "error"
    other = SecondContext(pair, random_models)
    assert other.serve(pair.ask(PROMPTS[2], ANSWER)).tokens == golden(random_models, PROMPTS[2])
    pair.hub.drop = None
    pair._prefill = own_prefill  # type: ignore[method-assign]
    again = pair.ask(PROMPTS[1], ANSWER)
    pair.run()
    assert pair.outcomes[again].tokens == golden(random_models, PROMPTS[1])
    assert pair.outcomes[first].finish == "length"


def test_s39_two_requests_of_six_tenths_of_the_pool_each_are_both_answered(random_models: Models) -> None:
    long = msgspec.structs.replace(ANSWER, max_tokens=40)
    pages = round((len(PROMPTS[0]) + 40 + 4) / 4 / 0.6) + 1
    pair = pair_of(random_models, generation=small("generation", pages=pages))
    ids = [pair.ask(PROMPTS[k], long) for k in range(2)]
    pair.run()
    assert [pair.outcomes[i].tokens for i in ids] == [
        golden(random_models, PROMPTS[k], long) for k in range(2)
    ]


def test_s45_no_byte_of_a_pushed_chunk_changes_after_its_push(
    random_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk read before its forward has ended would differ from what the pages hold in the end."""
    pair = pair_of(random_models, context=small("context", chunk=4))
    a = pair.ask(PROMPTS[0], ANSWER)
    tick_until_granted(pair, a)
    region = wire.decode_hello(pair._assemblies["context"].facts.hello).pools.target
    pool = content.memory(region.address, region.size_bytes).reshape(-1, region.page_bytes)
    pushed: list[tuple[list[int], np.ndarray]] = []
    push = pair.context._port.push

    def watched(transfer: TransferId, end_position: int, ready: Ready | None) -> None:
        ids = list(pair.context.ledger.pages(a).target[: end_position // 4])
        pushed.append((ids, pool[ids].copy()))
        push(transfer, end_position, ready)

    monkeypatch.setattr(pair.context._port, "push", watched)
    pair.run()
    assert len([ids for ids, _ in pushed if ids]) > 5
    for ids, seen in pushed:
        assert (pool[ids] == seen).all()
    assert pair.outcomes[a].tokens == golden(random_models, PROMPTS[0])


def test_s45_nothing_is_shipped_while_the_device_still_computes_it(
    random_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(random_models, context=small("context", chunk=4))
    computed = False
    monkeypatch.setattr(pair.context._runner, "written", lambda: lambda: computed)
    a = pair.ask(PROMPTS[0], ANSWER)
    region = wire.decode_hello(pair._assemblies["generation"].facts.hello).pools.target
    pool = content.memory(region.address, region.size_bytes)
    for _ in range(50):
        pair.tick()
    assert pair.context.num_running == 0  # the engine went through the whole prompt
    assert not pool.any()
    computed = True
    pair.run()
    assert pair.outcomes[a].tokens == golden(random_models, PROMPTS[0])


@pytest.mark.parametrize("needle", [1, 9, 20, 30])
def test_s45_a_needle_in_any_chunk_is_read_as_by_an_aggregated_worker(
    random_models: Models, needle: int
) -> None:
    prompt = list(PROMPTS[0])
    prompt[needle] = (prompt[needle] + 5) % 11
    pair = pair_of(
        random_models,
        context=small("context", chunk=4),
        faults=Faults(max_write_delay_s=0.3, max_delay_s=0.1),
        seed=needle,
    )
    a = pair.ask(prompt, ANSWER)
    pair.run()
    assert pair.outcomes[a].tokens == golden(random_models, prompt)


def test_s55_a_live_requests_id_is_not_taken_twice_and_transfers_have_ids_of_their_own(
    random_models: Models,
) -> None:
    pair = pair_of(random_models)
    a = pair.ask(PROMPTS[0], ANSWER)
    pair.tick()
    sampled = pair.outcomes.copy()
    pair._ids = iter(["0"])  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="live on this worker already"):
        pair.ask(PROMPTS[1], ANSWER)
    pair.outcomes, pair.prompts[a] = sampled, tuple(PROMPTS[0])
    b = RequestId("b")
    pair._ids = iter(["b"])  # type: ignore[assignment]
    assert pair.ask(PROMPTS[1], ANSWER) == "rb"
    pair.run()
    assert b not in pair.outcomes
    assert pair.outcomes[a].tokens == golden(random_models, PROMPTS[0])
    assert pair.outcomes[RequestId("rb")].tokens == golden(random_models, PROMPTS[1])


def test_corrupted_pages_end_in_an_error_and_never_in_text(random_models: Models) -> None:
    pair = pair_of(
        random_models,
        context=small("context", verify="checksum"),
        generation=small("generation", verify="checksum"),
        faults=Faults(corruption=1.0),
    )
    a = pair.ask(PROMPTS[0], ANSWER)
    pair.run()
    assert pair.outcomes[a].tokens == []
    assert "content of target page" in pair.outcomes[a].error or isinstance(
        pair.outcomes[a].refused, TransferBroke
    )


def test_idle_workers_go_on_cleaning_up(random_models: Models) -> None:
    """Nothing new comes; deadlines and leases pass all the same."""
    pair = pair_of(random_models)
    a = pair.ask(PROMPTS[0], ANSWER, ttl_s=0.5)
    pair.tick(context=False)
    for _ in range(LEASE_TICKS):
        pair.tick(context=False)
    assert pair.generation.idle
    assert pair.outcomes[a].finish == "error"
    assert pair.generation.ledger.usage() == pair.baseline[1]
