"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from cluster.doctor import Finding
from cluster.rpc.v1 import admin_pb2

_MARKS = {"ok": "[green]✓[/]", "warn": "[yellow]![/]", "fail": "[bold red]✗[/]"}
_STATES = {
    admin_pb2.WORKER_STATE_JOINING: "[yellow]joining[/]",
    admin_pb2.WORKER_STATE_READY: "[green]ready[/]",
    admin_pb2.WORKER_STATE_SUSPECT: "[red]suspect[/]",
    admin_pb2.WORKER_STATE_DRAINING: "[blue]draining[/]",
}


def state_of(worker: admin_pb2.Worker) -> str:
    """A worker's state in a word or two, coloured."""
    ready = worker.state == admin_pb2.WORKER_STATE_READY
    lonely = worker.HasField("peers") and not worker.peers.names  # an older gateway says nothing of peers
    if ready and lonely and worker.role != admin_pb2.WORKER_ROLE_AGGREGATED:
        return "[yellow]ready, no peer[/]"
    return _STATES.get(worker.state, "?")


def status_table(state: admin_pb2.GetClusterStateResponse) -> Group:
    """One line of the gateway, one row per worker."""
    head = Text.from_markup(
        f"[bold]{state.model or 'no model yet'}[/], {state.mode}; up {state.uptime_s:.0f} s; "
        f"{state.live_requests} of {state.max_live_requests} live, {state.finished_requests} finished, "
        f"{state.failed_requests} failed"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("worker", "state"):
        table.add_column(name)
    for name in ("run+wait", "slots", "pages", "AL", "prompt", "KV shipped", "transfers"):
        table.add_column(name, justify="right")
    for worker in state.workers:
        broken = worker.transfers_failed + worker.transfers_expired
        failed = f", {broken} failed" if broken else ""
        table.add_row(
            worker.name,
            state_of(worker),
            f"{worker.running}+{worker.waiting}",
            f"{worker.slots_in_use} / {worker.draft_slots_in_use}",
            f"{worker.target_pages_in_use} / {worker.draft_pages_in_use} of {worker.target_pages}",
            f"{worker.acceptance_length:.2f}" if worker.decode_steps else "–",
            f"{worker.prompt_tokens_computed}",
            f"{size(worker.kv_bytes_target)} / {size(worker.kv_bytes_draft)}",
            f"{worker.transfers_done}{failed}",
        )
    table.caption = "slots, pages and KV: target / draft; prompt: tokens computed here"
    table.caption_justify = "left"
    return Group(head, table)


def findings_table(findings: Sequence[Finding]) -> Table:
    """One row per finding, with what to do below those that need it."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    table.add_column()
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for finding in findings:
        detail = Text(finding.detail)
        if finding.remedy:
            detail.append(f"\n→ {finding.remedy}", style="italic")
        table.add_row(Text.from_markup(_MARKS[finding.level]), finding.name, detail)
    return table


def size(num_bytes: int) -> str:
    """Bytes in the largest binary unit that leaves a number of at least 1."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
