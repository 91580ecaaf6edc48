"""The command `slipstream trace`."""

from __future__ import annotations

import re
from pathlib import Path

import click

from cluster.access import Access
from cluster.cli import server_options
from cluster.picture import draw, seconds


@click.command("trace")
@click.argument("request_id", required=False, default="")
@click.option("--output", "-o", help="Where the SVG goes; - is standard output. Default: trace-ID.svg.")
@click.option("--json", "as_json", is_flag=True, help="Print the timeline as JSON and draw nothing.")
@server_options
def trace_command(request_id: str, output: str | None, as_json: bool, server: str, access: Access) -> None:
    """Draw the timeline of a request of late, finished or under way; the latest one without an ID.

    The ID is the one that the client chose or got (x-request-id over HTTP), or an internal one from a log line.
    """
    if output is not None and Path(output).suffix not in ("", ".svg"):
        raise click.BadParameter("the picture is SVG: name a .svg file", param_hint="--output")
    from google.protobuf.json_format import MessageToJson

    from cluster.client import Client
    from cluster.timeline_messages import timeline_from_proto

    with Client(server, access) as client:
        message = client.timeline(request_id)
    if as_json:
        click.echo(MessageToJson(message, preserving_proto_field_name=True, indent=None))
        return
    timeline = timeline_from_proto(message)
    picture = draw(timeline)
    if output == "-":
        click.echo(picture, nl=False)
        return
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", timeline.request_id)[:80]
    path = Path(output or f"trace-{safe}.svg")
    path.write_text(picture, encoding="utf-8")
    total = (
        "under way" if timeline.total_s is None else f"{timeline.outcome} after {seconds(timeline.total_s)}"
    )
    runs = len(timeline.internal_ids)
    click.echo(f"{path}: request {timeline.request_id}, {total}, {runs} run{'s' if runs != 1 else ''}")
