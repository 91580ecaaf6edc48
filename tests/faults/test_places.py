"""Who was down when decides which errors of a fault run are excused."""

from __future__ import annotations

import os

import pytest

from tests.faults.places import Memory, Outages


@pytest.fixture
def outages() -> Outages:
    """Of each role two workers; both context workers are down from 5 to 6."""
    found = Outages({"c1": "context", "c2": "context", "g1": "generation", "g2": "generation"})
    for name, began_s, ended_s in (("c1", 3, 6), ("c2", 5, 9), ("g1", 1, 4)):
        found.begin(name, began_s)
        found.end(name, ended_s)
    return found


@pytest.mark.parametrize(
    ("began_s", "ended_s", "excused"),
    [(0, 4.9, False), (0, 5, True), (5.5, 5.6, True), (6.1, 20, False), (0, 20, True)],
)
def test_an_error_is_excused_where_all_workers_of_a_role_were_down_at_once(
    outages: Outages, began_s: float, ended_s: float, excused: bool
) -> None:
    assert outages.nobody_left(began_s, ended_s) == excused


def test_an_outage_without_end_goes_on(outages: Outages) -> None:
    outages.begin("g1", 10)
    assert outages.down("g1")
    assert not outages.down("g2")
    outages.begin("g2", 12)
    outages.end("g1", 11)
    assert not outages.nobody_left(10, 30)
    outages.begin("g1", 13)
    assert outages.nobody_left(20, 30)


def test_memory_is_fitted_once_a_process_has_settled_and_seen_enough() -> None:
    memory = Memory()
    for second in range(20):
        memory.note("own", os.getpid(), float(second), 10 * second)
        memory.note("gone", 2**30, float(second), second)
    assert list(memory.lines(settle_s=5, least=100)) == ["own"]
    assert memory.lines(settle_s=5, least=100)["own"].span == 140
    assert memory.lines(settle_s=5, least=1000) == {}
