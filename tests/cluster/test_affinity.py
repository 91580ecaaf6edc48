"""Requests go where the KV of what they begin with is, as far as a gateway knows."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.affinity import LINK_TOKENS, MAX_LINKS, Affinity, beginning_of
from kvmanager.ids import WorkerEpoch
from tests.cluster.conftest import FakeCluster, Peers, StartCluster
from tests.cluster.fake_worker import FakeHost
from tests.cluster.openai.test_raw_http import fetch

EPOCH, NEXT = WorkerEpoch("e"), WorkerEpoch("f")
EPOCHS = {"a": EPOCH, "b": EPOCH}
POOL = 100 * LINK_TOKENS

tokens = st.lists(st.integers(0, 3), max_size=5 * LINK_TOKENS)


@given(common=tokens, one=tokens, other=tokens)
def test_prompts_share_the_links_of_the_tokens_they_begin_with(
    common: list[int], one: list[int], other: list[int]
) -> None:
    first, second = [*common, 7, *one], [*common, 8, *other]
    shared = len(common) // LINK_TOKENS
    links, others = beginning_of(first, "").links, beginning_of(second, "").links
    assert links[:shared] == others[:shared]
    assert not set(links[shared:]) & set(others)
    assert len(links) == len(first) // LINK_TOKENS
    assert not set(links) & set(beginning_of(first, "salt").links)
    assert (beginning_of(first, "").home == beginning_of(second, "").home) == (shared > 0)


def test_a_conversation_that_is_named_is_at_home_by_its_name() -> None:
    one, two = beginning_of([1], "", "c"), beginning_of([2], "", "c")
    assert one.home == two.home == one.conversation
    assert len({beginning_of([1], salt, name).home for salt in ("", "s") for name in ("", "c", "d")}) == 6


def test_the_longest_prompt_has_a_bounded_beginning() -> None:
    assert len(beginning_of([1] * (2 * MAX_LINKS * LINK_TOKENS), "").links) == MAX_LINKS


def test_a_worker_knows_what_it_computed_until_its_pool_wants_the_room() -> None:
    affinity = Affinity()
    prompts = [beginning_of([number] * 3 * LINK_TOKENS, "") for number in range(4)]

    def known(prompt: int) -> dict[str, int]:
        return dict(affinity.errand(prompts[prompt], EPOCHS).known_tokens)

    for prompt in prompts[:3]:
        affinity.computed("a", EPOCH, prompt, 9 * LINK_TOKENS)
    affinity.computed("a", EPOCH, prompts[0], 9 * LINK_TOKENS)
    affinity.computed("a", EPOCH, prompts[3], 8 * LINK_TOKENS)
    assert known(0) == known(3) == {"a": 3 * LINK_TOKENS}
    assert known(1) == {}
    assert known(2) == {"a": 2 * LINK_TOKENS}  # its deepest link went first
    longer = beginning_of([0] * 5 * LINK_TOKENS, "")
    assert affinity.errand(longer, EPOCHS).known_tokens == {"a": 3 * LINK_TOKENS}


def test_another_incarnation_knows_nothing_and_who_left_is_forgotten() -> None:
    affinity = Affinity()
    prompt = beginning_of([1] * LINK_TOKENS, "", "c")
    for name in EPOCHS:
        affinity.computed(name, EPOCH, prompt, POOL)
    affinity.decoded("a", EPOCH, prompt)
    errand = affinity.errand(prompt, {"a": NEXT, "b": EPOCH})
    assert (errand.known_tokens, errand.home) == ({"b": LINK_TOKENS}, "")
    affinity.computed("a", NEXT, beginning_of([2] * LINK_TOKENS, ""), POOL)
    affinity.retain({"a": None})
    assert affinity.errand(prompt, EPOCHS).known_tokens == {}
    assert affinity.errand(prompt, EPOCHS).home == "a"


def test_conversations_are_bounded_and_those_that_went_on_last_are_kept() -> None:
    affinity = Affinity(max_conversations=3)
    turns = [beginning_of([], "", str(number)) for number in range(5)]
    for turn in (*turns[:3], turns[0], *turns[3:]):
        affinity.decoded("a", EPOCH, turn)
    assert [affinity.errand(turn, EPOCHS).home for turn in turns] == ["a", "", "", "a", "a"]
    affinity.decoded("b", EPOCH, beginning_of([], ""))
    assert affinity.errand(beginning_of([], ""), EPOCHS).home == ""


@pytest.fixture
async def three(start_cluster: StartCluster) -> FakeCluster:
    peers: Peers = {}
    return await start_cluster(
        FakeHost("context", peers, max_seq_len=256),
        *(FakeHost("generation", peers, max_seq_len=256) for _ in range(3)),
        http=True,
    )


def seen(cluster: FakeCluster) -> list[int]:
    return [len(host.seen) for host in cluster.hosts.values() if host.role == "generation"]


QUESTION = "x" * LINK_TOKENS


async def on(cluster: FakeCluster, number: int, prompt: str, **more: str) -> None:
    """Have a prompt answered by the generation worker of this number: the others are draining meanwhile."""
    others = [f"generation-{other}" for other in (1, 2, 3) if other != number]
    for name in others:
        await cluster.client.drain(name)
    await cluster.client.complete(prompt, max_tokens=2, **more)  # type: ignore[arg-type]
    for name in others:
        await cluster.client.undrain(name)


async def test_the_next_turn_goes_where_the_last_one_was_decoded(three: FakeCluster) -> None:
    await on(three, 3, QUESTION)
    for _ in range(2):
        await three.client.complete(QUESTION + "xx and now?", max_tokens=2)
    assert seen(three) == [0, 0, 3]
    await three.client.complete("something else", max_tokens=2)
    assert seen(three) == [1, 0, 3]


async def test_never_to_a_worker_that_drains_or_is_lost(three: FakeCluster) -> None:
    await on(three, 3, QUESTION, conversation_id="c")
    await three.client.drain("generation-3")
    await three.client.complete(QUESTION, max_tokens=2)
    assert seen(three) == [1, 0, 1]
    await three.client.undrain("generation-3")
    await three.servers["generation-3"].stop()
    link = next(link for link in three.gateway.links if link.worker.name == "generation-3")
    while link.trusted:
        await asyncio.sleep(0.01)
    await three.client.complete(QUESTION, max_tokens=2, conversation_id="c")
    assert seen(three)[2] == 1


async def test_a_conversation_is_not_worth_waiting_behind_many_requests(three: FakeCluster) -> None:
    await on(three, 3, "hello", conversation_id="c")
    for host in three.hosts.values():
        host.hold.set()
    running = []
    for expected in ([0, 0, 2], [0, 0, 3], [0, 0, 4], [1, 0, 4]):
        running.append(asyncio.create_task(three.client.complete("ab", max_tokens=2, conversation_id="c")))
        while seen(three) != expected:
            await asyncio.sleep(0.005)
    for host in three.hosts.values():
        host.hold.clear()
    await asyncio.gather(*running)


@pytest.mark.parametrize("habit", ["x-session-id", "prompt_cache_key"])
async def test_the_openai_door_takes_the_names_that_others_take(three: FakeCluster, habit: str) -> None:
    await on(three, 2, "hello", conversation_id="c")
    body: dict[str, object] = {"model": "fake", "prompt": "anything", "max_tokens": 2}
    headers = {}
    if habit == "x-session-id":
        headers[habit] = "c"
    else:
        body[habit] = "c"
    for _ in range(2):
        answer = await fetch(three, "/v1/completions", body, headers)
        assert answer.status == 200, answer.body
    assert seen(three) == [0, 3, 0]
