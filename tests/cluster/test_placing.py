"""Placement by label, done: on a real Ray of several raylets with logical GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    # Ray puts sockets below this path, and their paths are limited to 107 bytes.
    home = Path("/tmp") / f"slip-{os.getpid()}-{time.monotonic_ns() % 100_000}"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.cluster.several_raylets"],
        env={
            **kept,
            "HOME": str(home),
            "TMPDIR": str(home),
            "RAY_TMPDIR": str(home),
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    yield json.loads(ran.stdout.splitlines()[-1])
    subprocess.run(["rm", "-rf", str(home)], check=True)


def test_the_ranks_of_a_group_share_a_domain_across_nodes(found: dict[str, Any]) -> None:
    assert found["two context ranks"] == ["context-0", "context-1"]


def test_a_group_that_would_straddle_domains_is_refused_in_time(found: dict[str, Any]) -> None:
    assert found["three ranks anywhere"].startswith(
        "not placed within 2 s: worker any-0 wants 3 ranks of 1 GPU"
    )
    assert "the most room is in ray.io/gpu-domain=nvl-" in found["three ranks anywhere"]
    assert len(found["three ranks without domain"]) == 3  # the domain is what kept them from being placed


def test_a_refusal_names_the_labels_wanted_and_seen(found: dict[str, Any]) -> None:
    why = found["three context ranks"]
    assert "on nodes with role=context, all in one ray.io/gpu-domain" in why
    assert "ray.io/gpu-domain=nvl-a, for 2" in why
    assert "[ray.io/gpu-domain=nvl-b, role=generation] 1 of 1 CPU free, 2 of 2 GPU free" in why


def test_a_refused_group_leaves_nothing_reserved(found: dict[str, Any]) -> None:
    assert found["free GPUs afterwards"] == 4.0


def test_a_cluster_puts_each_role_on_the_nodes_of_its_label(found: dict[str, Any]) -> None:
    """S73: actors in placement groups that were made before them. There are no pipeline stages to nest."""
    assert found["serving"] == {"context-0": "nvl-a", "generation-0": "nvl-b"}


def test_a_cluster_whose_labels_nobody_carries_says_so(found: dict[str, Any]) -> None:
    assert "kind=context" in found["refused"] or "kind=generation" in found["refused"]
    assert "no node has these labels" in found["refused"]


def test_the_actors_of_a_workers_ranks_share_a_domain_across_nodes(found: dict[str, Any]) -> None:
    assert found["two refused"] == ""
    assert found["ranks of two"] == ["context-0", "context-1"]


def test_a_worker_whose_ranks_would_straddle_domains_is_refused_though_there_are_gpus(
    found: dict[str, Any],
) -> None:
    assert "wants 4 ranks of 1 GPU on nodes with whole=aggregated, all in one" in found["four refused"]
    assert "the most room is in ray.io/gpu-domain=nvl-a, for 2" in found["four refused"]


def test_without_a_label_the_ranks_of_a_worker_share_a_node(found: dict[str, Any]) -> None:
    assert found["two ranks anywhere"] == ["generation-2", "generation-2"]  # the only one with two GPUs
