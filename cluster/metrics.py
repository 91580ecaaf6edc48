"""Prometheus metrics of one gateway and its workers, made from what is counted anyway when somebody asks for them.

Nothing here runs between two scrapes. Workers count for themselves and tell with every heartbeat; their counters start
again with a new incarnation, as Prometheus expects. Figures of a worker that is out of reach are left out: an old value
must not look like a fresh one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cluster.errors import Preempted, RequestError, WorkerFailed, WorkerLost
from cluster.figures import Histogram
from cluster.gateway import Gateway
from cluster.link import LinkState, WorkerLink
from cluster.version import VERSION
from workers.request import WorkerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_WORKER = ("worker", "role")
# There from the start, because a counter that appears with its first count has no rate of it.
_NO_REPLAYS = {kind.reason.lower(): 0 for kind in (WorkerLost, WorkerFailed, Preempted)}


class Metrics:
    """The registry of one gateway; `others` are of what else runs in its process."""

    def __init__(self, gateway: Gateway, others: Iterable[Collector] = ()) -> None:
        self._registry = CollectorRegistry()
        for collector in (_GatewayCollector(gateway), _WorkerCollector(gateway), *others):
            self._registry.register(collector)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _GatewayCollector(Collector):
    """What the gateway itself counts."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        gateway, figures = self._gateway, self._gateway.figures
        info = InfoMetricFamily("slipstream_gateway", "What this gateway serves")
        info.add_metric((), {"version": VERSION, "model": _model(gateway), "mode": gateway.settings.route})
        yield info
        requests = CounterMetricFamily(
            "slipstream_requests",
            "Requests by how they ended (stop, length, cancelled, disconnected, or the error's code) and where their "
            "prompts were computed (shipped from a context worker, local on a generation worker, aggregated, none)",
            labels=("outcome", "path"),
        )
        for ended, count in figures.outcomes.items():
            requests.add_metric(ended, count)
        yield requests
        replays = CounterMetricFamily(
            "slipstream_replays",
            "Runs of requests that went on where an earlier run broke, by what had broken it",
            labels=("reason",),
        )
        for reason, count in {**_NO_REPLAYS, **figures.replays}.items():
            replays.add_metric((reason,), count)
        yield replays
        for name, text, count in (
            (
                "requests_within_slo",
                "Answers that met the objectives of TTFT and ITL",
                figures.num_within_slo,
            ),
            ("prompt_tokens", "Prompt tokens of answered requests", figures.prompt_tokens),
            ("cached_prompt_tokens", "Those whose KV came from a prefix cache", figures.cached_prompt_tokens),
            ("output_tokens", "Tokens of answered requests", figures.output_tokens),
        ):
            yield CounterMetricFamily(f"slipstream_{name}", text, value=count)
        for name, text, value in (
            ("requests_live", "Requests accepted and not over", gateway.num_live),
            ("requests_live_limit", "Requests that may be live at once", gateway.settings.max_live_requests),
            ("ready", "Whether a request sent now would be served", int(gateway.ready)),
            ("min_acceptance_length", "Alarm threshold; 0 is no alarm", gateway.acceptance.min_al),
        ):
            yield GaugeMetricFamily(f"slipstream_{name}", text, value=value)
        yield _histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first text",
            figures.time_to_first_token,
        )
        yield _histogram(
            "inter_token_latency_seconds",
            "Between two chunks of an answer; the tokens of one step arrive together",
            figures.inter_token_latency,
        )
        yield _histogram("request_duration_seconds", "Answered requests, arrival to end", figures.duration)
        yield _histogram(
            "request_acceptance_length",
            "Tokens per target decode step of an answer",
            figures.acceptance_length,
        )


class _WorkerCollector(Collector):
    """What workers say of themselves."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        links = self._gateway.links
        reached = [(link, link.stats) for link in links if link.state is LinkState.READY and link.stats]
        yield _states(links)
        for name, text, field in _GAUGES:
            yield _per_worker(GaugeMetricFamily, name, text, field, reached)
        for name, text, field in _COUNTERS:
            yield _per_worker(CounterMetricFamily, name, text, field, reached)
        for name, text, kind, label, fields in _SPLIT:
            family = kind(f"slipstream_{name}", text, labels=(*_WORKER, label))
            for link, stats in reached:
                for value, field in fields:
                    family.add_metric((*_labels(link), value), getattr(stats, field))
            yield family
        yield from self._acceptance([link for link, _ in reached if link.worker.role != "context"])
        yield from self._positions(links)
        ages = GaugeMetricFamily(
            "slipstream_figures_age_seconds", "Since the worker told its figures", labels=_WORKER
        )
        now_s = time.monotonic()
        for link, _ in reached:
            ages.add_metric(_labels(link), now_s - link.stats_taken_s)
        yield ages

    def _acceptance(self, links: Iterable[WorkerLink]) -> Iterator[Metric]:
        watch = self._gateway.acceptance
        recent = GaugeMetricFamily(
            "slipstream_acceptance_length",
            "Tokens per target decode step that drafted, over the alarm's window; 0 without a step in it",
            labels=_WORKER,
        )
        low = GaugeMetricFamily(
            "slipstream_acceptance_length_low",
            "1 while the acceptance length is under min_al: the drafter works, if at all, in vain",
            labels=_WORKER,
        )
        for link in links:
            recent.add_metric(_labels(link), watch.recent(link.worker.name))
            low.add_metric(_labels(link), int(watch.low(link.worker.name)))
        yield recent
        yield low

    def _positions(self, links: Iterable[WorkerLink]) -> Iterator[Metric]:
        labels = (*_WORKER, "position")
        drafted = CounterMetricFamily(
            "slipstream_draft_tokens_drafted",
            "Steps that drafted this position, of this gateway's answered requests",
            labels=labels,
        )
        accepted = CounterMetricFamily(
            "slipstream_draft_tokens_accepted",
            "Steps whose draft was accepted at this position",
            labels=labels,
        )
        early_steps = CounterMetricFamily(
            "slipstream_early_decode_steps",
            "First decode steps of each run of this gateway's answered requests: a missing prompt context shows there",
            labels=_WORKER,
        )
        early_tokens = CounterMetricFamily(
            "slipstream_early_decode_tokens", "Tokens that those steps emitted", labels=_WORKER
        )
        for link in links:
            counts = self._gateway.figures.positions.get(link.worker.name)
            if counts is None:
                continue
            for family, values in ((drafted, counts.drafted), (accepted, counts.accepted)):
                for position, value in enumerate(values):
                    family.add_metric((*_labels(link), str(position)), value)
            early_steps.add_metric(_labels(link), counts.early_steps)
            early_tokens.add_metric(_labels(link), counts.early_tokens)
        yield from (drafted, accepted, early_steps, early_tokens)


_GAUGES = (
    ("requests_running", "Requests that the worker runs", "running"),
    ("requests_waiting", "Requests that wait at the worker for pages or a slot", "waiting"),
    ("cached_pages", "Pages that hold prefixes until they are wanted, of each pool", "cached_pages"),
    ("leases", "Pins of pages that transfers read, or may still write", "leases"),
    ("transfers_open", "Transfers that did not end yet", "transfers"),
    (
        "transfers_quarantined",
        "Broken transfers whose pages nobody gets yet, because a write may still reach them",
        "quarantined_transfers",
    ),
    ("last_progress_age_seconds", "Since the engine last did something", "last_progress_age_s"),
)
_COUNTERS = (
    ("steps", "Forward passes", "steps"),
    ("decode_steps", "Target decode steps, summed over requests", "decode_steps"),
    (
        "decode_tokens",
        "Tokens that decode steps emitted; the first token of an answer is not one",
        "decode_tokens",
    ),
    (
        "prompt_tokens_computed",
        "Prompt tokens that the worker computed; on generation workers those of requests on the local path",
        "prompt_tokens_computed",
    ),
    (
        "worker_cached_prompt_tokens",
        "Prompt tokens found in the worker's prefix cache",
        "cached_prompt_tokens",
    ),
    ("drafted_decode_steps", "Decode steps that verified a draft", "drafted_steps"),
    ("drafted_decode_tokens", "Tokens that those steps emitted", "drafted_tokens"),
    (
        "kv_write_seconds",
        "Time in which writes of KV to other workers were under way; bytes shipped over it is the link's speed",
        "kv_write_s",
    ),
    ("preemptions", "Requests whose pages were taken for older ones", "preemptions"),
    ("prompts_held", "Prompts that were computed before it was known who decodes them", "prompts_held"),
    ("prompt_leases_expired", "Those that nobody asked for in time", "prompt_leases_expired"),
    ("worker_requests_finished", "Requests that ended at the worker", "requests_finished"),
)
_SPLIT = (
    (
        "slots_in_use",
        "Rows of the page-index table that live requests hold; target and draft must agree",
        GaugeMetricFamily,
        "ledger",
        (("target", "slots_in_use"), ("draft", "draft_slots_in_use")),
    ),
    (
        "pages_in_use",
        "Pages that requests and transfers hold",
        GaugeMetricFamily,
        "ledger",
        (("target", "target_pages_in_use"), ("draft", "draft_pages_in_use")),
    ),
    (
        "pages",
        "Pages of the pool",
        GaugeMetricFamily,
        "ledger",
        (("target", "target_pages"), ("draft", "draft_pages")),
    ),
    (
        "kv_shipped_bytes",
        "KV sent by context workers and received by generation workers",
        CounterMetricFamily,
        "ledger",
        (("target", "kv_bytes_target"), ("draft", "kv_bytes_draft")),
    ),
    (
        "transfers",
        "Transfers by terminal state, as each side saw it",
        CounterMetricFamily,
        "state",
        (
            ("done", "transfers_done"),
            ("failed", "transfers_failed"),
            ("cancelled", "transfers_cancelled"),
            ("expired", "transfers_expired"),
        ),
    ),
)


def _states(links: Iterable[WorkerLink]) -> Metric:
    family = GaugeMetricFamily(
        "slipstream_worker_state",
        "1 for the state that the worker is in: joining, ready, draining or suspect",
        labels=(*_WORKER, "state"),
    )
    for link in links:
        draining = link.state is LinkState.READY and link.draining
        found = "draining" if draining else link.state.value
        for state in ("joining", "ready", "draining", "suspect"):
            family.add_metric((*_labels(link), state), int(state == found))
    return family


def _per_worker(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    field: str,
    reached: Iterable[tuple[WorkerLink, WorkerStats]],
) -> Metric:
    family = kind(f"slipstream_{name}", text, labels=_WORKER)
    for link, stats in reached:
        family.add_metric(_labels(link), getattr(stats, field))
    return family


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(
        f"slipstream_{name}", text, buckets=histogram.buckets(), sum_value=histogram.sum
    )


def _labels(link: WorkerLink) -> tuple[str, str]:
    return (link.worker.name, link.worker.role)


def _model(gateway: Gateway) -> str:
    try:
        return gateway.limits().model
    except RequestError:
        return ""
