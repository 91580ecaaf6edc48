"""One request seen in times: the gateway's view and its workers' joined, told over the Admin service, drawn as SVG."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.charts import tick
from cluster.cli import cli
from cluster.errors import RequestError
from cluster.picture import draw, seconds
from cluster.recall import join
from cluster.record import RequestRecord
from cluster.timeline import Timeline, WorkerAnswer
from cluster.timeline_messages import timeline_from_proto, timeline_to_proto
from kvmanager.ids import RequestId
from tests.cluster.conftest import FakeCluster, StartCluster
from tests.cluster.fake_worker import FakeHost
from workers.timeline import RequestTimeline, Span, StepMark

SVG = "{http://www.w3.org/2000/svg}"


async def told(cluster: FakeCluster, request_id: str) -> Timeline:
    return timeline_from_proto(await cluster.client.timeline(request_id))


def of(timeline: Timeline, where: str) -> list[str]:
    return [piece.name for piece in timeline.pieces if piece.where == where]


async def test_a_request_is_told_as_gateway_and_workers_saw_it(split: FakeCluster) -> None:
    await split.client.complete("abc", max_tokens=5, client_id="mine")
    timeline = await told(split, "mine")
    assert (timeline.request_id, timeline.route, timeline.outcome) == ("mine", "split", "length")
    assert of(timeline, "gateway") == ["admit", "run"]
    assert of(timeline, "context-0") == ["leg", "queue", "prefill", "transfer"]
    assert of(timeline, "generation-1") == ["leg", "queue", "transfer", "decode"]
    assert timeline.total_s is not None
    assert timeline.first_token_s is not None
    assert 0 < timeline.first_token_s <= timeline.total_s
    for piece in timeline.pieces:
        assert piece.ended_s is not None
        assert -0.01 < piece.began_s <= piece.ended_s < timeline.total_s + 0.01, piece
    assert sum(step.tokens for step in timeline.steps) == 5
    (internal,) = timeline.internal_ids
    assert timeline.transfer_ids == (internal,)  # what a fake worker names it
    assert (await told(split, internal)).request_id == "mine"
    assert (await told(split, "")).request_id == "mine"


async def test_a_request_under_way_is_told_as_far_as_it_got(split: FakeCluster) -> None:
    split.hosts["generation-1"].hold.set()
    asking = asyncio.create_task(split.client.complete("abc", max_tokens=5, client_id="slow"))
    while not split.hosts["context-0"].prefilled:
        await asyncio.sleep(0.005)
    timeline = await told(split, "slow")
    assert (timeline.outcome, timeline.total_s, timeline.first_token_s) == ("", None, None)
    lasting = {(piece.where, piece.name) for piece in timeline.pieces if piece.ended_s is None}
    assert {("gateway", "run"), ("generation-1", "leg"), ("generation-1", "transfer")} <= lasting
    draw(timeline)
    split.hosts["generation-1"].hold.clear()
    await asking


async def test_a_replayed_request_shows_both_runs_and_why_the_first_broke(
    start_cluster: StartCluster,
) -> None:
    broken, sound = FakeHost("aggregated", error_after=3), FakeHost("aggregated")
    cluster = await start_cluster(broken, sound, route="aggregated")
    while not broken.seen:
        await cluster.client.complete("abc", max_tokens=8, client_id="twice")
    timeline = await told(cluster, "twice")
    runs = [piece for piece in timeline.pieces if piece.name == "run"]
    assert [run.run for run in runs] == [1, 2]
    assert "the engine broke" in runs[0].detail
    assert runs[1].detail == ""
    assert len(set(timeline.internal_ids)) == 2
    assert {piece.run for piece in timeline.pieces if piece.where == "aggregated-1"} == {2}


async def test_a_worker_that_is_gone_is_left_out_and_an_unknown_id_refused(split: FakeCluster) -> None:
    await split.client.complete("abc", max_tokens=5, client_id="mine")
    await split.servers["context-0"].stop()
    assert of(await told(split, "mine"), "context-0") == ["leg"]
    with pytest.raises(RequestError) as refused:
        await split.client.timeline("yours")
    assert (refused.value.code, refused.value.field) == ("NOT_FOUND", "request_id")
    with pytest.raises(RequestError) as too_long:
        await split.client.complete("abc", client_id="x" * 2000)
    assert (too_long.value.field, too_long.value.limit) == ("request_id", "1024")


def sample() -> Timeline:
    """Two workers whose clocks differ from the gateway's by hours."""
    record = RequestRecord("a <b> & c", "split", 100.0)
    run = record.run_begins(RequestId("i"), 100.5)
    run.transfer_id = "t"
    run.leg_begins("generation-0", "generation", 100.5)
    run.leg_begins("context-0", "context", 101.0)
    run.leg_ends("context-0", 103.0)
    run.end(110.0)
    record.first_chunk_s, record.outcome, record.ended_s = 103.5, "stop", 110.0
    spans = (
        Span(name="queue", began_s=7001.0, ended_s=7001.5),
        Span(name="prefill", began_s=7001.5, ended_s=7003.0, counts=(("first_position", 0), ("tokens", 64))),
    )
    timeline = RequestTimeline(request_id=RequestId("i"), outcome="shipped", spans=spans)
    context = WorkerAnswer(run=RequestId("i"), worker="context-0", ahead_s=-6900.0, timeline=timeline)
    decode = (Span(name="decode", began_s=3.5, ended_s=10.0, counts=(("steps", 2), ("tokens", 5))),)
    steps = (StepMark(3.5, 1), StepMark(6.0, 4))
    timeline = RequestTimeline(request_id=RequestId("i"), outcome="stop", spans=decode, steps=steps)
    generation = WorkerAnswer(run=RequestId("i"), worker="generation-0", ahead_s=100.0, timeline=timeline)
    return join(record, [context, generation], unix_ahead_s=1e9)


def test_workers_times_are_shifted_onto_the_gateways_clock() -> None:
    timeline = sample()
    began = {(piece.where, piece.name): piece.began_s for piece in timeline.pieces}
    assert began[("context-0", "queue")] == 1.0
    assert began[("context-0", "prefill")] == 1.5
    assert began[("generation-0", "decode")] == 3.5
    assert [step.at_s for step in timeline.steps] == [3.5, 6.0]
    assert (timeline.arrived_unix_s, timeline.total_s) == (1e9 + 100.0, 10.0)
    assert timeline_from_proto(timeline_to_proto(timeline)) == timeline


def test_the_picture_is_sound_svg_with_a_bar_per_span_in_the_right_place() -> None:
    timeline = sample()
    root = ElementTree.fromstring(draw(timeline))
    assert root.tag == f"{SVG}svg"
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "request a <b> & c" in texts
    assert texts.index("gateway") < texts.index("generation-0") < texts.index("context-0")
    titles = {title.text or "": bar for bar in root.iter(f"{SVG}rect") for title in bar.iter(f"{SVG}title")}
    assert len(titles) == len(timeline.pieces) + len(timeline.steps)
    (chunk,) = [bar for title, bar in titles.items() if "tokens 64" in title]
    (run,) = [bar for title, bar in titles.items() if title.startswith("run:")]
    left, width = float(run.attrib["x"]), float(run.attrib["width"])
    scale = width / 9.5  # the run lasts from 0.5 to 10 s
    assert float(chunk.attrib["x"]) == pytest.approx(left + 1.0 * scale, abs=0.1)
    assert float(chunk.attrib["width"]) == pytest.approx(1.5 * scale, abs=0.1)
    assert draw(timeline) == draw(timeline)


@pytest.mark.parametrize("end_s", [1e-6, 0.004, 0.01, 0.37, 1.0, 9.99, 60.0, 86_400.0])
def test_the_axis_has_some_marks_and_never_many(end_s: float) -> None:
    assert 3 <= end_s / tick(end_s) <= 10.0001


def test_short_times_are_told_in_milliseconds() -> None:
    assert [seconds(value) for value in (0.0, 0.0123, 0.5, 1.0, 12.34)] == [
        "0 ms",
        "12.3 ms",
        "500 ms",
        "1 s",
        "12.3 s",
    ]


async def test_the_command_draws_a_file_and_says_what_it_shows(split: FakeCluster, tmp_path: Path) -> None:
    await split.client.complete("abc", max_tokens=5, client_id="dir/name")
    path = tmp_path / "out.svg"
    command = ["trace", "dir/name", "--server", split.address, "-o", str(path)]
    result = await asyncio.to_thread(CliRunner().invoke, cli, command)
    assert result.exit_code == 0, result.output
    assert "request dir/name, length after" in result.output
    assert ElementTree.fromstring(path.read_text()).tag == f"{SVG}svg"
    command = ["trace", "--server", split.address, "-o", "-"]
    result = await asyncio.to_thread(CliRunner().invoke, cli, command)
    assert result.output.startswith("<svg ")
    command = ["trace", "--server", split.address, "-o", str(tmp_path / "out.png")]
    result = await asyncio.to_thread(CliRunner().invoke, cli, command)
    assert (result.exit_code, "name a .svg file" in result.output) == (2, True)
    assert not (tmp_path / "out.png").exists()
