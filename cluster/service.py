"""The public gRPC door in front of a gateway: Inference, Admin, health and reflection.

Life cycle: `start` listens and reports NOT_SERVING until `serving(True)`; `stop` reports NOT_SERVING, refuses new
calls and cuts the open ones after the grace time. Every failure leaves as a status with google.rpc details.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from cluster import keepalive, tracing
from cluster.answers import AnswerChunk, AnswerRequest
from cluster.convert import chunk_to_proto, end_to_proto, request_from_proto, worker_to_proto
from cluster.errors import InvalidArgument, RequestError, WorkerFailed, to_status
from cluster.gateway import Gateway
from cluster.link import WorkerLink
from cluster.rpc.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from cluster.security import TlsFiles, TokenFile, Unauthenticated
from cluster.timeline_messages import timeline_to_proto
from cluster.version import VERSION

_log = logging.getLogger(__name__)

# grpc ships no types: a grpc.aio.ServicerContext.
Context: TypeAlias = Any

# A prompt of a million token ids is 5 MB; gRPC's own limit is 4 MB.
MAX_REQUEST_BYTES: Final = 32 * 1024 * 1024
OWN_METHODS: Final = "/cluster.rpc.v1."
OPEN_METHODS: Final = "/grpc.health.v1.Health/"
# Stands for a request whose bytes are no message.
NO_MESSAGE: Final[Any] = object()
NO_MESSAGE_STATUS: Final = to_status(InvalidArgument("the request is not a message of this method"))
SERVICES: Final = ("cluster.rpc.v1.Inference", "cluster.rpc.v1.Admin")


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Answers. A call that is cancelled or past its deadline closes its iterator, which ends the request."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if request is NO_MESSAGE:
            await context.abort_with_status(NO_MESSAGE_STATUS)
        asked = self._gateway.named(traced(request_from_proto(request), context))
        events = self._gateway.generate(asked, timeout_s=context.time_remaining())
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if isinstance(event, AnswerChunk):
                        yield chunk_to_proto(event, asked.client_id)
                    else:
                        yield end_to_proto(event, asked.client_id)
        except RequestError as error:
            failure = error
        except Exception as error:
            # The boundary of the process: the client gets an answer, the log the traceback.
            _log.exception("a request failed", extra={"request_id": asked.client_id})
            failure = WorkerFailed(f"the gateway failed: {type(error).__name__}: {error}")
        else:
            return
        await context.abort_with_status(to_status(failure))

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        return inference_pb2.CancelResponse(cancelled=self._gateway.cancel(request.request_id))

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        try:
            limits = self._gateway.limits()
        except RequestError as error:
            await context.abort_with_status(to_status(error))
            raise
        return inference_pb2.GetModelResponse(
            model=limits.model,
            vocab_size=limits.vocab_size,
            max_seq_len=limits.max_seq_len,
            max_draft_tokens=limits.max_draft_tokens,
            eos_token_ids=limits.eos_token_ids,
            dtype=limits.dtype,
        )


def traced(request: AnswerRequest, context: Context) -> AnswerRequest:
    """The request with the trace that its caller's metadata name."""
    for key, value in context.invocation_metadata() or ():
        if key == tracing.HEADER and isinstance(value, str):
            return replace(request, traceparent=value)
    return request


class AdminService(admin_pb2_grpc.AdminServicer):
    """What the gateway knows of the cluster, figures taken at the call."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def GetClusterState(
        self, request: admin_pb2.GetClusterStateRequest, context: Context
    ) -> admin_pb2.GetClusterStateResponse:
        gateway = self._gateway
        await gateway.refresh()
        try:
            model = gateway.limits().model
        except RequestError:
            model = ""
        return admin_pb2.GetClusterStateResponse(
            model=model,
            mode=gateway.settings.route,
            version=VERSION,
            uptime_s=time.monotonic() - gateway.started_s,
            live_requests=gateway.num_live,
            max_live_requests=gateway.settings.max_live_requests,
            finished_requests=gateway.figures.finished,
            failed_requests=gateway.figures.failed,
            workers=workers_to_proto(gateway),
        )

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: Context
    ) -> admin_pb2.ListWorkersResponse:
        await self._gateway.refresh()
        return admin_pb2.ListWorkersResponse(workers=workers_to_proto(self._gateway))

    async def GetTimeline(
        self, request: admin_pb2.GetTimelineRequest, context: Context
    ) -> admin_pb2.GetTimelineResponse:
        try:
            return timeline_to_proto(await self._gateway.timeline(request.request_id))
        except RequestError as error:
            await context.abort_with_status(to_status(error))
            raise

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        return admin_pb2.DrainResponse(worker=await self._drain(request.worker, True, context))

    async def Undrain(self, request: admin_pb2.UndrainRequest, context: Context) -> admin_pb2.UndrainResponse:
        return admin_pb2.UndrainResponse(worker=await self._drain(request.worker, False, context))

    async def _drain(self, worker: str, draining: bool, context: Context) -> admin_pb2.Worker:
        try:
            link = await self._gateway.drain(worker, draining)
            return gateway_worker_to_proto(self._gateway, link, self._gateway.peers())
        except RequestError as error:
            await context.abort_with_status(to_status(error))
            raise


def workers_to_proto(gateway: Gateway) -> list[admin_pb2.Worker]:
    peers = gateway.peers()
    return [gateway_worker_to_proto(gateway, link, peers) for link in gateway.links]


def gateway_worker_to_proto(
    gateway: Gateway, link: WorkerLink, peers: Mapping[str, Sequence[str]]
) -> admin_pb2.Worker:
    """What the worker says of itself, and what this gateway has seen of it. `peers`: of all workers, by name."""
    message = worker_to_proto(link)
    positions = gateway.figures.positions.get(link.worker.name)
    if positions is not None:
        message.accepted_by_position.extend(positions.accepted)
        message.drafted_by_position.extend(positions.drafted)
    message.acceptance_length_recent = gateway.acceptance.recent(link.worker.name)
    message.peers.SetInParent()
    message.peers.names.extend(peers.get(link.worker.name, ()))
    return message


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Lets in who carries a token; health is open. Denied calls are answered before their message is even decoded."""

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(OPEN_METHODS):
            return handler
        given = next((value for key, value in details.invocation_metadata if key == "authorization"), "")
        try:
            self._tokens.check(given)
        except Unauthenticated as error:
            return _denial(handler, to_status(error))
        return handler


class Decoding(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Answers bytes that are no message with INVALID_ARGUMENT. By itself gRPC says UNKNOWN and logs a traceback."""

    def __init__(self, methods: str = OWN_METHODS) -> None:
        """`methods`: how the paths begin that it looks after."""
        self._methods = methods

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._methods):
            return handler
        decode = handler.request_deserializer

        def decoded(data: bytes) -> Any:
            try:
                return decode(data)
            except DecodeError:
                return NO_MESSAGE

        return _checking(handler, decoded)


def _checking(handler: Any, decoded: Callable[[bytes], Any]) -> Any:
    """The handler with another decoder. Streams look for NO_MESSAGE themselves: a wrapper would cost every token."""
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(
            handler.unary_stream, decoded, handler.response_serializer
        )

    async def unary(request: Any, context: Context) -> Any:
        if request is NO_MESSAGE:
            await context.abort_with_status(NO_MESSAGE_STATUS)
        return await handler.unary_unary(request, context)

    return grpc.unary_unary_rpc_method_handler(unary, decoded, handler.response_serializer)


def _denial(handler: Any, status: Any) -> Any:
    """A handler of the same kind as the denied one: gRPC breaks on any other."""

    async def unary(request: Any, context: Context) -> None:
        await context.abort_with_status(status)

    async def stream(request: Any, context: Context) -> AsyncIterator[bytes]:
        await context.abort_with_status(status)
        yield b""  # never reached; it makes this a generator

    kinds = {
        (False, False): (grpc.unary_unary_rpc_method_handler, unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, stream),
    }
    make, behaviour = kinds[(bool(handler.request_streaming), bool(handler.response_streaming))]
    return make(behaviour)


def _credentials(tls: TlsFiles) -> Any:
    client_ca = tls.client_ca_file.read_bytes() if tls.client_ca_file is not None else None
    pair = (tls.key_file.read_bytes(), tls.cert_file.read_bytes())
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)


class Door:
    """The server of one gateway."""

    def __init__(
        self, gateway: Gateway, *, tokens: TokenFile | None = None, tls: TlsFiles | None = None
    ) -> None:
        """Raises OSError for a TLS file that cannot be read."""
        self._health = HealthServicer()
        self._credentials = _credentials(tls) if tls is not None else None
        self._server = grpc.aio.server(
            interceptors=[*([Guard(tokens)] if tokens is not None else []), Decoding()],
            options=(
                ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
                ("grpc.so_reuseport", 0),  # a second server on the port must fail, not steal half the calls
                *keepalive.server_options(),
            ),
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(gateway), self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(AdminService(gateway), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (
            *SERVICES,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, self._server)

    async def start(self, listen: str) -> str:
        """Listen on host:port, port 0 for any; returns the address. Raises OSError when it is taken."""
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, self._credentials)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: {error}") from error
        await self.serving(False)
        await self._server.start()
        return f"{listen.rpartition(':')[0]}:{port}"

    async def serving(self, ready: bool) -> None:
        """What the health service says."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in ("", *SERVICES):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        await self.serving(False)
        await self._server.stop(grace_s)
