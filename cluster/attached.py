"""A gateway without workers of its own: it follows a registry, and serves with the workers that it is told of.

    registry ──first roster──▶ tokenizer, doors ──workers answer──▶ ready ──signal──▶ drain, stop
             └─every change──▶ Gateway.assign

It needs neither Ray nor torch, and starts in about a second. Any number of such gateways serve the same workers: slots
and pages are the workers' own to give, and every request has an id that no other gateway makes. When a gateway dies its
streams end at the workers, which cancel what it had asked for; another one finds the workers at the registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from cluster.config import ClusterConfig
from cluster.doors import Addresses, Doors, check_doors
from cluster.fleet import Report
from cluster.gateway import Gateway
from cluster.membership import NotReady
from cluster.registry import Roster, follow
from cluster.serve import follow_health, load_tokenizer, make_gateway
from cluster.stopping import Stopped, stop_signal, unless

_READY_POLL_S = 0.02


async def serve_attached(
    registry: str,
    config_for: Callable[[Roster | None], ClusterConfig],
    report: Report,
    on_ready: Callable[[Addresses, float, ClusterConfig], None],
) -> None:
    """Serve until SIGINT or SIGTERM; call `on_ready` once, when a request would be served.

    `config_for` makes the configuration, of which the roster may be a part. Raises NotReady when no registry answers.
    """
    started_s = time.monotonic()
    config = config_for(None)
    check_doors(config)
    stop = stop_signal()
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(contextlib.suppress(Stopped))
        rosters = await stack.enter_async_context(contextlib.aclosing(follow(registry)))
        report("registry", f"asking {registry}")
        first = await unless(stop, _first(rosters, registry, config.startup_timeout_s))
        config = config_for(first)
        tokenizer = await unless(stop, asyncio.to_thread(load_tokenizer, config.pair))
        gateway = make_gateway(config, first.addresses, tokenizer)
        doors = Doors(config, gateway)
        following = asyncio.create_task(_follow(gateway, rosters))
        try:
            gateway.begin()
            addresses = await doors.start()
            report("gateway", f"connecting {len(first.workers)} workers")
            await unless(stop, _ready(gateway))
            await doors.serving(True)
            on_ready(addresses, time.monotonic() - started_s, config)
            await follow_health(doors, gateway, stop)
        finally:
            report("gateway", f"stopping; live requests get {config.drain_s:g} s to finish")
            await doors.serving(False)
            await gateway.stop(config.drain_s)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await doors.stop(0.5)


async def _first(rosters: AsyncIterator[Roster], registry: str, timeout_s: float) -> Roster:
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(rosters)
    except TimeoutError:
        raise NotReady(f"no registry answers at {registry} within {timeout_s:g} s") from None


async def _follow(gateway: Gateway, rosters: AsyncIterator[Roster]) -> None:
    async for roster in rosters:
        gateway.assign(roster.addresses)


async def _ready(gateway: Gateway) -> None:
    # It depends on links, pairs and figures alike: there is no one event for it.
    while not gateway.ready:  # noqa: ASYNC110
        await asyncio.sleep(_READY_POLL_S)
