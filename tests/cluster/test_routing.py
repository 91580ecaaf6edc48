"""The choice of workers is a pure function of what the gateway believes of them."""

from __future__ import annotations

import pytest

from cluster.routing import (
    AggregatedRoute,
    NoRoute,
    SplitRoute,
    WorkerSnapshot,
    choose_aggregated,
    choose_split,
)
from kvmanager.ids import WorkerEpoch
from workers.request import Role


def worker(
    name: str, role: Role, live: int = 0, *, ready: bool = True, free_pages: int = 10
) -> WorkerSnapshot:
    return WorkerSnapshot(
        name=name, role=role, ready=ready, epoch=WorkerEpoch(name), live=live, free_pages=free_pages
    )


def pairs(*names: str) -> frozenset[tuple[WorkerEpoch, WorkerEpoch]]:
    return frozenset((WorkerEpoch(name[:2]), WorkerEpoch(name[2:])) for name in names)


def test_the_least_loaded_of_each_role_is_chosen() -> None:
    workers = [worker("c1", "context", 3), worker("c2", "context", 1), worker("g1", "generation", 5)]
    workers.append(worker("g2", "generation", 4))
    assert choose_split(workers, pairs("c1g1", "c1g2", "c2g1", "c2g2")) == SplitRoute("c2", "g2")


def test_of_equally_loaded_workers_the_one_with_more_free_pages_is_chosen() -> None:
    workers = [worker("a1", "aggregated", free_pages=3), worker("a2", "aggregated", free_pages=7)]
    assert choose_aggregated(workers) == AggregatedRoute("a2")


def test_a_worker_that_is_not_ready_is_never_chosen() -> None:
    assert (
        choose_aggregated([worker("a1", "aggregated", ready=False), worker("a2", "aggregated", 9)]).worker
        == "a2"
    )
    with pytest.raises(NoRoute, match="no aggregated worker"):
        choose_aggregated([worker("a1", "aggregated", ready=False), worker("g1", "generation")])


def test_only_workers_that_have_shaken_hands_go_together() -> None:
    workers = [worker("c1", "context"), worker("c2", "context", 9), worker("g1", "generation")]
    assert choose_split(workers, pairs("c2g1")) == SplitRoute("c2", "g1")
    with pytest.raises(NoRoute, match="handshake"):
        choose_split(workers, pairs())


def test_a_generation_worker_without_partner_is_passed_over() -> None:
    workers = [worker("c1", "context"), worker("g1", "generation"), worker("g2", "generation", 5)]
    assert choose_split(workers, pairs("c1g2")) == SplitRoute("c1", "g2")


def test_a_missing_role_is_named() -> None:
    with pytest.raises(NoRoute, match="no context worker"):
        choose_split([worker("g1", "generation")], pairs())
    with pytest.raises(NoRoute, match="no generation worker"):
        choose_split([worker("c1", "context")], pairs())
