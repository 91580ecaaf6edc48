"""From a configuration to a serving cluster, and back down without a trace.

    tokenizer (thread) ┐                                                     ┌── supervisor: who serves changes
    Ray, workers ──────┴▶ gateway attaches, introduces ──▶ door listens ──▶ ready ──signal──▶ drain, stop

The start is parallel where it can be, and the port is tried first of all. Whatever ends it, signals included, every
process that it made is ended before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from cluster.actors import DEFAULT_HOST
from cluster.config import ClusterConfig
from cluster.doors import Addresses, Doors, check_doors
from cluster.fleet import Report
from cluster.gateway import Gateway, GatewaySettings
from cluster.link import LinkTimes, WorkerAddress
from cluster.local import LocalCluster
from cluster.registry import Registry
from cluster.replacements import SupervisorCollector
from cluster.stopping import Stopped, stop_signal, unless
from cluster.supervisor import Supervisor, policy_of
from cluster.tracers import gateway_tracing
from workers.pairs import resolve_pair
from workers.tokenizer import Tokenizer

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
        replay_wait_s=config.replay_wait_s,
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
        new_id=lambda: os.urandom(16).hex(),
        new_seed=lambda: secrets.randbits(63),
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
    check_doors(config)
    resolve_pair(config.pair)  # a wrong name should not cost a start of Ray
    loading = asyncio.create_task(asyncio.to_thread(load_tokenizer, config.pair))
    await asyncio.sleep(0)  # its thread starts before Ray blocks this one
    cluster = LocalCluster(config, host_factory=host_factory, report=report)
    try:
        cluster.start_ray()
        stop = stop_signal()
        await unless(stop, cluster.start_workers())
        report("gateway", "connecting the workers")
        tokenizer = await unless(stop, loading)
        gateway = make_gateway(config, cluster.workers, tokenizer)
        registry = Registry(config.pair, config.mode)

        def changed(workers: tuple[WorkerAddress, ...]) -> None:
            gateway.assign(workers)
            registry.publish(workers)

        supervisor = supervise(config, cluster, changed) if config.replace_workers else None
        doors = Doors(config, gateway, [SupervisorCollector(supervisor)] if supervisor is not None else [])
        try:
            await unless(stop, gateway.start(config.startup_timeout_s))
            if supervisor is not None:
                supervisor.start()
            registry.publish(cluster.workers)
            addresses = await doors.start()
            if config.registry:
                addresses = replace(addresses, registry=await registry.start(config.registry))
            await doors.serving(True)
            on_ready(addresses, time.monotonic() - started_s)
            await follow_health(doors, gateway, stop)
        finally:
            report("gateway", f"stopping; live requests get {config.drain_s:g} s to finish")
            if supervisor is not None:
                await supervisor.stop()
            await doors.serving(False)
            await registry.stop()
            await gateway.stop(config.drain_s)
            await doors.stop(0.5)
    except Stopped:
        pass
    finally:
        await asyncio.gather(loading, return_exceptions=True)
        await cluster.stop()


def supervise(
    config: ClusterConfig,
    cluster: LocalCluster,
    changed: Callable[[tuple[WorkerAddress, ...]], None],
) -> Supervisor:
    """A supervisor of a cluster's workers, which have been started; it has not."""
    fleet = cluster.fleet
    assert fleet is not None, "the workers have not been started"
    return Supervisor(fleet, fleet.roles, cluster.serving, policy_of(config), changed)


async def follow_health(doors: Doors, gateway: Gateway, stop: asyncio.Event, shown: bool = True) -> None:
    """Until `stop`: the health service says SERVING as long as requests can be routed."""
    while not stop.is_set():
        if gateway.ready != shown:
            shown = gateway.ready
            await doors.serving(shown)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEALTH_INTERVAL_S):
                await stop.wait()
