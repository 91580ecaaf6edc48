"""Workers without a gateway: started or found again, kept running, and told of to gateways that attach.

    Ray, workers ──▶ supervisor ──▶ registry listens ──▶ keeping ──signal──▶ stop, or leave the workers to their Ray

With `keep_workers` the end of this process is no end of any stream: gateways know their workers, and the process that
takes its place finds them again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cluster.actors import DEFAULT_HOST
from cluster.config import ClusterConfig, ConfigError
from cluster.doors import Addresses, check_addresses
from cluster.fleet import Report
from cluster.http_door import HttpDoor, make_app, verdict
from cluster.local import LocalCluster
from cluster.metrics import CONTENT_TYPE
from cluster.registry import Registry
from cluster.replacements import SupervisorCollector
from cluster.serve import supervise
from cluster.stopping import Stopped, stop_signal, unless
from cluster.supervisor import Supervisor
from workers.pairs import resolve_pair


async def keep_workers(
    config: ClusterConfig,
    report: Report,
    on_ready: Callable[[Addresses, float], None],
    host_factory: str = DEFAULT_HOST,
) -> None:
    """Keep workers until SIGINT or SIGTERM; call `on_ready(addresses, seconds)` once all of them serve.

    Raises what keeps them from serving.
    """
    if not config.registry:
        raise ConfigError("registry is not set: gateways could not attach to these workers")
    started_s = time.monotonic()
    config = msgspec.structs.replace(config, listen="", http="")  # a gateway's doors
    check_addresses(config)
    resolve_pair(config.pair)  # a wrong name should not cost a start of Ray
    cluster = LocalCluster(config, host_factory=host_factory, report=report)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(cluster.stop)
        cluster.start_ray()
        stop = stop_signal()
        with contextlib.suppress(Stopped):
            await unless(stop, cluster.start_workers())
            registry = Registry(config.pair, config.mode)
            stack.push_async_callback(registry.stop)
            supervisor = supervise(config, cluster, registry.publish)
            stack.push_async_callback(supervisor.stop)
            supervisor.start()
            addresses = Addresses("", registry=await registry.start(config.registry))
            if config.metrics:
                operations = HttpDoor(make_app(Keeping(supervisor).routes()))
                stack.push_async_callback(operations.stop, 0.0)
                addresses = replace(addresses, metrics=await operations.start(config.metrics))
            on_ready(addresses, time.monotonic() - started_s)
            await stop.wait()
            report("workers", "left to their Ray" if cluster.keeps_workers else "stopping")


class Keeping:
    """What operators ask of this process: /health is always well, /ready tells who is missing."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._metrics = CollectorRegistry()
        self._metrics.register(SupervisorCollector(supervisor))

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
        ]

    async def health(self, request: Request) -> Response:
        """This process answers; workers that fail are its business, and no reason to end it."""
        return verdict([])

    async def ready(self, request: Request) -> Response:
        """503 while a place is empty."""
        return verdict(self._supervisor.missing)

    async def metrics(self, request: Request) -> Response:
        """Prometheus's text format."""
        return Response(generate_latest(self._metrics), media_type=CONTENT_TYPE)
