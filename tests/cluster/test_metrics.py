"""What operators see: metrics by name and value, the alarm, log lines, dashboards without dead panels."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster import metrics
from cluster.errors import RequestError
from cluster.figures import Histogram
from cluster.logs import JsonFormatter, TextFormatter
from cluster.metrics import Metrics
from cluster.replacements import SupervisorCollector
from cluster.supervision import Policy
from cluster.supervisor import Processes, Supervisor
from tests.cluster.conftest import FakeCluster, Peers, StartCluster
from tests.cluster.fake_worker import FakeHost
from tests.cluster.prometheus_lint import findings
from transceiver.wire import TerminalState
from workers.request import Role

DASHBOARDS = Path(__file__).parents[2] / "deploy" / "dashboards"
TERMINAL_STATES = [str(state).lower() for state in TerminalState]
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(cluster: FakeCluster) -> Samples:
    text = Metrics(cluster.gateway).text().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[(f"slipstream_{name}", tuple(sorted(labels.items())))]


async def used(cluster: FakeCluster) -> None:
    """One answer, one refusal, one client that leaves."""
    await cluster.client.complete("abc", max_tokens=7)
    with pytest.raises(RequestError):
        await cluster.client.complete("")
    for host in cluster.hosts.values():
        host.hold.set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await cluster.client.complete("ab")
    for host in cluster.hosts.values():
        host.hold.clear()
    await cluster.settle()
    await cluster.gateway.refresh()


async def test_requests_tokens_and_times_are_counted(split: FakeCluster) -> None:
    await used(split)
    samples = scraped(split)
    assert value(samples, "requests_total", outcome="length", path="shipped") == 1
    assert value(samples, "requests_total", outcome="invalid_argument", path="none") == 1
    assert value(samples, "requests_total", outcome="disconnected", path="shipped") == 1
    assert (value(samples, "prompt_tokens_total"), value(samples, "output_tokens_total")) == (3, 7)
    assert value(samples, "requests_within_slo_total") == 1
    assert value(samples, "requests_live") == 0
    assert value(samples, "time_to_first_token_seconds_count") == 1
    assert value(samples, "inter_token_latency_seconds_count") <= 3  # fewer when steps arrive together
    assert value(samples, "request_acceptance_length_bucket", le="1.5") == 0
    assert value(samples, "request_acceptance_length_bucket", le="2.0") == 1
    assert value(samples, "gateway_info", version=_version(samples), model="fake", mode="split") == 1


def _version(samples: Samples) -> str:
    (labels,) = [dict(labels) for name, labels in samples if name == "slipstream_gateway_info"]
    return labels["version"]


async def test_what_workers_say_of_themselves_is_told_per_worker(split: FakeCluster) -> None:
    await used(split)
    split.hosts["generation-1"].stats_change = {
        "decode_steps": 10,
        "decode_tokens": 34,
        "kv_bytes_draft": 5,
        "transfers_failed": 2,
        "transfers_cancelled": 3,
        "transfers_expired": 4,
        "drafted_steps": 8,
        "drafted_tokens": 32,
        "kv_write_s": 0.5,
        "draft_pages_in_use": 3,
    }
    await split.gateway.refresh()
    samples = scraped(split)
    at = {"worker": "generation-1", "role": "generation"}
    assert value(samples, "decode_steps_total", **at) == 10
    assert value(samples, "decode_tokens_total", **at) == 34
    assert value(samples, "prompt_tokens_computed_total", **at) == 0
    assert value(samples, "kv_shipped_bytes_total", ledger="draft", **at) == 5
    ends = {state: value(samples, "transfers_total", state=state, **at) for state in TERMINAL_STATES}
    assert ends == {"done": 0, "failed": 2, "cancelled": 3, "expired": 4}
    assert value(samples, "drafted_decode_steps_total", **at) == 8
    assert value(samples, "drafted_decode_tokens_total", **at) == 32
    assert value(samples, "kv_write_seconds_total", **at) == 0.5
    assert value(samples, "early_decode_steps_total", **at) == 3
    assert value(samples, "early_decode_tokens_total", **at) == 6
    assert value(samples, "pages_in_use", ledger="draft", **at) == 3
    assert value(samples, "draft_tokens_drafted_total", position="0", **at) == 3
    assert value(samples, "draft_tokens_accepted_total", position="0", **at) == 3
    assert value(samples, "worker_state", state="ready", **at) == 1
    await split.client.drain("generation-1")
    assert value(scraped(split), "worker_state", state="draining", **at) == 1


async def test_a_worker_out_of_reach_tells_no_old_figures(split: FakeCluster) -> None:
    await split.servers["generation-1"].stop()
    while split.gateway.ready:
        await asyncio.sleep(0.01)
    samples = scraped(split)
    at = {"worker": "generation-1", "role": "generation"}
    assert value(samples, "worker_state", state="suspect", **at) == 1
    assert value(samples, "ready") == 0
    assert ("slipstream_requests_running", tuple(sorted(at.items()))) not in samples


async def test_a_low_acceptance_length_alarms_and_is_logged_once(
    start_cluster: StartCluster, caplog: pytest.LogCaptureFixture
) -> None:
    host = FakeHost("aggregated")
    cluster = await start_cluster(host, route="aggregated", min_al=2.0, al_window_s=0.2)
    (link,) = cluster.gateway.links
    at = {"worker": "aggregated-0", "role": "aggregated"}
    await link.refresh()
    assert value(scraped(cluster), "acceptance_length_low", **at) == 0
    with caplog.at_level(logging.WARNING, "cluster.gateway"):
        for steps in (100, 200, 300):
            host.stats_change = {"drafted_steps": steps, "drafted_tokens": steps * 109 // 100}
            await link.refresh()
    samples = scraped(cluster)
    assert value(samples, "acceptance_length_low", **at) == 1
    assert value(samples, "acceptance_length", **at) == pytest.approx(1.09)
    assert value(samples, "min_acceptance_length") == 2.0
    said = [record for record in caplog.records if "fell under min_al" in record.message]
    assert [record.__dict__["worker"] for record in said] == ["aggregated-0"]


async def test_every_request_leaves_one_log_line_with_its_ids(
    split: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "cluster.requests"):
        await split.client.complete("abc", max_tokens=7, client_id="mine")
        with pytest.raises(RequestError):
            await split.client.complete("abc", temperature=-1, client_id="wrong")
    answered, refused = (json.loads(JsonFormatter().format(record)) for record in caplog.records)
    assert (answered["message"], answered["request_id"], answered["outcome"]) == (
        "request ended",
        "mine",
        "length",
    )
    assert answered["workers"] == "generation-1,context-0"
    assert answered["transfer_id"] == answered["internal_id"]  # what a fake worker names it
    assert (answered["output_tokens"], answered["acceptance_length"]) == (7, 2.0)
    assert (refused["request_id"], refused["outcome"]) == ("wrong", "invalid_argument")
    assert "temperature is -1" in refused["error"]


async def test_every_line_of_a_requests_life_names_it_in_gateway_and_workers(
    start_cluster: StartCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose first worker fails, one that is cancelled by its id."""
    peers: Peers = {}
    hosts = [
        FakeHost("context", peers),
        FakeHost("generation", peers, error_after=1),
        FakeHost("generation", peers),
    ]
    cluster = await start_cluster(*hosts)
    with caplog.at_level(logging.DEBUG, "cluster"):
        while not hosts[1].seen:
            await cluster.client.complete("abc", max_tokens=7, client_id="mine")
        hosts[2].hold.set()
        hosts[0].hold.set()
        asking = asyncio.create_task(cluster.client.complete("abc", max_tokens=7, client_id="yours"))
        while not await cluster.client.cancel("yours"):
            await asyncio.sleep(0.005)
        hosts[0].hold.clear()
        hosts[2].hold.clear()
        await asking
        await cluster.settle()
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    of_requests = [line for line in lines if line["logger"] not in ("cluster.link", "cluster.membership")]
    assert len(of_requests) > 10
    assert all("internal_id" in line for line in of_requests)
    by_logger = {line["logger"] for line in of_requests}
    assert by_logger >= {"cluster.gateway", "cluster.live", "cluster.requests", "cluster.worker_requests"}
    (again,) = [line for line in of_requests if line["message"].startswith("a request runs again")]
    assert again["request_id"] == "mine"
    assert again["transfer_id"] == again["internal_id"]  # what a fake worker names it
    worker = [line for line in of_requests if line["message"] == "request ended at the worker"]
    assert {line["role"] for line in worker} == {"context", "generation"}
    assert {"shipped", "the engine broke", "length"} <= {line["outcome"] for line in worker}
    assert any(line.get("transfer_bytes_target", 0) > 0 and "decode_s" in line for line in worker)
    known = {line["internal_id"] for line in of_requests if "request_id" in line}
    assert {line["internal_id"] for line in worker} <= known, "a worker's line is found by its gateway's"


def test_log_lines_carry_their_facts_in_both_formats() -> None:
    record = logging.LogRecord("cluster", logging.WARNING, __file__, 1, "lost %s", ("w",), None)
    record.__dict__["worker"] = "w"
    record.__dict__["_private"] = 1  # some library's
    assert TextFormatter().format(record).endswith("WARNING cluster: lost w worker=w")
    line = json.loads(JsonFormatter().format(record))
    assert (line["level"], line["message"], line["worker"]) == ("warning", "lost w", "w")
    assert "_private" not in line
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])


def test_a_histogram_puts_a_value_on_a_bound_into_the_bucket_below() -> None:
    histogram = Histogram((1.0, 2.0))
    for observed in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(observed)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.sum == 6.0


def expressions(node: Any) -> list[str]:
    """All PromQL in a dashboard or a rules file."""
    found = []
    if isinstance(node, dict):
        found += [entry for key, entry in node.items() if key in ("expr", "query") and isinstance(entry, str)]
        node = list(node.values())
    if isinstance(node, list):
        found += [expression for entry in node for expression in expressions(entry)]
    return found


def supervised() -> Samples:
    """What a supervisor of two places tells before anybody serves in them."""
    fleet = cast(Processes, None)  # asked only by a supervisor that runs
    roles: dict[str, Role] = {"context-0": "context", "generation-0": "generation"}
    supervisor = Supervisor(fleet, roles, (), Policy(), lambda _: None)
    supervisor.replaced["context-0", "context", "died"] += 1
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in SupervisorCollector(supervisor).collect()
        for sample in family.samples
    }


def test_a_supervisor_tells_which_places_are_empty_and_why_workers_left_them() -> None:
    told = supervised()
    left = (("reason", "died"), ("role", "context"), ("worker", "context-0"))
    assert told["slipstream_worker_replacements_total", left] == 1
    assert told["slipstream_workers_missing", (("role", "generation"),)] == 1
    assert told["slipstream_worker_failures_in_a_row", left[1:]] == 0


async def test_every_metric_that_a_dashboard_or_an_alert_names_exists(split: FakeCluster) -> None:
    await used(split)
    exposed = {name for name, _ in scraped(split)} | {name for name, _ in supervised()}
    files = {path.name: path.read_text() for path in DASHBOARDS.iterdir()}
    assert sorted(files) == ["alerts.yaml", "slipstream.json"]
    for name, text in files.items():
        asked = expressions(yaml.safe_load(text))  # JSON is YAML
        assert len(asked) > 5, name
        named = {metric for expression in asked for metric in re.findall(r"\bslipstream_\w+", expression)}
        assert named <= exposed, name
        assert all(expression.count("(") == expression.count(")") for expression in asked)


MEASURED_ALWAYS = (
    "drafted_decode_tokens_total drafted_decode_steps_total request_acceptance_length_bucket "
    "min_acceptance_length draft_tokens_accepted_total early_decode_tokens_total decode_steps_total "
    "prompt_tokens_computed_total kv_shipped_bytes_total kv_write_seconds_total time_to_first_token_seconds_bucket "
    "inter_token_latency_seconds_bucket requests_within_slo_total pages_in_use slots_in_use transfers_total "
    "requests_total"
)


def test_the_dashboard_shows_all_that_is_measured_always() -> None:
    asked = "\n".join(expressions(json.loads((DASHBOARDS / "slipstream.json").read_text())))
    shown = set(re.findall(r"\bslipstream_(\w+)", asked))
    assert set(MEASURED_ALWAYS.split()) <= shown
    assert "sum by (path)" in asked, "how many prompts the generation workers compute"


def test_what_several_gateways_tell_of_one_worker_is_not_added_up() -> None:
    """Shares come out right all the same."""
    told = [f"slipstream_{name}" for name, *_ in (*metrics._GAUGES, *metrics._COUNTERS, *metrics._SPLIT)]
    for expression in expressions(json.loads((DASHBOARDS / "slipstream.json").read_text())):
        if any(re.search(rf"\b{name}(_total)?\b", expression) for name in told):
            assert "max by (worker" in expression or " / " in expression, expression


async def test_names_and_units_follow_the_convention(split: FakeCluster) -> None:
    await used(split)
    text = Metrics(split.gateway).text().decode()
    assert findings(text) == []
    families = list(text_string_to_metric_families(text))
    assert all(family.name.startswith("slipstream_") for family in families)
    assert len(families) > 30


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# HELP wait_ms Wait\n# TYPE wait_ms gauge\nwait_ms 1\n", "ms abbreviates a unit"),
        ("# HELP wait_minutes Wait\n# TYPE wait_minutes gauge\nwait_minutes 1\n", "use seconds"),
        ("# HELP x_gauge X\n# TYPE x_gauge gauge\nx_gauge 1\n", "its name says its type"),
        ("# HELP seconds_waited X\n# TYPE seconds_waited gauge\nseconds_waited 1\n", "unit is not the last"),
        ("# TYPE x gauge\nx 1\n", "it has no help"),
        ('# HELP x X\n# TYPE x gauge\nx{a="1"} 1\nx{b="1"} 1\n', "different labels"),
        ('# HELP x X\n# TYPE x gauge\nx{request_id="1"} 1\n', "as many values as there are requests"),
        (
            '# HELP lost_by_role X\n# TYPE lost_by_role gauge\nlost_by_role{role="1"} 1\n',
            "part of its name",
        ),
        ("# HELP aB X\n# TYPE aB gauge\naB 1\n", "lower case words"),
    ],
)
def test_a_scrape_that_breaks_the_convention_is_found(text: str, said: str) -> None:
    assert any(said in finding for finding in findings(text)), findings(text)
