"""Whatever comes through a door is answered: never a server error for a client's nonsense, never a leaked request."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import grpc
import httpx2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.errors import InvalidArgument
from cluster.openai.asked import chat_asked, completion_asked
from cluster.openai.schema import _UNSUPPORTED, ChatBody, CompletionBody, read_body
from tests.cluster.conftest import FakeCluster, StartCluster
from tests.cluster.fake_worker import FakeHost

NAMES = sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, *_UNSUPPORTED, "user", "x"})
PLAIN = st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.just("user") | VALUES, "content": st.just("ab") | VALUES}), max_size=2
)
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4).flatmap(
    lambda body: st.fixed_dictionaries(
        {"prompt": st.just("ab") | VALUES, "max_tokens": st.just(3)}, optional={"messages": MESSAGES}
    ).map(lambda more: {**more, **body})
)


def nonsense(body: dict[str, Any], chat: bool) -> bytes:
    if chat:
        body = {name: value for name, value in body.items() if name != "prompt"}
    return json.dumps(body).encode()


@given(st.binary(max_size=50) | BODIES.map(lambda body: json.dumps(body).encode()), st.booleans())
@settings(deadline=None, suppress_health_check=list(HealthCheck))  # on a busy machine both judge the machine
def test_a_body_is_read_or_refused(data: bytes, chat: bool) -> None:
    with contextlib.suppress(InvalidArgument):
        if chat:
            chat_asked(read_body(data, ChatBody), "id")
        else:
            completion_asked(read_body(data, CompletionBody), "id")


async def test_no_body_makes_the_http_door_fail(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(FakeHost("aggregated"), route="aggregated", http=True)
    bodies: list[tuple[dict[str, Any], bool]] = []

    @given(BODIES, st.booleans())
    @settings(max_examples=80, database=None, suppress_health_check=list(HealthCheck))
    def collect(body: dict[str, Any], chat: bool) -> None:
        bodies.append((body, chat))

    collect()
    statuses: set[int] = set()
    async with httpx2.AsyncClient(base_url=cluster.http, timeout=20.0) as client:
        for body, chat in bodies:
            path = "/v1/chat/completions" if chat else "/v1/completions"
            answer = await client.post(path, content=nonsense(body, chat))
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            statuses.add(answer.status_code)
    assert {200, 400} <= statuses
    await cluster.settle()
    assert cluster.gateway.num_live == 0


async def test_no_bytes_make_the_grpc_door_fail(aggregated: FakeCluster) -> None:
    messages: list[bytes] = []

    @given(st.binary(max_size=60))
    @settings(max_examples=150, database=None, suppress_health_check=list(HealthCheck))
    def collect(data: bytes) -> None:
        messages.append(data)

    collect()
    codes: set[grpc.StatusCode] = set()

    async def answered(call: Any) -> None:
        try:
            if hasattr(call, "read"):
                async for _ in call:
                    pass
            else:
                await call
            codes.add(grpc.StatusCode.OK)
        except grpc.aio.AioRpcError as error:
            codes.add(error.code())

    async with grpc.aio.insecure_channel(aggregated.address) as channel:
        for data in messages:
            for path in ("Inference/Cancel", "Inference/GetModel", "Admin/Drain", "Admin/ListWorkers"):
                await answered(channel.unary_unary(f"/cluster.rpc.v1.{path}")(data, timeout=10))
            await answered(channel.unary_stream("/cluster.rpc.v1.Inference/Generate")(data, timeout=10))
    assert codes <= {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert len(codes) == 3
    assert (await aggregated.client.complete("ab", max_tokens=3))[0] == "aba"
    await aggregated.settle()
    assert aggregated.gateway.num_live == 0
