"""From a configuration to a serving cluster, and back down without a trace.

    tokenizer (thread) ┐
    Ray, workers ──────┴▶ gateway attaches, introduces ──▶ door listens ──▶ ready ──signal──▶ drain, stop

The start is parallel where it can be, and the port is tried first of all. Whatever ends it, signals included, every
process that it made is ended before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from cluster.actors import DEFAULT_HOST
from cluster.config import ClusterConfig
from cluster.doors import Addresses, Doors
from cluster.gateway import Gateway, GatewaySettings
from cluster.link import LinkTimes, WorkerAddress
from cluster.local import LocalCluster, Report
from cluster.tracing import gateway_tracing
from workers.pairs import resolve_pair
from workers.tokenizer import Tokenizer

Answer = TypeVar("Answer")

HEALTH_INTERVAL_S = 0.5


def load_tokenizer(pair: str) -> Tokenizer:
    """The pair's tokenizer. Raises PairError or CheckpointError."""
    return Tokenizer.from_path(resolve_pair(pair).target_path)


def make_gateway(config: ClusterConfig, workers: Sequence[WorkerAddress], tokenizer: Tokenizer) -> Gateway:
    """A gateway for these workers, not started yet. Raises TracingMissing."""
    settings = GatewaySettings(
        route=config.mode,
        local_prefill_tokens=config.local_prefill_tokens,
        without_context=config.without_context,
        max_live_requests=config.max_live_requests,
        admission_ttl_s=config.admission_ttl_s,
        max_replays=config.max_replays,
        stall_limit_s=config.stall_limit_s,
        min_al=config.min_al,
        al_window_s=config.al_window_s,
        slo_ttft_s=config.slo_ttft_s,
        slo_itl_s=config.slo_itl_s,
        times=LinkTimes(config.heartbeat_interval_s, config.heartbeat_timeout_s),
    )
    return Gateway(
        workers,
        tokenizer,
        settings,
        new_id=lambda: uuid.uuid4().hex,
        new_seed=lambda: random.SystemRandom().getrandbits(63),
        tracing=gateway_tracing(config.otel_endpoint),
    )


@contextlib.asynccontextmanager
async def running_gateway(
    config: ClusterConfig, workers: Sequence[WorkerAddress], tokenizer: Tokenizer
) -> AsyncIterator[Gateway]:
    """A gateway in this process, attached to all workers."""
    gateway = make_gateway(config, workers, tokenizer)
    try:
        await gateway.start(config.startup_timeout_s)
        yield gateway
    finally:
        await gateway.stop()


async def serve(
    config: ClusterConfig,
    report: Report,
    on_ready: Callable[[Addresses, float], None],
    host_factory: str = DEFAULT_HOST,
) -> None:
    """Serve until SIGINT or SIGTERM; call `on_ready(addresses, seconds)` once. Raises what keeps it from serving."""
    started_s = time.monotonic()
    for listen in (config.listen, config.http, config.metrics, config.vllm_context, config.vllm_decoding):
        if listen:
            check_listen(listen)
    resolve_pair(config.pair)  # a wrong name should not cost a start of Ray
    loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, config.pair))
    await asyncio.sleep(0)  # its thread starts before Ray blocks this one
    cluster = LocalCluster(config, host_factory=host_factory, report=report)
    try:
        cluster.start_ray()
        stop = _stop_signal()
        await _unless(stop, cluster.start_workers())
        report("gateway", "connecting the workers")
        tokenizer = await _unless(stop, loading)
        gateway = make_gateway(config, cluster.workers, tokenizer)
        doors = Doors(config, gateway)
        try:
            await _unless(stop, gateway.start(config.startup_timeout_s))
            addresses = await doors.start()
            await doors.serving(True)
            on_ready(addresses, time.monotonic() - started_s)
            await _follow_health(doors, gateway, stop)
        finally:
            report("gateway", f"stopping; live requests get {config.drain_s:g} s to finish")
            await doors.serving(False)
            await gateway.stop(config.drain_s)
            await doors.stop(0.5)
    except _Stopped:
        pass
    finally:
        await asyncio.gather(loading, return_exceptions=True)
        await cluster.stop()


def check_listen(listen: str) -> None:
    """Raise OSError when `listen` cannot be bound: better now than after the models have loaded."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise OSError(f"listen address {listen!r} is not HOST:PORT")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise OSError(f"cannot listen on {listen}: {error.strerror}") from error


async def _follow_health(doors: Doors, gateway: Gateway, stop: asyncio.Event) -> None:
    """Until `stop`: the health service says SERVING as long as requests can be routed."""
    shown = True
    while not stop.is_set():
        if gateway.ready != shown:
            shown = gateway.ready
            await doors.serving(shown)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEALTH_INTERVAL_S):
                await stop.wait()


class _Stopped(Exception):
    """A signal came before the cluster was ready."""


def _stop_signal() -> asyncio.Event:
    """Set by SIGINT or SIGTERM. Must be made after Ray has started, because Ray replaces their handlers."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _unless(stop: asyncio.Event, work: Awaitable[Answer]) -> Answer:
    """The result of `work`, given up when `stop` is set first."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise _Stopped
    return task.result()
