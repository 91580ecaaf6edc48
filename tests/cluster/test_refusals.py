"""Bad requests: each a clear error that names the field and the limit, and the next request works."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cluster.client import Options
from cluster.errors import RequestError
from cluster.link import LinkTimes, WorkerAddress
from cluster.membership import LinkNews, Membership, NotReady
from cluster.rpc.v1 import inference_pb2, inference_pb2_grpc
from cluster.worker_server import WorkerServer
from tests.cluster.conftest import FakeCluster, StartCluster
from tests.cluster.fake_worker import FakeHost
from workers.errors import InvalidRequest, Overloaded, TransferBroke

BAD: list[tuple[str, Any, Options, str, str, str]] = [
    ("empty text", "", {}, "INVALID_ARGUMENT", "prompt", "1"),
    ("empty token ids", [], {}, "INVALID_ARGUMENT", "prompt", "1"),
    ("prompt too long", "x" * 65, {}, "INVALID_ARGUMENT", "prompt", "63"),
    ("prompt without room for one token", "x" * 64, {}, "INVALID_ARGUMENT", "prompt", "63"),
    (
        "prompt and max_tokens too long",
        "x" * 60,
        {"max_tokens": 5},
        "INVALID_ARGUMENT",
        "sampling.max_tokens",
        "4",
    ),
    ("no tokens", "x", {"max_tokens": 0}, "INVALID_ARGUMENT", "sampling.max_tokens", "1"),
    ("token id too large", [1, 256], {}, "INVALID_ARGUMENT", "prompt.token_ids", "255"),
    ("token id negative", [1, -1], {}, "INVALID_ARGUMENT", "prompt.token_ids", ""),
    ("unknown model", "x", {"model": "gpt-9"}, "NOT_FOUND", "model", "fake"),
    ("temperature negative", "x", {"temperature": -0.5}, "INVALID_ARGUMENT", "sampling.temperature", "0"),
    (
        "temperature not a number",
        "x",
        {"temperature": float("nan")},
        "INVALID_ARGUMENT",
        "sampling.temperature",
        "0",
    ),
    (
        "temperature infinite",
        "x",
        {"temperature": float("inf")},
        "INVALID_ARGUMENT",
        "sampling.temperature",
        "0",
    ),
    ("top_p zero", "x", {"top_p": 0.0}, "INVALID_ARGUMENT", "sampling.top_p", "(0, 1]"),
    ("top_p over one", "x", {"top_p": 1.5}, "INVALID_ARGUMENT", "sampling.top_p", "(0, 1]"),
    ("min_p over one", "x", {"min_p": 1.5}, "INVALID_ARGUMENT", "sampling.min_p", "[0, 1]"),
    (
        "bias too large",
        "x",
        {"logit_bias": ((3, 101.0),)},
        "INVALID_ARGUMENT",
        "sampling.logit_bias",
        "100.0",
    ),
    (
        "bias not a number",
        "x",
        {"logit_bias": ((3, float("nan")),)},
        "INVALID_ARGUMENT",
        "sampling.logit_bias",
        "100.0",
    ),
    *(
        (f"{name} of {value}", "x", {name: value}, "INVALID_ARGUMENT", f"sampling.{name}", limit)
        for name, values, limit in (
            ("frequency_penalty", (2.5, -2.5, float("nan")), "2.0"),
            ("presence_penalty", (2.5, -2.5, float("nan")), "2.0"),
            ("repetition_penalty", (0.0, -1.0, 101.0, float("nan")), "100.0"),
        )
        for value in values
    ),
    (
        "min_tokens over max_tokens",
        "x",
        {"min_tokens": 4, "max_tokens": 3},
        "INVALID_ARGUMENT",
        "sampling.min_tokens",
        "3",
    ),
    (
        "min_tokens where everything ends the answer",
        "x",
        {"min_tokens": 1, "stop_token_ids": tuple(range(256))},
        "INVALID_ARGUMENT",
        "sampling.min_tokens",
        "0",
    ),
    ("min_tokens negative", "x", {"min_tokens": -1}, "INVALID_ARGUMENT", "sampling.min_tokens", ""),
    ("top_k negative", "x", {"top_k": -1}, "INVALID_ARGUMENT", "sampling.top_k", "0"),
    ("logprobs negative", "x", {"logprobs": -1}, "INVALID_ARGUMENT", "sampling.logprobs", "0"),
    ("too many logprobs", "x", {"logprobs": 21}, "INVALID_ARGUMENT", "sampling.logprobs", "20"),
    ("draft_tokens negative", "x", {"draft_tokens": -1}, "INVALID_ARGUMENT", "sampling.draft_tokens", "0"),
    (
        "draft_tokens over the drafter's",
        "x",
        {"draft_tokens": 8},
        "INVALID_ARGUMENT",
        "sampling.draft_tokens",
        "7",
    ),
    ("empty stop string", "x", {"stop": ("",)}, "INVALID_ARGUMENT", "sampling.stop", "1"),
    ("too many stop strings", "x", {"stop": ("s",) * 17}, "INVALID_ARGUMENT", "sampling.stop", "16"),
    ("stop string too long", "x", {"stop": ("s" * 257,)}, "INVALID_ARGUMENT", "sampling.stop", "256"),
    (
        "stop token out of range",
        "x",
        {"stop_token_ids": (256,)},
        "INVALID_ARGUMENT",
        "sampling.stop_token_ids",
        "255",
    ),
]


@pytest.mark.parametrize(
    ("prompt", "options", "code", "field", "limit"), [b[1:] for b in BAD], ids=[b[0] for b in BAD]
)
async def test_a_bad_request_is_refused_with_field_and_limit_and_the_next_works(
    split: FakeCluster, prompt: Any, options: Options, code: str, field: str, limit: str
) -> None:
    with pytest.raises(RequestError) as refused:
        await split.client.complete(prompt, **options)
    error = refused.value
    assert (error.code, error.field, error.limit) == (code, field, limit)
    assert not any(host.seen for host in split.hosts.values()), "a refused request must not reach a worker"
    assert (await split.client.complete("ok", max_tokens=4))[0] == "okok"


async def test_an_unset_prompt_is_an_empty_one(split: FakeCluster) -> None:
    async with grpc.aio.insecure_channel(split.address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.Generate(inference_pb2.GenerateRequest()):
                pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def details(address: str, **asked: Any) -> dict[str, Any]:
    """The google.rpc details of a refused call by their names, as a client in any language finds them."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in stub.Generate(inference_pb2.GenerateRequest(text="ab", **asked)):
                pass
    status = rpc_status.from_call(refused.value)
    assert status is not None
    found: dict[str, Any] = {}
    for packed in status.details:
        kind = packed.type_url.removeprefix("type.googleapis.com/google.rpc.")
        found[kind] = getattr(error_details_pb2, kind)()
        assert packed.Unpack(found[kind])
    return found


async def test_refusals_carry_field_limit_and_a_time_to_retry_as_google_rpc_details(
    split: FakeCluster,
) -> None:
    found = await details(split.address, request_id="mine", sampling=inference_pb2.Sampling(logprobs=21))
    (violation,) = found["BadRequest"].field_violations
    assert (violation.field, "at most 20" in violation.description) == ("sampling.logprobs", True)
    info = found["ErrorInfo"]
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "slipstream")
    assert dict(info.metadata) == {"field": "sampling.logprobs", "limit": "20", "request_id": "mine"}
    assert "RetryInfo" not in found
    split.hosts["generation-1"].refusal = Overloaded("8 requests are waiting", retry_after_s=2.5)
    full = await details(split.address)
    assert full["RetryInfo"].retry_delay.ToMilliseconds() == 2500
    assert full["ErrorInfo"].reason == "CLUSTER_FULL"
    assert "BadRequest" not in full


async def test_the_tighter_of_the_two_workers_limits_counts(start_cluster: StartCluster) -> None:
    peers: Any = {}
    cluster = await start_cluster(FakeHost("context", peers, max_seq_len=32), FakeHost("generation", peers))
    with pytest.raises(RequestError) as refused:
        await cluster.client.complete("x" * 33, max_tokens=1)
    assert (refused.value.field, refused.value.limit) == ("prompt", "31")


async def test_a_full_worker_is_resource_exhausted_with_a_time_to_retry(split: FakeCluster) -> None:
    split.hosts["generation-1"].refusal = Overloaded("8 requests are waiting", retry_after_s=2.5)
    with pytest.raises(RequestError) as refused:
        await split.client.complete("ab")
    assert (refused.value.code, refused.value.retry_after_s) == ("RESOURCE_EXHAUSTED", 2.5)
    assert (await split.client.complete("ok", max_tokens=4))[0] == "okok"


async def test_a_full_gateway_is_resource_exhausted_with_a_time_to_retry(start_cluster: StartCluster) -> None:
    host = FakeHost("aggregated")
    cluster = await start_cluster(host, route="aggregated", max_live_requests=1)
    host.hold.set()
    first = cluster.client.generate("ab", max_tokens=4)
    waiting = asyncio.ensure_future(anext(first))
    while not host.seen:
        await asyncio.sleep(0.005)
    with pytest.raises(RequestError) as refused:
        await cluster.client.complete("cd")
    assert (refused.value.code, refused.value.limit) == ("RESOURCE_EXHAUSTED", "1")
    assert refused.value.retry_after_s is not None
    host.hold.clear()
    assert (await waiting).text + "".join([event.text async for event in first]) == "abab"


async def test_a_workers_own_refusal_names_its_field(split: FakeCluster) -> None:
    split.hosts["generation-1"].refusal = InvalidRequest("no such thing", field="top_k", limit=3)
    with pytest.raises(RequestError) as refused:
        await split.client.complete("ab")
    assert (refused.value.code, refused.value.field, refused.value.limit) == (
        "INVALID_ARGUMENT",
        "sampling.top_k",
        "3",
    )


async def test_a_broken_transfer_frees_the_reservation(split: FakeCluster) -> None:
    split.gateway.settings = replace(split.gateway.settings, max_replays=0)
    split.hosts["context-0"].prefill_refusal = TransferBroke("the KV transfer ended in EXPIRED")
    with pytest.raises(RequestError) as refused:
        await split.client.complete("ab")
    assert (refused.value.code, refused.value.message) == ("UNAVAILABLE", "the KV transfer ended in EXPIRED")
    await split.settle()


async def test_workers_that_do_not_fit_together_are_reported_with_the_reason(
    start_cluster: StartCluster,
) -> None:
    peers: Any = {}
    context = FakeHost("context", peers, refuse_hello="page size 16 here, 32 there")
    servers = [WorkerServer(context), WorkerServer(FakeHost("generation", peers))]
    addresses = [
        WorkerAddress("c", "context", await servers[0].start("127.0.0.1")),
        WorkerAddress("g", "generation", await servers[1].start("127.0.0.1")),
    ]
    membership = Membership(
        addresses,
        "gateway",
        LinkTimes(),
        LinkNews(frame=lambda link, frame: None, lost=lambda link, why: None),
    )
    membership.start()
    try:
        with pytest.raises(NotReady, match="page size 16 here, 32 there"):
            await membership.wait_ready(1.0)
    finally:
        await membership.close()
        for server in servers:
            await server.stop()
