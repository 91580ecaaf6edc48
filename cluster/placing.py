"""Placement groups of Ray: made, waited for in bounded time, and removed when they do not come about."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from cluster.placement import Fits, Node, NoSuchNodes, Occupied, WorkerGroup, judge


class PlacementRefused(Exception):
    """A group was not placed in time; the message says what it wanted and which labels there are."""


async def place(
    ray: Any, group: WorkerGroup, timeout_s: float, name: str = "", lifetime: str | None = None
) -> Any:
    """A ready placement group with one bundle per rank. Raises PlacementRefused and leaves nothing behind.

    One with the `lifetime` "detached" outlives this process; its `name` finds it again.
    """
    util = ray.util
    topology = {group.domain_label: "STRICT_PACK"} if group.domain_label else None
    placed = util.placement_group(
        [dict(group.resources)] * group.ranks,
        bundle_label_selector=[dict(group.labels)] * group.ranks if group.labels else None,
        topology_strategy=topology,
        strategy=None if topology else "PACK",
        name=name,
        lifetime=lifetime,
    )
    try:
        if await asyncio.to_thread(placed.wait, timeout_s):
            return placed
        verdict = judge(group, living_nodes(ray))
    except BaseException:
        util.remove_placement_group(placed)
        raise
    util.remove_placement_group(placed)
    match verdict:
        case Occupied(why=why) | NoSuchNodes(why=why):
            raise PlacementRefused(f"not placed within {timeout_s:g} s: {why}")
        case Fits():
            raise PlacementRefused(
                f"not placed within {timeout_s:g} s: worker {group.name} wants {group.wanted()}, "
                "for which there seems to be room; Ray did not use it"
            )


def living_nodes(ray: Any) -> list[Node]:
    """Ray's nodes as they are now."""
    state: Any = ray._private.state
    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return [
        Node(node["NodeManagerAddress"], node["Labels"], free.get(node["NodeID"], {}), node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
