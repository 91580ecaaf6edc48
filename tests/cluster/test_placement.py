"""Placement by label, decided: which groups fit on which nodes, and what a refusal says."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import ClusterConfig, ConfigError, load_config
from cluster.placement import Fits, Node, NoSuchNodes, Occupied, PlacementConfig, WorkerGroup, judge

DOMAIN = "ray.io/gpu-domain"


def node(address: str, gpus: float, free: float | None = None, **labels: str) -> Node:
    named = {DOMAIN if key == "domain" else key: value for key, value in labels.items()}
    return Node(address, named, {"GPU": gpus if free is None else free}, {"GPU": gpus})


def group(ranks: int, domain_label: str = DOMAIN, **labels: str) -> WorkerGroup:
    return WorkerGroup("context-0", ranks, {"GPU": 1}, labels, domain_label)


TWO_DOMAINS = [
    node("10.0.0.1", 2, role="context", domain="nvl-a"),
    node("10.0.0.2", 2, role="context", domain="nvl-a"),
    node("10.0.0.3", 2, role="context", domain="nvl-b"),
]


def test_a_group_may_span_nodes_but_not_domains() -> None:
    assert judge(group(4, role="context"), TWO_DOMAINS) == Fits()
    verdict = judge(group(6, role="context"), TWO_DOMAINS)
    assert isinstance(verdict, NoSuchNodes)
    assert "6 ranks of 1 GPU on nodes with role=context, all in one ray.io/gpu-domain" in verdict.why
    assert "the most room is in ray.io/gpu-domain=nvl-a, for 4" in verdict.why
    assert "10.0.0.3 [ray.io/gpu-domain=nvl-b, role=context] 2 of 2 GPU free" in verdict.why


def test_without_a_domain_label_all_nodes_count_together() -> None:
    assert judge(group(6, domain_label="", role="context"), TWO_DOMAINS) == Fits()


def test_a_wrong_label_is_refused_with_the_labels_that_there_are() -> None:
    verdict = judge(group(1, role="generation"), TWO_DOMAINS)
    assert isinstance(verdict, NoSuchNodes)
    assert "role=generation" in verdict.why
    assert "no node has these labels" in verdict.why
    assert "role=context" in verdict.why


def test_nodes_without_a_domain_belong_to_none() -> None:
    verdict = judge(group(1), [node("10.0.0.1", 4)])
    assert isinstance(verdict, NoSuchNodes)
    assert "no such node has a label ray.io/gpu-domain" in verdict.why
    assert "[no labels]" in verdict.why


def test_room_that_others_use_is_told_apart_from_room_that_does_not_exist() -> None:
    nodes = [node("10.0.0.1", 4, free=1, domain="nvl-a"), node("10.0.0.2", 2, free=2, domain="nvl-b")]
    assert isinstance(judge(group(3), nodes), Occupied)
    assert judge(group(2), nodes) == Fits()


def test_no_nodes_at_all_is_a_refusal_too() -> None:
    assert isinstance(judge(group(1), []), NoSuchNodes)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from("abc")), max_size=5),
    st.integers(1, 5),
)
def test_the_verdict_agrees_with_trying_every_assignment(
    shapes: list[tuple[int, int, str]], ranks: int
) -> None:
    nodes = [
        node(f"n{number}", total, min(free, total), domain=domain)
        for number, (total, free, domain) in enumerate(shapes)
    ]

    def assignable(kind: str) -> bool:
        slots = [(one.labels[DOMAIN]) for one in nodes for _ in range(int(getattr(one, kind)["GPU"]))]
        return any(len(set(chosen)) == 1 for chosen in itertools.combinations(slots, ranks))

    verdict = judge(group(ranks), nodes)
    assert isinstance(verdict, Fits) == assignable("free")
    assert isinstance(verdict, NoSuchNodes) == (not assignable("total"))


def test_tiny_fractions_are_not_lost_to_rounding() -> None:
    tenth = WorkerGroup("context-0", 10, {"CPU": 0.1})
    assert judge(tenth, [Node("n", {}, {"CPU": 1.0}, {"CPU": 1.0})]) == Fits()


def test_a_configuration_makes_the_groups_of_its_workers() -> None:
    config = PlacementConfig(role_label="role", domain_label=DOMAIN, gpus=1, cpus=0)
    assert config.group("generation-1", "generation") == WorkerGroup(
        "generation-1", 1, {"GPU": 1}, {"role": "generation"}, DOMAIN
    )
    assert not ClusterConfig().placement.by_label


def test_a_placement_that_reserves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="placement needs cpus or gpus"):
        load_config(None, {"placement": {"cpus": 0, "gpus": 0}})


def test_workers_on_other_machines_compute_with_the_cpus_that_they_reserve() -> None:
    def threads(**placement: object) -> int:
        return load_config(None, {"placement": placement}).worker_config("context").num_threads

    assert threads(role_label="role", cpus=6) == 6
    assert threads(role_label="role", cpus=0.01) == 1
    assert threads(cpus=60) == ClusterConfig().worker_config("context").num_threads  # placed by nobody
