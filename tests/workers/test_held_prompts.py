"""A prompt that is computed before anybody knows where it will be decoded: kept under a lease, shipped once, or gone.

Real engines and ledgers over loopback, with random weights. Every case ends at its baseline.
"""

from __future__ import annotations

import contextlib
import itertools
import random

import msgspec
import pytest

from kvmanager.ids import RequestId, WorkerEpoch
from tests.workers.split_pair import TICK_S, Outcome, SplitPair, config, run_aggregated
from workers.assembly import Models
from workers.config import WorkerConfig
from workers.engine import ContextDone, EngineEvent, PromptHeld, Refused
from workers.errors import InvalidRequest, NotHeld, PeerUnknown, RequestCancelled, TransferBroke
from workers.request import Held, HoldRequest, Reservation, Role, SamplingParams, ShipRequest

ANSWER = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.2, seed=3, logprobs=2)
PROMPT = tuple((7 * n + n * n) % 11 for n in range(37))
HELD = RequestId("held")
ACTS = (*("hold", "reserve", "ship", "tick") * 4, "cancel hold", "cancel", "die")


def small(role: Role, **more: object) -> WorkerConfig:
    made = config(role, max_batch=4, chunk=8)
    return msgspec.structs.replace(made, **{"dtype": "float64", "page_size": 4, "max_seq_len": 96, **more})


class HoldingPair(SplitPair):
    """Prompts are held first; `ship` brings one to the generation worker. Ticks look at the context worker's words."""

    def __init__(self, models: Models) -> None:
        super().__init__(models, context=small("context"), generation=small("generation"))
        self.said: list[EngineEvent] = []
        step = self.context.step

        def listening(now_s: float) -> list[EngineEvent]:
            events = step(now_s)
            self.said += events
            return [event for event in events if not isinstance(event, PromptHeld | ContextDone | Refused)]

        self.context.step = listening  # type: ignore[method-assign]
        self.granted: dict[RequestId, Reservation] = {}

    def _prefill(self, request_id: RequestId, reservation: Reservation) -> None:
        self.granted[request_id] = reservation

    def hold(self, lease_s: float = 5.0, sampling: SamplingParams = ANSWER) -> None:
        request = HoldRequest(
            request_id=HELD, prompt_token_ids=PROMPT, sampling=sampling, ttl_s=5.0, lease_s=lease_s
        )
        self.context.hold(request, self.now_s)

    def tick_until_held(self) -> Held:
        while not (held := [event.held for event in self.said if isinstance(event, PromptHeld)]):
            self.tick()
        return held[0]

    def reserve(self, sampling: SamplingParams = ANSWER) -> RequestId:
        request_id = self.ask(PROMPT, sampling)
        while request_id not in self.granted:
            self.tick()
        return request_id

    def ship(self, request_id: RequestId, **change: object) -> None:
        request = ShipRequest(
            request_id=request_id,
            held_id=HELD,
            num_prompt_tokens=len(PROMPT),
            reservation=self.granted[request_id],
            ttl_s=5.0,
        )
        self.context.ship(msgspec.structs.replace(request, **change), self.now_s)

    def tick_for(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.tick()


@pytest.fixture
def pair(random_models: Models) -> HoldingPair:
    return HoldingPair(random_models)


def golden(models: Models) -> Outcome:
    return run_aggregated(models, [PROMPT], ANSWER, dtype="float64")[0]


def test_a_held_prompt_that_ships_gives_the_aggregated_answer_with_equal_acceptance(
    pair: HoldingPair, random_models: Models
) -> None:
    pair.hold()
    held = pair.tick_until_held()
    pair.tick_for(1.0)  # it waits as long as nobody asks for it
    request_id = pair.reserve()
    pair.ship(request_id)
    pair.run()
    whole, split = golden(random_models), pair.outcomes[request_id]
    assert split.tokens == whole.tokens
    assert [entry.token_id for entry in split.logprobs] == whole.tokens
    assert split.tokens[0] == held.first_token
    assert held.prompt_tokens_computed == len(PROMPT)
    assert split.stats is not None
    assert whole.stats is not None
    assert split.stats.decode_steps == whole.stats.decode_steps
    assert split.stats.prompt_tokens_computed == 0
    assert split.stats.kv_bytes_target > 0
    assert split.stats.kv_bytes_draft > 0
    assert [event.request_id for event in pair.said if isinstance(event, ContextDone)] == [request_id]


def test_a_held_prompt_costs_pages_but_no_slot(pair: HoldingPair) -> None:
    pair.hold()
    pair.tick_until_held()
    usage = pair.context.ledger.usage()
    assert usage.slots_in_use == usage.draft_slots_in_use == 0
    assert usage.target_pages_in_use == usage.draft_pages_in_use == -(-len(PROMPT) // 4)
    assert pair.context.idle
    pair.context.cancel(HELD)
    pair.run()


def test_a_lease_that_nobody_takes_up_gives_every_page_back(pair: HoldingPair) -> None:
    pair.hold(lease_s=0.5)
    pair.tick_until_held()
    pair.tick_for(0.4)
    assert pair.usage() != pair.baseline
    pair.tick_for(0.2)
    assert pair.usage() == pair.baseline
    counters = pair.context.counters
    assert (counters.prompts_held, counters.prompt_leases_expired) == (1, 1)
    request_id = pair.reserve()
    with pytest.raises(NotHeld):
        pair.ship(request_id)
    pair.generation.cancel(request_id)
    pair.run()


def test_what_is_held_ships_once(pair: HoldingPair) -> None:
    pair.hold()
    pair.tick_until_held()
    first, second = pair.reserve(), pair.reserve()
    pair.ship(first)
    with pytest.raises(NotHeld):
        pair.ship(second)
    pair.generation.cancel(second)
    pair.run()
    assert pair.outcomes[first].finish == "length"


def test_a_prompt_of_another_length_is_refused_and_what_is_held_stays(pair: HoldingPair) -> None:
    pair.hold()
    pair.tick_until_held()
    request_id = pair.reserve()
    with pytest.raises(InvalidRequest) as refused:
        pair.ship(request_id, num_prompt_tokens=len(PROMPT) - 1)
    assert (refused.value.field, refused.value.limit) == ("num_prompt_tokens", str(len(PROMPT)))
    pair.ship(request_id)
    pair.run()
    assert pair.outcomes[request_id].finish == "length"


def test_a_destination_that_is_unknown_here_leaves_nothing(pair: HoldingPair) -> None:
    pair.hold()
    pair.tick_until_held()
    request_id = pair.reserve()
    elsewhere = msgspec.structs.replace(
        pair.granted[request_id], generation_epoch=WorkerEpoch("never introduced")
    )
    with pytest.raises(PeerUnknown):
        pair.ship(request_id, reservation=elsewhere)
    pair.generation.cancel(request_id)
    pair.run()


@pytest.mark.parametrize("computed", [0, 16, len(PROMPT)], ids=["waiting", "prefilling", "held"])
def test_a_cancelled_hold_leaves_nothing(pair: HoldingPair, computed: int) -> None:
    pair.hold()
    while pair.context.counters.prompt_tokens_computed < computed:
        pair.tick()
    pair.context.cancel(HELD)
    pair.tick()
    assert pair.usage() == pair.baseline
    ends = [event for event in pair.said if isinstance(event, Refused | PromptHeld)]
    assert len(ends) == 1  # one answer, whichever it is
    if isinstance(ends[0], Refused):
        assert isinstance(ends[0].error, RequestCancelled)


def test_a_hold_that_is_cancelled_while_it_ships_ends_on_both_sides(pair: HoldingPair) -> None:
    pair.hold()
    pair.tick_until_held()
    request_id = pair.reserve()
    pair.ship(request_id)
    pair.generation.cancel(request_id)
    pair.context.cancel(request_id)
    pair.run()
    assert pair.outcomes[request_id].finish == "cancelled"


def test_a_second_hold_takes_what_the_first_left_in_the_prefix_cache(pair: HoldingPair) -> None:
    pair.hold()
    pair.tick_until_held()
    pair.context.cancel(HELD)
    pair.said.clear()
    pair.hold()
    assert pair.tick_until_held().prompt_tokens_computed < len(PROMPT)
    request_id = pair.reserve()
    pair.ship(request_id)
    pair.run()
    stats = pair.outcomes[request_id].stats
    assert stats is not None
    assert stats.cached_prompt_tokens > 0
    assert stats.prompt_tokens_computed == 0


def test_only_what_the_generation_worker_lacks_of_a_held_prompt_is_shipped(
    pair: HoldingPair, random_models: Models
) -> None:
    shipped = []
    for _ in range(2):
        pair.said.clear()
        pair.hold()
        pair.tick_until_held()
        request_id = pair.reserve()
        pair.ship(request_id)
        pair.run()
        stats = pair.outcomes[request_id].stats
        assert stats is not None
        shipped.append((pair.granted[request_id].first_position, stats.kv_bytes_target, stats.kv_bytes_draft))
        assert pair.outcomes[request_id].tokens == golden(random_models).tokens
    (_, *whole), (first_position, *rest) = shipped
    assert first_position == 36  # nine pages of four; the last of 37 tokens is always computed
    assert all(0 < some < all_ for some, all_ in zip(rest, whole, strict=True))


def test_a_failed_context_worker_gives_held_prompts_up(pair: HoldingPair) -> None:
    pair.hold()
    pair.tick_until_held()
    assert pair.context.fail_all("the engine broke") == []  # its caller has had its answer
    pair.run()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_to_held_prompts_every_page_and_slot_comes_back(
    random_models: Models, seed: int
) -> None:
    """Holds, leases that end, ships to the one place or another, cancels on either side, deaths of the receiver."""
    chance = random.Random(seed)
    pair = HoldingPair(random_models)
    names = (RequestId(f"h{number}") for number in itertools.count())
    held: list[RequestId] = []
    shipping: list[RequestId] = []
    for _ in range(100):
        match chance.choice(ACTS):
            case "hold":
                held.append(next(names))
                request = HoldRequest(
                    request_id=held[-1],
                    prompt_token_ids=PROMPT[: chance.randint(1, len(PROMPT))]
                    if chance.random() < 0.1
                    else PROMPT,
                    sampling=ANSWER,
                    ttl_s=2.0,
                    lease_s=chance.choice((0.0, 0.05, 5.0, 5.0)),
                )
                pair.context.hold(request, pair.now_s)
            case "reserve":
                pair.ask(PROMPT, ANSWER, ttl_s=2.0)
            case "ship" if pair.granted and held:
                request_id = chance.choice(list(pair.granted))
                with contextlib.suppress(NotHeld, InvalidRequest, PeerUnknown, TransferBroke):
                    pair.ship(request_id, held_id=chance.choice(held[-3:]))
                    shipping.append(request_id)
                    del pair.granted[request_id]
            case "cancel hold" if held:
                pair.context.cancel(chance.choice(held))
            case "cancel" if pair.outcomes:
                request_id = chance.choice(list(pair.outcomes))
                pair.generation.cancel(request_id)
                if chance.random() < 0.5:
                    pair.context.cancel(request_id)
            case "die" if chance.random() < 0.1:
                pair.restart("generation", told=True)
                pair.granted.clear()
            case _:
                pair.tick_for(chance.choice((TICK_S, 0.1)))
        pair.context.check()
        pair.generation.check()
    pair.run()
    pair.said.clear()
    pair.hold()
    pair.tick_until_held()
    shipping.append(pair.reserve())
    pair.ship(shipping[-1])
    pair.run()
    whole = [pair.outcomes[name].tokens for name in shipping if pair.outcomes[name].finish == "length"]
    assert pair.outcomes[shipping[-1]].finish == "length"
    assert all(tokens == golden(random_models).tokens for tokens in whole)
