"""Metrics of a supervisor: how often workers gave up their places, and how many places are empty."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.supervision import Down, Starting
from cluster.supervisor import Supervisor


class SupervisorCollector(Collector):
    """Made when somebody asks, like all other metrics."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterator[Metric]:
        replaced = CounterMetricFamily(
            "slipstream_worker_replacements",
            "Processes that gave up their place, by why: died, silent, stalled, failed, slow, start (it did not come "
            "to serve), changed (another configuration), surplus",
            labels=("worker", "role", "reason"),
        )
        for (name, role, reason), count in self._supervisor.replaced.items():
            replaced.add_metric((name, role, reason), count)
        yield replaced
        failures = GaugeMetricFamily(
            "slipstream_worker_failures_in_a_row",
            "Ends of a place's processes soon after their start; each makes the next wait longer",
            labels=("worker", "role"),
        )
        wanted = GaugeMetricFamily(
            "slipstream_workers_missing",
            "Places of the configuration in which nobody serves",
            labels=("role",),
        )
        missing = {place.role: 0 for place in self._supervisor.places.values()}
        for place in self._supervisor.places.values():
            failures.add_metric((place.name, place.role), place.failures)
            missing[place.role] += place.wanted and isinstance(place.phase, Down | Starting)
        for role, count in missing.items():
            wanted.add_metric((role,), count)
        yield failures
        yield wanted
