"""The typed Python client, for asyncio and for plain code.

    with Client("127.0.0.1:50051") as client:
        for event in client.generate("The sky is", max_tokens=20):
            ...                       # AnswerChunk, AnswerChunk, ..., AnswerEnd

A failed call raises RequestError with the status code, the field and the limit that the server named. Closing the
iterator before its end cancels the request on every worker.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import grpc
import grpc.aio

from cluster import keepalive
from cluster.access import PLAIN, Access
from cluster.answers import (
    AnswerEnd,
    AnswerEvent,
    AnswerRequest,
    ChatPrompt,
    ModelLimits,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from cluster.convert import chunk_from_proto, end_from_proto, request_to_proto
from cluster.errors import InvalidArgument, from_call, request_field
from cluster.rpc.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

PromptLike = str | Sequence[int] | Sequence[tuple[str, str]] | Prompt


# A prompt of a million token ids is 5 MB; gRPC's own limit is 4 MB.
_OPTIONS = (
    ("grpc.max_receive_message_length", 32 * 1024 * 1024),
    ("grpc.max_send_message_length", 32 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),
)


class Options(TypedDict, total=False):
    """Everything of a request but its prompt; see `cluster.answers.AnswerRequest`."""

    client_id: str
    model: str
    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    logit_bias: tuple[tuple[int, float], ...]
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int | None
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    ignore_eos: bool
    logprobs: int | None
    draft_tokens: int | None
    cache_salt: str
    conversation_id: str


class Client:
    """Blocking calls. Safe to use from several threads."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        access = access or PLAIN
        self.address = address
        self._metadata = access.metadata
        self._channel = _channel(grpc, address, access)
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin: Any = admin_pb2_grpc.AdminStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def generate(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> Iterator[AnswerEvent]:
        """Chunks, then one AnswerEnd. `prompt`: a text, token ids, or (role, content) messages."""
        message = _message(prompt, options)
        call = self._inference.Generate(message, timeout=timeout_s, metadata=self._metadata)
        try:
            for response in call:
                yield _event(response)
        except grpc.RpcError as error:
            raise from_call(error) from None
        finally:
            call.cancel()

    def complete(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> tuple[str, AnswerEnd]:
        """The whole text and how it ended."""
        return _collect(list(self.generate(prompt, timeout_s=timeout_s, **options)))

    def cancel(self, client_id: str) -> int:
        """End the live requests of this id; returns how many there were."""
        request = inference_pb2.CancelRequest(request_id=client_id)
        return int(self._ask(self._inference.Cancel, request, 10.0).cancelled)

    def model(self, timeout_s: float = 10.0) -> ModelLimits:
        return _limits(self._ask(self._inference.GetModel, inference_pb2.GetModelRequest(), timeout_s))

    def cluster_state(self, timeout_s: float = 10.0) -> admin_pb2.GetClusterStateResponse:
        state: admin_pb2.GetClusterStateResponse = self._ask(
            self._admin.GetClusterState, admin_pb2.GetClusterStateRequest(), timeout_s
        )
        return state

    def timeline(self, request_id: str = "", timeout_s: float = 10.0) -> admin_pb2.GetTimelineResponse:
        """What was done when for a request of late; the latest without an id. Raises RequestError when unknown."""
        request = admin_pb2.GetTimelineRequest(request_id=request_id)
        told: admin_pb2.GetTimelineResponse = self._ask(self._admin.GetTimeline, request, timeout_s)
        return told

    def drain(self, worker: str, timeout_s: float = 10.0) -> admin_pb2.Worker:
        """Send this worker no new requests; the running ones finish. Raises RequestError for an unknown worker."""
        request = admin_pb2.DrainRequest(worker=worker)
        drained: admin_pb2.Worker = self._ask(self._admin.Drain, request, timeout_s).worker
        return drained

    def undrain(self, worker: str, timeout_s: float = 10.0) -> admin_pb2.Worker:
        """Send it requests again."""
        request = admin_pb2.UndrainRequest(worker=worker)
        taken: admin_pb2.Worker = self._ask(self._admin.Undrain, request, timeout_s).worker
        return taken

    def _ask(self, call: Any, message: object, timeout_s: float) -> Any:
        try:
            return call(message, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_call(error) from None


class AsyncClient:
    """The same on an event loop."""

    def __init__(self, address: str, access: Access | None = None) -> None:
        access = access or PLAIN
        self.address = address
        self._metadata = access.metadata
        self._channel = _channel(grpc.aio, address, access)
        self._inference: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin: Any = admin_pb2_grpc.AdminStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def generate(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncIterator[AnswerEvent]:
        """Chunks, then one AnswerEnd. `prompt`: a text, token ids, or (role, content) messages."""
        message = _message(prompt, options)
        call = self._inference.Generate(message, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield _event(response)
        except grpc.aio.AioRpcError as error:
            raise from_call(error) from None
        finally:
            call.cancel()

    async def complete(
        self, prompt: PromptLike, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> tuple[str, AnswerEnd]:
        """The whole text and how it ended."""
        return _collect([event async for event in self.generate(prompt, timeout_s=timeout_s, **options)])

    async def cancel(self, client_id: str) -> int:
        """End the live requests of this id; returns how many there were."""
        request = inference_pb2.CancelRequest(request_id=client_id)
        return int((await self._ask(self._inference.Cancel, request, 10.0)).cancelled)

    async def model(self, timeout_s: float = 10.0) -> ModelLimits:
        return _limits(await self._ask(self._inference.GetModel, inference_pb2.GetModelRequest(), timeout_s))

    async def cluster_state(self, timeout_s: float = 10.0) -> admin_pb2.GetClusterStateResponse:
        state: admin_pb2.GetClusterStateResponse = await self._ask(
            self._admin.GetClusterState, admin_pb2.GetClusterStateRequest(), timeout_s
        )
        return state

    async def timeline(self, request_id: str = "", timeout_s: float = 10.0) -> admin_pb2.GetTimelineResponse:
        """What was done when for a request of late; the latest without an id. Raises RequestError when unknown."""
        request = admin_pb2.GetTimelineRequest(request_id=request_id)
        told: admin_pb2.GetTimelineResponse = await self._ask(self._admin.GetTimeline, request, timeout_s)
        return told

    async def drain(self, worker: str, timeout_s: float = 10.0) -> admin_pb2.Worker:
        """Send this worker no new requests; the running ones finish. Raises RequestError for an unknown worker."""
        request = admin_pb2.DrainRequest(worker=worker)
        drained: admin_pb2.Worker = (await self._ask(self._admin.Drain, request, timeout_s)).worker
        return drained

    async def undrain(self, worker: str, timeout_s: float = 10.0) -> admin_pb2.Worker:
        """Send it requests again."""
        request = admin_pb2.UndrainRequest(worker=worker)
        taken: admin_pb2.Worker = (await self._ask(self._admin.Undrain, request, timeout_s)).worker
        return taken

    async def _ask(self, call: Any, message: object, timeout_s: float) -> Any:
        try:
            return await call(message, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_call(error) from None


def new_request_id() -> str:
    """An id for `Cancel` that no other client chose."""
    return uuid.uuid4().hex


def as_prompt(prompt: PromptLike) -> Prompt:
    """A text is completed as it is; token ids and messages are told apart by their first element."""
    match prompt:
        case str():
            return TextPrompt(prompt)
        case TextPrompt() | TokenPrompt() | ChatPrompt():
            return prompt
        case _:
            token_ids = tuple(item for item in prompt if isinstance(item, int))
            messages = tuple(item for item in prompt if isinstance(item, tuple))
            return ChatPrompt(messages) if messages else TokenPrompt(token_ids)


def _channel(kind: Any, address: str, access: Access) -> Any:
    """A channel of `grpc` or `grpc.aio`. Raises OSError for a TLS file that cannot be read."""
    options = (*_OPTIONS, *keepalive.client_options())
    if access.ca_file is None:
        return kind.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(
        access.ca_file.read_bytes(),
        access.key_file.read_bytes() if access.key_file is not None else None,
        access.cert_file.read_bytes() if access.cert_file is not None else None,
    )
    return kind.secure_channel(address, credentials, options=options)


def _message(prompt: PromptLike, options: Options) -> inference_pb2.GenerateRequest:
    request = AnswerRequest(prompt=as_prompt(prompt), **options)
    try:
        return request_to_proto(request)
    except (ValueError, OverflowError) as error:
        # A number that its protobuf field cannot hold, such as a negative token id, never leaves this process.
        raise InvalidArgument(
            f"the request cannot be sent: {error}", field=request_field(_unfit_field(request))
        ) from error


def _unfit_field(request: AnswerRequest) -> str:
    if isinstance(request.prompt, TokenPrompt) and not all(0 <= i < 2**32 for i in request.prompt.token_ids):
        return "prompt.token_ids"
    for field in ("max_tokens", "min_tokens", "seed"):
        value = getattr(request, field)
        if value is not None and value < 0:
            return field
    return ""


def _event(response: inference_pb2.GenerateResponse) -> AnswerEvent:
    return end_from_proto(response) if response.HasField("finish") else chunk_from_proto(response)


def _collect(events: list[AnswerEvent]) -> tuple[str, AnswerEnd]:
    end = events[-1]
    if not isinstance(end, AnswerEnd):
        raise AssertionError("the server ended a stream without its last message")
    return "".join(event.text for event in events), end


def _limits(message: inference_pb2.GetModelResponse) -> ModelLimits:
    return ModelLimits(
        model=message.model,
        vocab_size=message.vocab_size,
        max_seq_len=message.max_seq_len,
        max_draft_tokens=message.max_draft_tokens,
        eos_token_ids=tuple(message.eos_token_ids),
        dtype=message.dtype,
    )
