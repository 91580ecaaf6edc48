"""The next turn of a conversation goes where the last one was decoded."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.answers import AnswerRequest, ChatPrompt, TextPrompt
from cluster.conversations import Conversations, Turn, turn_of
from kvmanager.ids import WorkerEpoch
from tests.cluster.conftest import FakeCluster, Peers, StartCluster
from tests.cluster.fake_worker import FakeHost
from tests.cluster.openai.test_raw_http import fetch

EPOCH = WorkerEpoch("e")
HELLO = ("user", "hello")
ANSWER = ("assistant", "hi")
MORE = ("user", "and now?")


def chat(*messages: tuple[str, str], salt: str = "", conversation_id: str = "") -> AnswerRequest:
    return AnswerRequest(prompt=ChatPrompt(messages), cache_salt=salt, conversation_id=conversation_id)


def test_a_turn_finds_the_turn_before_it() -> None:
    first, second = turn_of(chat(HELLO)), turn_of(chat(HELLO, ANSWER, MORE))
    assert first.before == b""
    assert second.before == first.key
    assert turn_of(chat(HELLO, ANSWER, MORE, ANSWER, MORE)).before == second.key
    tools = turn_of(chat(HELLO, ANSWER, ("tool", "42"), MORE))
    assert tools.before == first.key


@pytest.mark.parametrize(
    "other",
    [
        chat(("system", "be brief"), HELLO, ANSWER, MORE),
        chat(("user", "hell"), ("user", "o"), ANSWER, MORE),
        chat(HELLO, ANSWER, MORE, salt="mine"),
        chat(HELLO, MORE),
    ],
)
def test_another_history_or_tenant_is_another_conversation(other: AnswerRequest) -> None:
    assert turn_of(other).before != turn_of(chat(HELLO)).key


def test_a_conversation_that_is_named_is_known_by_its_name_alone() -> None:
    one, two = turn_of(chat(HELLO, conversation_id="c")), turn_of(chat(MORE, conversation_id="c"))
    assert one.before == one.key == two.before == two.key
    assert turn_of(chat(HELLO, conversation_id="d")) != one
    assert turn_of(replace(chat(HELLO, conversation_id="c"), cache_salt="mine")) != one
    assert turn_of(AnswerRequest(prompt=TextPrompt("hello"))) == Turn()


def test_the_memory_is_bounded_and_keeps_what_was_decoded_last() -> None:
    known = Conversations(max_turns=3)
    turns = [turn_of(chat(HELLO, conversation_id=str(number))) for number in range(5)]
    for turn in (*turns[:3], turns[0], *turns[3:]):
        known.decoded(turn, "g", EPOCH)
    assert len(known) == 3
    assert [known.home(turn) is not None for turn in turns] == [True, False, False, True, True]
    known.decoded(Turn(), "g", EPOCH)
    assert len(known) == 3
    assert known.home(Turn()) is None


@pytest.fixture
async def three(start_cluster: StartCluster) -> FakeCluster:
    peers: Peers = {}
    return await start_cluster(
        FakeHost("context", peers), *(FakeHost("generation", peers) for _ in range(3)), http=True
    )


def seen(cluster: FakeCluster) -> list[int]:
    return [len(host.seen) for host in cluster.hosts.values() if host.role == "generation"]


async def on(cluster: FakeCluster, number: int, *messages: tuple[str, str], **more: str) -> None:
    """Answer a chat by the generation worker of this number: the others are draining meanwhile."""
    others = [f"generation-{other}" for other in (1, 2, 3) if other != number]
    for name in others:
        await cluster.client.drain(name)
    await cluster.client.complete(messages, max_tokens=2, **more)  # type: ignore[arg-type]
    for name in others:
        await cluster.client.undrain(name)


async def test_a_chat_that_goes_on_comes_back_to_its_worker(three: FakeCluster) -> None:
    await on(three, 3, HELLO)
    for _ in range(2):
        await three.client.complete((HELLO, ANSWER, MORE), max_tokens=2)
    assert seen(three) == [0, 0, 3]
    await three.client.complete((HELLO,), max_tokens=2)  # a first turn goes where there is room
    assert seen(three) == [1, 0, 3]


async def test_never_to_a_worker_that_drains_is_lost_or_has_forgotten(three: FakeCluster) -> None:
    await on(three, 3, HELLO)
    await three.client.drain("generation-3")
    await three.client.complete((HELLO, ANSWER, MORE), max_tokens=2)
    assert seen(three) == [1, 0, 1]
    await three.client.undrain("generation-3")
    await three.servers["generation-3"].stop()
    link = next(link for link in three.gateway.links if link.worker.name == "generation-3")
    while link.trusted:
        await asyncio.sleep(0.01)
    await three.client.complete((HELLO, ANSWER, MORE), max_tokens=2)
    assert seen(three)[2] == 1


async def test_a_conversation_is_not_worth_waiting_behind_many_requests(three: FakeCluster) -> None:
    await on(three, 3, HELLO, conversation_id="c")
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
    await on(three, 2, HELLO, conversation_id="c")
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
