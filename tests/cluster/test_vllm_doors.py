"""vLLM's engine protocol through both doors of a cluster of fake workers, with a plain gRPC client, as smg would."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from cluster import keepalive
from cluster.config import ClusterConfig
from cluster.vllm.service import ContextService, DecodingService, EngineDoor
from tests.cluster.conftest import FakeCluster, Peers, StartCluster
from tests.cluster.fake_worker import FakeHost, continuation
from workers.errors import EngineFailed, Overloaded

PREFILL = '{"do_remote_decode":true,"do_remote_prefill":false}'  # what smg sends
PROMPT = b"abc"


@dataclass
class Doors:
    """A client of each door, and the cluster behind them."""

    cluster: FakeCluster
    context: Any
    decoding: Any
    addresses: dict[str, str]

    @property
    def context_host(self) -> FakeHost:
        return self.cluster.hosts["context-0"]

    @property
    def generation_host(self) -> FakeHost:
        return self.cluster.hosts["generation-1"]

    async def prefill(self, request: pb.GenerateRequest) -> pb.GenerateComplete:
        """The prompt's leg, made of the whole request as smg makes it."""
        leg = pb.GenerateRequest()
        leg.CopyFrom(request)
        leg.stream = False
        leg.kv_transfer_params_json = PREFILL
        sampling = leg.sampling_params
        sampling.max_tokens, sampling.min_tokens, sampling.n, sampling.ignore_eos = 1, 0, 1, True
        del sampling.stop[:]
        del sampling.stop_token_ids[:]
        [message] = [message async for message in self.context.Generate(leg)]
        return message.complete

    async def answer(self, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        return [message async for message in self.decoding.Generate(request)]

    async def both(self, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        """Both legs, the hand-off relayed as it is."""
        request.kv_transfer_params_json = (await self.prefill(request)).kv_transfer_params_json
        return await self.answer(request)


async def open_doors(cluster: FakeCluster, lease_s: float = 30.0) -> AsyncIterator[Doors]:
    services = {
        "context": ContextService(cluster.gateway, lease_s),
        "decoding": DecodingService(cluster.gateway),
    }
    doors = {name: EngineDoor(service) for name, service in services.items()}
    addresses = {name: await door.start("127.0.0.1:0") for name, door in doors.items()}
    for door in doors.values():
        await door.serving(True)
    channels = {name: grpc.aio.insecure_channel(address) for name, address in addresses.items()}
    stubs = {name: vllm_engine_pb2_grpc.VllmEngineStub(channel) for name, channel in channels.items()}
    yield Doors(cluster, stubs["context"], stubs["decoding"], addresses)
    for channel in channels.values():
        await channel.close()
    for door in doors.values():
        await door.stop(0.0)


@pytest.fixture
async def doors(split: FakeCluster) -> AsyncIterator[Doors]:
    async for found in open_doors(split):
        yield found


def ask(
    prompt: bytes = PROMPT, *, stream: bool = False, name: str = "r", **sampling: Any
) -> pb.GenerateRequest:
    named = {"temperature": 0.0, "max_tokens": 7, **sampling}
    return pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=list(prompt)),
        sampling_params=pb.SamplingParams(**named),
        stream=stream,
    )


def tokens(messages: list[pb.GenerateResponse]) -> bytes:
    return bytes(messages[-1].complete.output_ids)


async def test_the_prompt_is_held_by_one_leg_and_shipped_by_the_other(doors: Doors) -> None:
    request = ask()
    prefilled = await doors.prefill(request)
    assert (list(prefilled.output_ids), prefilled.finish_reason) == ([PROMPT[0]], "length")
    assert (prefilled.prompt_tokens, prefilled.completion_tokens) == (3, 1)
    assert len(doors.context_host.held) == 1
    request.kv_transfer_params_json = prefilled.kv_transfer_params_json
    [message] = await doors.answer(request)
    complete = message.complete
    assert bytes(complete.output_ids) == b"abcabca"
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 3, 7)
    assert (complete.spec_draft_tokens, complete.spec_accepted_tokens) == (3, 3)
    assert (len(doors.context_host.shipped), doors.context_host.prefilled) == (1, [])
    assert doors.context_host.held == {}


async def test_a_streamed_answer_comes_in_chunks_that_add_up_to_it(doors: Doors) -> None:
    *chunks, end = await doors.both(ask(stream=True, logprobs=1))
    assert bytes(t for message in chunks for t in message.chunk.token_ids) == b"abcabca"
    assert all(message.chunk.completion_tokens == len(message.chunk.token_ids) for message in chunks)
    assert bytes(t for message in chunks for t in message.chunk.output_logprobs.token_ids) == b"abcabca"
    assert bytes(end.complete.output_ids) == b"abcabca"
    assert len(end.complete.output_logprobs.token_logprobs) == 7


async def test_both_legs_draw_from_the_seed_of_the_prompts_leg(start_cluster: StartCluster) -> None:
    """Without a seed of the client's own each leg would draw one."""
    peers: Peers = {}
    cluster = await start_cluster(FakeHost("context", peers), FakeHost("generation", peers, continues=True))
    cluster.gateway._intake._new_seed = iter([5, 6]).__next__
    async for doors in open_doors(cluster):
        answer = tokens(await doors.both(ask(temperature=1.0)))
        assert [host.samplings[0].seed for host in cluster.hosts.values()] == [5, 5]
        assert answer[0] == continuation(PROMPT[-1], len(PROMPT), 5)


@pytest.mark.parametrize("seed", [7, -2, 2**31 - 1])
async def test_a_named_seed_is_kept(doors: Doors, seed: int) -> None:
    await doors.both(ask(seed=seed))
    assert doors.generation_host.samplings[0].seed == seed % 2**64
    assert doors.context_host.samplings[0].seed == seed % 2**64


async def test_what_is_left_out_means_what_it_means_to_vllm(doors: Doors) -> None:
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=list(PROMPT)), stream=True)
    *_, end = await doors.answer(request)
    assert len(end.complete.output_ids) == 64 - len(PROMPT)
    sampling = doors.generation_host.samplings[0]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.0, 1.0, 0, 1)


async def test_without_a_hand_off_the_prompt_is_computed_on_a_context_worker(doors: Doors) -> None:
    assert tokens(await doors.answer(ask())) == b"abcabca"
    assert len(doors.context_host.prefilled) == 1


async def test_a_hand_off_whose_lease_is_over_costs_another_computation_and_no_answer(doors: Doors) -> None:
    request = ask()
    request.kv_transfer_params_json = (await doors.prefill(request)).kv_transfer_params_json
    doors.context_host.held.clear()
    assert tokens(await doors.answer(request)) == b"abcabca"
    assert len(doors.context_host.prefilled) == 1


async def test_a_hand_off_of_a_dead_incarnation_costs_another_computation(doors: Doors) -> None:
    request = ask()
    params = json.loads((await doors.prefill(request)).kv_transfer_params_json)
    params["slipstream"]["epoch"] = "an earlier one"
    request.kv_transfer_params_json = json.dumps(params)
    assert tokens(await doors.answer(request)) == b"abcabca"
    assert (doors.context_host.shipped, len(doors.context_host.prefilled)) == ([], 1)


async def test_several_choices_differ_in_their_index_and_seed(doors: Doors) -> None:
    messages = await doors.answer(ask(n=3, seed=4, stream=True))
    ends = {m.complete.index: m.complete for m in messages if m.HasField("complete")}
    assert {index: bytes(end.output_ids) for index, end in ends.items()} == dict.fromkeys(
        range(3), b"abcabca"
    )
    assert sorted(sampling.seed for sampling in doors.generation_host.samplings) == [4, 5, 6]
    assert {m.chunk.index for m in messages if m.HasField("chunk")} == {0, 1, 2}


async def test_whole_choices_come_in_their_order_however_they_end(doors: Doors) -> None:
    """smg numbers them as they come."""
    doors.generation_host.hold.set()
    leg = asyncio.create_task(doors.answer(ask(n=3, seed=4, name="three")))
    await eventually(lambda: len(doors.generation_host.jobs) == 3)
    last, *_ = doors.generation_host.jobs  # that of the first choice
    doors.generation_host.jobs[last] = doors.generation_host.jobs.pop(last)
    doors.generation_host.hold.clear()
    assert [message.complete.index for message in await leg] == [0, 1, 2]


async def test_stops_are_told_by_what_matched(doors: Doors) -> None:
    by_text = (await doors.both(ask(stop=["ca"])))[-1].complete
    assert (by_text.finish_reason, by_text.matched_stop_str) == ("stop", "ca")
    by_token = (await doors.both(ask(stop_token_ids=[ord("c")])))[-1].complete
    assert (by_token.finish_reason, by_token.matched_token_id) == ("stop", ord("c"))
    assert bytes(by_token.output_ids) == b"abc"
    by_end = (await doors.both(ask(b"ab\0")))[-1].complete
    assert (by_end.finish_reason, by_end.WhichOneof("matched_stop")) == ("stop", None)


async def test_what_adjusts_logits_reaches_both_workers(doors: Doors) -> None:
    adjusting = {
        "min_p": 0.25,
        "logit_bias": {97: 1.5},
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.25,
    }
    assert (await doors.both(ask(**adjusting)))[-1].complete.output_ids
    for host in (doors.context_host, doors.generation_host):
        seen = host.samplings[-1]
        assert {name: getattr(seen, name) for name in adjusting} == adjusting | {"logit_bias": ((97, 1.5),)}
    assert (await doors.both(ask()))[-1].complete.output_ids
    assert doors.generation_host.samplings[-1].repetition_penalty == 1.0


async def test_a_hand_off_whose_first_token_knew_nothing_of_min_tokens_is_refused_by_name(
    doors: Doors,
) -> None:
    """smg leaves it out of the prompt's leg; with nothing that can end an answer it means nothing there."""
    with pytest.raises(grpc.aio.AioRpcError, match="chosen without min_tokens") as refused:
        await doors.both(ask(min_tokens=2))
    assert "sampling_params.min_tokens" in str(refused.value.trailing_metadata())
    assert (await doors.both(ask(min_tokens=2, ignore_eos=True)))[-1].complete.output_ids


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"min_p": 1.1}, "sampling_params.min_p"),
    ({"frequency_penalty": 2.5}, "sampling_params.frequency_penalty"),
    ({"presence_penalty": -3.0}, "sampling_params.presence_penalty"),
    ({"repetition_penalty": -1.0}, "sampling_params.repetition_penalty"),
    ({"min_tokens": 1000}, "sampling_params.min_tokens"),
    ({"prompt_logprobs": 0}, "sampling_params.prompt_logprobs"),
    ({"truncate_prompt_tokens": 5}, "sampling_params.truncate_prompt_tokens"),
    ({"logit_bias": {3: 101.0}}, "sampling_params.logit_bias"),
    ({"json_schema": "{}"}, "sampling_params.json_schema"),
    ({"regex": "a"}, "sampling_params.regex"),
    ({"choice": pb.ChoiceConstraint(choices=["a"])}, "sampling_params.choice"),
    ({"top_p": 1.5}, "sampling_params.top_p"),
    ({"logprobs": -1}, "sampling_params.logprobs"),
    ({"n": 1000}, "sampling_params.n"),
    ({"max_tokens": 0}, "sampling_params.max_tokens"),
]


@pytest.mark.parametrize(("sampling", "field"), UNSUPPORTED, ids=[field for _, field in UNSUPPORTED])
async def test_what_is_not_supported_is_refused_by_name(
    doors: Doors, sampling: dict[str, Any], field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await doors.answer(ask(**sampling))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field.rpartition(".")[2] in refused.value.details()
    assert field in str(refused.value.trailing_metadata())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"mm_inputs": pb.MultimodalInputs()}, "mm_inputs"),
        ({"extra_mm_inputs": [pb.MultimodalInputs()]}, "extra_mm_inputs"),
        ({"media_refs": pb.MediaRefs()}, "media_refs"),
        ({"kv_transfer_params": pb.KvTransferParams(remote_host="h")}, "kv_transfer_params"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"kv_transfer_params_json": "{"}, "kv_transfer_params_json"),
        ({"kv_transfer_params_json": PREFILL}, "kv_transfer_params_json"),
        (
            {"kv_transfer_params_json": '{"do_remote_prefill":true,"remote_port":1}'},
            "kv_transfer_params_json",
        ),
        ({"kv_transfer_params_json": '{"slipstream":{"version":2}}'}, "kv_transfer_params_json"),
        ({"tokenized": pb.TokenizedInput()}, "tokenized.input_ids"),
        ({"tokenized": pb.TokenizedInput(input_ids=[999])}, "tokenized.input_ids"),
    ],
)
async def test_other_inputs_and_foreign_hand_offs_are_refused_by_name(
    doors: Doors, change: dict[str, Any], field: str
) -> None:
    request = ask()
    if "tokenized" in change:
        request.ClearField("tokenized")
    request.MergeFrom(pb.GenerateRequest(**change))
    if field == "mm_inputs":
        request.mm_inputs.SetInParent()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await doors.answer(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in str(refused.value.trailing_metadata())


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"seed": 9}, {"top_k": 3}, {"logprobs": 2}])
async def test_a_hand_off_is_good_for_its_own_request_alone(doors: Doors, sampling: dict[str, Any]) -> None:
    handed = (await doors.prefill(ask())).kv_transfer_params_json
    for other in (ask(**sampling), ask(b"abd")):
        other.kv_transfer_params_json = handed
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await doors.answer(other)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    request = ask()
    request.kv_transfer_params_json = handed
    assert tokens(await doors.answer(request)) == b"abcabca"


@pytest.mark.parametrize(("sampling", "field"), [({"max_tokens": 2}, "max_tokens"), ({"n": 2}, "n")])
async def test_context_workers_compute_one_token(doors: Doors, sampling: dict[str, Any], field: str) -> None:
    request = ask(**{"max_tokens": 1, **sampling})
    request.kv_transfer_params_json = PREFILL
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [message async for message in doors.context.Generate(request)]
    assert f"sampling_params.{field}" in str(refused.value.trailing_metadata())


async def test_a_prompt_that_is_to_be_decoded_nowhere_is_not_held(doors: Doors) -> None:
    """smg does this for n > 1."""
    [message] = [message async for message in doors.context.Generate(ask(max_tokens=1))]
    assert message.complete.output_ids == [PROMPT[0]]
    assert not message.complete.HasField("kv_transfer_params_json")
    assert doors.context_host.held == {}


async def test_a_full_pool_says_so_and_when_to_come_again(doors: Doors) -> None:
    doors.context_host.refusal = Overloaded("32 prompts are waiting already")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await doors.prefill(ask())
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "RetryInfo" in str(refused.value.trailing_metadata())


async def test_a_prompt_that_context_workers_fail_is_tried_again(start_cluster: StartCluster) -> None:
    peers: Peers = {}
    contexts = [FakeHost("context", peers), FakeHost("context", peers)]
    cluster = await start_cluster(*contexts, FakeHost("generation", peers))
    async for doors in open_doors(cluster):
        for host in contexts:
            host.refusal = EngineFailed("broken")  # of one call
        assert tokens(await doors.both(ask())) == b"abcabca"
        assert [host.refusal for host in contexts] == [None, None]


async def test_a_context_worker_that_is_lost_with_a_prompt_does_not_keep_it_waiting(
    start_cluster: StartCluster,
) -> None:
    peers: Peers = {}
    contexts = [FakeHost("context", peers), FakeHost("context", peers)]
    cluster = await start_cluster(*contexts, FakeHost("generation", peers))
    async for doors in open_doors(cluster):
        for host in contexts:
            host.hold.set()
        leg = asyncio.create_task(doors.both(ask()))
        await eventually(lambda: any(host.seen for host in contexts))
        [holder] = [index for index, host in enumerate(contexts) if host.seen]
        contexts[1 - holder].hold.clear()
        await cluster.servers[f"context-{holder}"].stop()
        assert tokens(await leg) == b"abcabca"


async def eventually(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_abort_ends_a_prompt_that_is_computed(doors: Doors) -> None:
    doors.context_host.hold.set()
    leg = asyncio.create_task(doors.prefill(ask(name="gone")))
    await eventually(lambda: doors.context_host.seen)
    await doors.context.Abort(pb.AbortRequest(request_ids=["gone", "unknown"]))
    assert (await leg).finish_reason == "abort"
    await eventually(lambda: doors.context_host.cancelled == doors.context_host.seen)
    assert doors.context_host.held == {}


async def test_abort_gives_up_a_prompt_that_is_held(doors: Doors) -> None:
    await doors.prefill(ask(name="gone"))
    await doors.context.Abort(pb.AbortRequest(request_ids=["gone"]))
    await eventually(lambda: not doors.context_host.held)


async def test_abort_ends_an_answer(doors: Doors) -> None:
    doors.generation_host.hold.set()
    request = ask(name="gone")
    request.kv_transfer_params_json = (await doors.prefill(request)).kv_transfer_params_json
    leg = asyncio.create_task(doors.answer(request))
    await eventually(lambda: doors.generation_host.seen)
    await doors.decoding.Abort(pb.AbortRequest(request_ids=["gone"]))
    [message] = await leg
    assert message.complete.finish_reason == "abort"
    await doors.cluster.settle()
    assert doors.context_host.held == {}


async def test_a_client_that_leaves_a_prompts_leg_leaves_nothing(doors: Doors) -> None:
    doors.context_host.hold.set()
    leg = asyncio.create_task(doors.prefill(ask()))
    await eventually(lambda: doors.context_host.seen)
    leg.cancel()
    await eventually(lambda: doors.context_host.cancelled)
    assert doors.context_host.held == {}
    assert doors.cluster.gateway.num_live == 0


async def test_a_client_that_leaves_an_answer_leaves_nothing(doors: Doors) -> None:
    doors.generation_host.hold.set()
    leg = asyncio.create_task(doors.both(ask()))
    await eventually(lambda: doors.context_host.shipped)
    leg.cancel()
    await eventually(lambda: not doors.cluster.gateway.num_live)
    await doors.cluster.settle()


async def test_a_decoding_that_is_refused_gives_the_held_prompt_up(doors: Doors) -> None:
    request = ask(max_tokens=500)
    request.kv_transfer_params_json = (await doors.prefill(request)).kv_transfer_params_json
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await doors.answer(request)
    assert "sampling_params.max_tokens" in str(refused.value.trailing_metadata())
    await eventually(lambda: not doors.context_host.held)


async def test_the_doors_describe_their_pools(doors: Doors) -> None:
    for stub, role in ((doors.context, "kv_producer"), (doors.decoding, "kv_consumer")):
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.kv_connector, server.kv_role) == ("NixlConnector", role)
        assert (server.data_parallel_size, server.max_num_seqs) == (1, 8)
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.vocab_size, model.max_context_length) == ("fake", 256, 64)
        assert (list(model.eos_token_ids), model.is_generation) == ([0], True)
        loads = await stub.GetLoads(pb.GetLoadsRequest())
        assert loads.loads[0].max_total_num_tokens == 1600
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_the_tokenizer_comes_as_a_zip_with_its_checksum(doors: Doors) -> None:
    chunks = [chunk async for chunk in doors.context.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == b"{}"


async def test_health_is_the_standard_service_too_and_a_lost_pool_is_unhealthy(doors: Doors) -> None:
    async with grpc.aio.insecure_channel(doors.addresses["context"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "vllm.grpc.engine.VllmEngine"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    await doors.cluster.servers["generation-1"].stop()
    while (await doors.context.HealthCheck(pb.HealthCheckRequest())).healthy:
        await asyncio.sleep(0.01)
    message = (await doors.decoding.HealthCheck(pb.HealthCheckRequest())).message
    assert "generation" in message


async def test_an_idle_gateway_that_asks_for_signs_of_life_is_not_sent_away(
    split: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """smg does, every 30 s; by itself gRPC ends such a connection at the third one within five minutes."""
    monkeypatch.setattr(keepalive, "PING_S", 0.3)
    async for doors in open_doors(split):
        options = keepalive.client_options()
        async with grpc.aio.insecure_channel(doors.addresses["decoding"], options=options) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest())
            await asyncio.sleep(4.5)  # gRPC pings once a second at most, and the third may be one too many
            assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_what_has_no_meaning_here_is_unimplemented_and_no_message_is_invalid(doors: Doors) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await doors.decoding.Embed(pb.EmbedRequest())
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with grpc.aio.insecure_channel(doors.addresses["decoding"]) as channel:
        for method in ("Generate", "GetTokenizer"):
            call = channel.unary_stream(f"/vllm.grpc.engine.VllmEngine/{method}")(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_aggregated_cluster_answers_at_the_decoding_door(aggregated: FakeCluster) -> None:
    async for doors in open_doors(aggregated):
        assert tokens(await doors.answer(ask())) == b"abcabca"
        server = await doors.decoding.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.kv_connector, server.kv_role, server.max_num_seqs) == ("", "", 8)


def test_a_door_to_context_workers_needs_some() -> None:
    with pytest.raises(ValueError, match="vllm_context"):
        ClusterConfig(mode="aggregated", vllm_context="127.0.0.1:0")


SMALL = st.integers(0, 5) | st.integers(-(2**31), 2**31 - 1)
NUMBERS = st.sampled_from([0.0, 0.5, 1.0, 2.0]) | st.floats(width=32)
PARAMS = st.sampled_from(["", "{}", PREFILL, '{"do_remote_prefill":true}', '{"slipstream":{}}', "[1", "null"])


def unsigned(values: st.SearchStrategy[int]) -> st.SearchStrategy[int]:
    return values.map(abs).map(lambda value: min(value, 2**31 - 1))


SAMPLING = st.fixed_dictionaries(
    {"max_tokens": st.sampled_from([1, 3, 3])},
    optional={
        **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"), NUMBERS),
        **dict.fromkeys(("seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens"), SMALL),
        **{name: unsigned(SMALL) for name in ("top_k", "min_tokens", "n")},
        "stop": st.lists(st.sampled_from(["", "a", "bc", "x" * 300]), max_size=3),
        "stop_token_ids": st.lists(st.sampled_from([0, 97, 255, 256, 2**31]), max_size=3),
        "ignore_eos": st.booleans(),
        "logit_bias": st.dictionaries(SMALL, NUMBERS, max_size=2),
    },
)
REQUESTS = st.builds(
    lambda ids, text, sampling, stream, params: pb.GenerateRequest(
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
        **({"tokenized": pb.TokenizedInput(input_ids=ids)} if text is None else {"text": text}),
        **({} if params is None else {"kv_transfer_params_json": params}),
    ),
    st.lists(st.sampled_from([97, 98, 0, 255, 256, 2**32 - 1]), max_size=70),
    st.none() | st.text(max_size=5),
    SAMPLING,
    st.booleans(),
    st.none() | PARAMS,
)


async def test_no_message_makes_a_door_fail_or_leaves_anything(doors: Doors) -> None:
    requests: list[pb.GenerateRequest] = []

    @given(REQUESTS)
    @settings(max_examples=120, database=None, suppress_health_check=list(HealthCheck), deadline=None)
    def collect(request: pb.GenerateRequest) -> None:
        requests.append(request)

    await asyncio.to_thread(collect)
    codes = set()
    for request in requests:
        for stub in (doors.context, doors.decoding):
            try:
                messages = [message async for message in stub.Generate(request)]
                codes.add(grpc.StatusCode.OK)
                assert messages[-1].HasField("complete")
            except grpc.aio.AioRpcError as error:
                codes.add(error.code())
    assert codes == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    await doors.cluster.settle()
    assert doors.cluster.gateway.num_live == 0
