"""`vllm.grpc.engine.VllmEngine` in front of a gateway: one door for the context workers, one for those that decode.

    other gateway ── Generate, 1 token ──▶ context workers' door ── hold ──▶ a context worker computes and keeps the KV
                 ◀─ a ticket for it ──────┘
                  ── Generate, ticket ───▶ the other door ── reserve at G ── ship from C to G ──▶ G decodes
                 ◀─ token ids ────────────┘

To the other gateway each door is one worker; which worker of the pool serves a request is chosen here. Nothing is lost
when it drops a request between the two calls: what is held ends with its lease, or at once when `Abort` names it. A
request that comes to the second door without a ticket has its prompt computed on a context worker all the same.

Both doors are for a gateway on a network that no client reaches: they know neither tokens nor TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from cluster import keepalive
from cluster.answers import AnswerChunk, HeldPrompt, PromptReady
from cluster.choices import merged
from cluster.errors import InvalidArgument, RequestError, WorkerFailed, to_status
from cluster.gateway import Gateway
from cluster.link import WorkerLink
from cluster.service import MAX_REQUEST_BYTES, NO_MESSAGE, NO_MESSAGE_STATUS, Decoding, traced
from cluster.version import VERSION
from cluster.vllm import ticket
from cluster.vllm.asked import prompt_of_one_token, renamed, requests_of
from cluster.vllm.said import Answer, aborted_message, prompt_message
from cluster.vllm.tokenizer import tokenizer_chunks
from workers.request import Role

_log = logging.getLogger(__name__)

# grpc ships no types: a grpc.aio.ServicerContext.
Context: TypeAlias = Any

SERVICE: Final = "vllm.grpc.engine.VllmEngine"
KV_CONNECTOR: Final = "NixlConnector"
"""By this name smg knows that the prompt's leg returns what the other leg needs; it is our transport's name too."""
PAIRING_PROTOCOL: Final = "slipstream-1"
"""Workers that say different ones are never paired: our tickets are for our own doors."""


class EngineService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # generated without types
    """What both doors answer alike. Embeddings, KV events, profiles and cache flushes stay UNIMPLEMENTED."""

    roles: tuple[Role, ...]
    kv_role = ""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def HealthCheck(self, request: Any, context: Context) -> Any:
        troubles = self._gateway.troubles()
        return vllm_engine_pb2.HealthCheckResponse(healthy=not troubles, message="; ".join(troubles) or "ok")

    async def GetModelInfo(self, request: Any, context: Context) -> Any:
        try:
            limits = self._gateway.limits()
        except RequestError as error:
            await context.abort_with_status(to_status(error))
            raise
        tokenizer = self._gateway.tokenizer
        return vllm_engine_pb2.GetModelInfoResponse(
            # A path that no hub takes for one of its names: who cannot read it here asks GetTokenizer.
            model_path=str(tokenizer.path),
            tokenizer_path=str(tokenizer.path),
            served_model_name=limits.model,
            is_generation=True,
            max_context_length=limits.max_seq_len,
            max_req_input_len=limits.max_seq_len - 1,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
        )

    async def GetServerInfo(self, request: Any, context: Context) -> Any:
        gateway = self._gateway
        facts = [link.facts for link in self._links() if link.facts is not None]
        epochs = sorted(fact.epoch for fact in facts)
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=gateway.num_live,
            uptime_seconds=time.monotonic() - gateway.started_s,
            server_type="slipstream",
            kv_connector=KV_CONNECTOR if self.kv_role else "",
            kv_role=self.kv_role,
            kv_engine_id=",".join(epochs) if self.kv_role else "",
            data_parallel_size=1,
            kv_cache_dtype="auto",
            model_dtype=facts[0].dtype if facts else "",
            pairing_protocol=PAIRING_PROTOCOL,
            max_num_seqs=sum(fact.max_batch for fact in facts),
        )

    async def GetLoads(self, request: Any, context: Context) -> Any:
        """The whole pool as one rank, at the last heartbeats."""
        links = self._links()
        facts = [link.facts for link in links if link.facts is not None]
        stats = [link.stats for link in links if link.stats is not None]
        page_size = facts[0].page_size if facts else 0
        pages, in_use = sum(s.target_pages for s in stats), sum(s.target_pages_in_use for s in stats)
        computed = sum(s.prompt_tokens_computed for s in stats)
        cached = sum(s.cached_prompt_tokens for s in stats)
        running, waiting = sum(s.running for s in stats), sum(s.waiting for s in stats)
        slots = sum(fact.max_batch for fact in facts)
        load = vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=in_use * page_size,
            max_total_num_tokens=pages * page_size,
            token_usage=in_use / pages if pages else 0.0,
            cache_hit_rate=cached / (cached + computed) if cached else 0.0,
            utilization=running / slots if slots else 0.0,
            max_running_requests=slots,
        )
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=VERSION,
            dp_rank_count=1,
            loads=[load],
        )

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        if request is NO_MESSAGE:
            await context.abort_with_status(NO_MESSAGE_STATUS)
        for chunk in await asyncio.to_thread(tokenizer_chunks, self._gateway.tokenizer.files()):
            yield chunk

    def _links(self) -> list[WorkerLink]:
        return [link for link in self._gateway.links if link.worker.role in self.roles]


class ContextService(EngineService):
    """Prompts. What is ready stays under a lease until the other door takes it, or `Abort` names its request."""

    roles = ("context",)
    kv_role = "kv_producer"

    def __init__(self, gateway: Gateway, lease_s: float) -> None:
        super().__init__(gateway)
        self._lease_s = lease_s
        self._computing: dict[str, set[asyncio.Task[PromptReady]]] = {}
        self._ready: dict[str, tuple[HeldPrompt, float]] = {}  # oldest first, with the end of the lease

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        if request is NO_MESSAGE:
            await context.abort_with_status(NO_MESSAGE_STATUS)
        try:
            asked = self._gateway.named(traced(prompt_of_one_token(request), context))
            holds = ticket.asks_to_hold(request.kv_transfer_params_json or "{}")
            ready = await self._hold(
                asked.client_id, self._gateway.hold(asked, self._lease_s if holds else 0.0)
            )
        except RequestError as error:
            await context.abort_with_status(to_status(renamed(error)))
            raise
        except Exception as error:
            await context.abort_with_status(_broken(error, request.request_id))
            raise
        if ready is None:
            yield aborted_message()
            return
        delivered = False
        try:
            if holds:
                self._remember(asked.client_id, ready.held)
            yield prompt_message(ready, ticket.written(ready, asked) if holds else "")
            delivered = True
        finally:
            if holds and not delivered:
                self._gateway.give_up(ready.held)

    async def Abort(self, request: Any, context: Context) -> Any:
        """Idempotent; unknown ids are no error."""
        for request_id in request.request_ids:
            for task in self._computing.get(request_id, ()):
                task.cancel()
            if request_id in self._ready:
                self._gateway.give_up(self._ready.pop(request_id)[0])
        return vllm_engine_pb2.AbortResponse()

    async def _hold(self, request_id: str, work: Any) -> PromptReady | None:
        """None when `Abort` named the request meanwhile."""
        task: asyncio.Task[PromptReady] = asyncio.create_task(work)
        self._computing.setdefault(request_id, set()).add(task)
        try:
            await asyncio.wait({task})
        finally:
            task.cancel()  # nobody waits any more; a finished one does not mind
            self._computing[request_id].discard(task)
            if not self._computing[request_id]:
                del self._computing[request_id]
        return None if task.cancelled() else task.result()

    def _remember(self, request_id: str, held: HeldPrompt) -> None:
        now_s = time.monotonic()
        for known in [known for known, (_, end_s) in self._ready.items() if end_s <= now_s]:
            del self._ready[known]
        self._ready[request_id] = (held, now_s + self._lease_s)


class DecodingService(EngineService):
    """Answers, of prompts that are held or not. In an aggregated cluster, of its workers."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway)
        split = gateway.settings.route == "split"
        self.roles = ("generation",) if split else ("aggregated",)
        self.kv_role = "kv_consumer" if split else ""

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[Any]:
        if request is NO_MESSAGE:
            await context.abort_with_status(NO_MESSAGE_STATUS)
        held: HeldPrompt | None = None
        landed = False
        try:
            asked = [self._gateway.named(traced(choice, context)) for choice in requests_of(request)]
            if request.HasField("kv_transfer_params_json"):
                taken = ticket.read(request.kv_transfer_params_json, asked[0])
                if taken is not None and len(asked) > 1:
                    raise InvalidArgument(
                        "a hand-off is good for one answer", field="sampling_params.n", limit=1
                    )
                if taken is not None:
                    held = taken.held
                    asked = [replace(asked[0], seed=taken.seed)]
            timeout_s = context.time_remaining()
            events = merged([self._gateway.generate(one, timeout_s=timeout_s, held=held) for one in asked])
            answers = [Answer(one, index, request.stream) for index, one in enumerate(asked)]
            whole: dict[int, Any] = {}
            async with contextlib.aclosing(events):
                async for index, event in events:
                    landed = True
                    if isinstance(event, AnswerChunk):
                        message = answers[index].chunk(event)
                        if message is not None:
                            yield message
                    elif request.stream:
                        yield answers[index].end(event)
                    else:
                        whole[index] = answers[index].end(event)
            for index in sorted(whole):  # smg numbers whole answers as they come
                yield whole[index]
        except RequestError as error:
            failure = to_status(renamed(error))
        except Exception as error:
            failure = _broken(error, request.request_id)
        else:
            return
        finally:
            if held is not None and not landed:
                self._gateway.give_up(held)
        await context.abort_with_status(failure)

    async def Abort(self, request: Any, context: Context) -> Any:
        """Idempotent; unknown ids are no error."""
        for request_id in request.request_ids:
            self._gateway.cancel(request_id)
        return vllm_engine_pb2.AbortResponse()


def _broken(error: Exception, request_id: str) -> Any:
    """The boundary of the process: the other gateway gets an answer, the log the traceback."""
    _log.exception("a request failed", extra={"request_id": request_id})
    return to_status(WorkerFailed(f"the gateway failed: {type(error).__name__}: {error}"))


class EngineDoor:
    """The server of one pool."""

    def __init__(self, service: EngineService) -> None:
        self._health = HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[Decoding(f"/{SERVICE}/")],
            options=(
                ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
                ("grpc.so_reuseport", 0),  # a second server on the port must fail, not steal half the calls
                *keepalive.server_options(),  # smg asks idle connections for a sign of life every 30 s
            ),
        )
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, listen: str) -> str:
        """Listen on host:port, port 0 for any; returns the address. Raises OSError when it is taken."""
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: {error}") from error
        await self.serving(False)
        await self._server.start()
        return f"{listen.rpartition(':')[0]}:{port}"

    async def serving(self, ready: bool) -> None:
        """What the health service says."""
        states = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self._health.set(name, states.SERVING if ready else states.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self.serving(False)
        await self._server.stop(grace_s)
