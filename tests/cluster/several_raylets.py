"""Run by test_placing: a Ray of four raylets on this machine, logical GPUs, labels; prints what was placed where.

head (no CPU)    10: context, nvl-a, 1 GPU    11: context, nvl-a, 1 GPU    20: generation, nvl-b, 2 GPUs
                  └──────── whole: aggregated ─────────┘
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from typing import Any

import ray
from ray.cluster_utils import Cluster

from cluster.config import load_config
from cluster.fleet import StartFailed
from cluster.local import LocalCluster
from cluster.placement import PlacementConfig, WorkerGroup
from cluster.placing import PlacementRefused, place

DOMAIN = "ray.io/gpu-domain"
FAKE = "tests.cluster.fake_worker:FakeHost"
NODES = [("context", "nvl-a", 1), ("context", "nvl-a", 1), ("generation", "nvl-b", 2)]
WHOLE = {"nvl-a": {"whole": "aggregated"}}


async def bundles_of(group: WorkerGroup, names: dict[str, str], timeout_s: float) -> list[str]:
    """The names of the nodes that the ranks of a group got; the group is given back."""
    placed = await place(ray, group, timeout_s)
    table: dict[str, Any] = ray.util.placement_group_table(placed)
    ray.util.remove_placement_group(placed)
    return sorted(names[node_id] for node_id in table["bundles_to_node_id"].values())


async def refusal(group: WorkerGroup, names: dict[str, str]) -> str:
    try:
        await bundles_of(group, names, 2.0)
    except PlacementRefused as error:
        return str(error)
    return ""


async def serve(**placement: object) -> tuple[dict[str, str], str]:
    """A cluster that joins this Ray: node label by worker, or why it did not start."""
    base = {"role_label": "role", "domain_label": DOMAIN, "gpus": 1, "cpus": 0, "timeout_s": 20}
    config = load_config(None, {"startup_timeout_s": 60, "placement": {**base, **placement}})
    cluster = LocalCluster(config, host_factory=FAKE)
    cluster.start_ray()
    try:
        await cluster.start_workers()
    except StartFailed as error:
        return {}, str(error)
    finally:
        where = {
            name: ray.get(actor.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()))
            for name, actor in (cluster.fleet.actors if cluster.fleet is not None else {}).items()
        }
        labels = {node["NodeID"]: node["Labels"].get(DOMAIN, "") for node in ray.nodes()}
        await cluster.stop()
    return {name: labels[node_id] for name, node_id in where.items()}, ""


async def ranks(size: int, names: dict[str, str], timeout_s: float) -> tuple[list[str], str]:
    """A worker of real ranks that joins this Ray: the names of their nodes, or why it did not start."""
    placement = {"role_label": "whole", "domain_label": DOMAIN, "gpus": 1, "cpus": 0, "timeout_s": timeout_s}
    values = {"mode": "aggregated", "pair": "tiny", "aggregated": {"tensor_parallel_size": size}}
    config = load_config(None, {**values, "device": "cpu", "num_threads": 1, "placement": placement})
    cluster = LocalCluster(config)
    cluster.start_ray()
    try:
        await cluster.start_workers()
        state: Any = ray._private.state
        places = [
            actor["Address"]["NodeID"] for actor in state.actors().values() if actor["State"] == "ALIVE"
        ]
        return sorted(names[node_id] for node_id in places), ""
    except StartFailed as error:
        return [], str(error)
    finally:
        await cluster.stop()


def main() -> None:
    small = {"object_store_memory": 80_000_000, "num_cpus": 1}
    cluster = Cluster(
        initialize_head=True, head_node_args={**small, "num_cpus": 0, "include_dashboard": False}
    )
    nodes = [
        cluster.add_node(
            **small, wait=False, num_gpus=gpus, labels={"role": role, DOMAIN: domain, **WHOLE.get(domain, {})}
        )
        for role, domain, gpus in NODES
    ]
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    found: dict[str, Any] = {}
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    names = {
        node.node_id: f"{role}-{number}"
        for number, (node, (role, _, _)) in enumerate(zip(nodes, NODES, strict=True))
    }
    gpu = {"GPU": 1.0}

    async def groups() -> None:
        context = {"role": "context"}
        two = WorkerGroup("context-0", 2, gpu, context, DOMAIN)
        found["two context ranks"] = await bundles_of(two, names, 20.0)
        found["three context ranks"] = await refusal(WorkerGroup("context-0", 3, gpu, context, DOMAIN), names)
        found["three ranks anywhere"] = await refusal(WorkerGroup("any-0", 3, gpu, {}, DOMAIN), names)
        found["three ranks without domain"] = await bundles_of(WorkerGroup("any-0", 3, gpu), names, 20.0)
        unlabelled = PlacementConfig(cpus=0, gpus=1)
        found["two ranks anywhere"] = await bundles_of(unlabelled.group("any-0", "context", 2), names, 20.0)
        for _ in range(100):  # what is given back arrives a moment later
            found["free GPUs afterwards"] = ray.available_resources().get("GPU")
            if found["free GPUs afterwards"] == 4.0:
                break
            await asyncio.sleep(0.1)

    asyncio.run(groups())
    ray.shutdown()
    found["serving"], _ = asyncio.run(serve())
    _, found["refused"] = asyncio.run(serve(role_label="kind", timeout_s=2))
    found["ranks of two"], found["two refused"] = asyncio.run(ranks(2, names, 20.0))
    _, found["four refused"] = asyncio.run(ranks(4, names, 2.0))
    print(json.dumps(found))
    cluster.shutdown()


if __name__ == "__main__":
    main()
