"""`slipstream top`: a live view of a cluster. `top_view` is pure: two states and the time between them make a picture.

Rates are differences of two states. A worker that restarted in between counts from zero again, so nothing is shown of
it until the next state.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.display import size, state_of
from cluster.rpc.v1 import admin_pb2

State = admin_pb2.GetClusterStateResponse
_BARS = " ▁▂▃▄▅▆▇█"
_GAUGE_WIDTH = 10


def watch(ask: Callable[[], State], console: Console, interval_s: float, once: bool) -> None:
    """Ask and draw until Ctrl-C. `once` draws one picture, with rates over one interval."""
    before, before_s = ask(), time.monotonic()
    if once:
        time.sleep(interval_s)
        console.print(top_view(ask(), before, time.monotonic() - before_s))
        return
    with Live(top_view(before, None, 0.0), console=console, screen=sys.stdout.isatty()) as live:
        while True:
            time.sleep(interval_s)
            now, now_s = ask(), time.monotonic()
            live.update(top_view(now, before, now_s - before_s), refresh=True)
            before, before_s = now, now_s


def top_view(now: State, before: State | None, elapsed_s: float) -> Group:
    """`elapsed_s` between the two states; without an earlier one there are no rates."""
    earlier = {(worker.name, worker.epoch): worker for worker in before.workers} if before is not None else {}
    return Group(_head(now, before, elapsed_s), _workers(now, earlier, elapsed_s), _positions(now))


def _head(now: State, before: State | None, elapsed_s: float) -> Text:
    finished = _rate(
        now.finished_requests, before.finished_requests if before is not None else None, elapsed_s
    )
    steps, tokens = (sum(getattr(w, name) for w in now.workers) for name in ("decode_steps", "decode_tokens"))
    al = f"{tokens / steps:.2f}" if steps else "–"
    return Text.from_markup(
        f"[bold]{now.model or 'no model yet'}[/] {now.mode}, up {now.uptime_s:.0f} s   "
        f"live [bold]{now.live_requests}[/] of {now.max_live_requests}   "
        f"finished {now.finished_requests} ({finished}/s)   "
        f"failed {'[red]' if now.failed_requests else '[dim]'}{now.failed_requests}[/]   "
        f"acceptance length [bold]{al}[/]"
    )


def _workers(now: State, earlier: dict[tuple[str, str], admin_pb2.Worker], elapsed_s: float) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("worker", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("run+wait", "slots", "target pages", "draft pages", "tok/s", "AL now", "AL", "prompt tok/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("KV/s target + draft", "transfers"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in now.workers:
        old = earlier.get((worker.name, worker.epoch))

        def rate(field: str, worker: admin_pb2.Worker = worker, old: admin_pb2.Worker | None = old) -> str:
            return _rate(getattr(worker, field), getattr(old, field) if old is not None else None, elapsed_s)

        def speed(field: str, worker: admin_pb2.Worker = worker, old: admin_pb2.Worker | None = old) -> str:
            if old is None or not elapsed_s:
                return "–"
            return size(round((getattr(worker, field) - getattr(old, field)) / elapsed_s))

        slots = f"{worker.slots_in_use}/{worker.max_batch}"
        if worker.draft_pages and worker.draft_slots_in_use != worker.slots_in_use:
            slots = f"[bold red]{worker.slots_in_use}≠{worker.draft_slots_in_use}[/]"
        broken = worker.transfers_failed + worker.transfers_expired
        failed = f" [red]+{broken} failed[/]" if broken else ""
        decodes = worker.role != admin_pb2.WORKER_ROLE_CONTEXT
        table.add_row(
            worker.name,
            state_of(worker),
            f"{worker.running}+{worker.waiting}",
            slots,
            _gauge(worker.target_pages_in_use, worker.target_pages),
            _gauge(worker.draft_pages_in_use, worker.draft_pages),
            rate("decode_tokens") if decodes else "",
            f"{worker.acceptance_length_recent:.2f}" if worker.acceptance_length_recent else "–" * decodes,
            f"{worker.acceptance_length:.2f}" if worker.decode_steps else "–" * decodes,
            rate("prompt_tokens_computed"),
            f"{speed('kv_bytes_target')} + {speed('kv_bytes_draft')}",
            f"{worker.transfers} open, {worker.transfers_done} done{failed}",
        )
    return table


def _positions(now: State) -> Table:
    """How often each draft position was accepted: where a broken drafter shows first."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for worker in now.workers:
        shares = [
            accepted / drafted if drafted else 0.0
            for accepted, drafted in zip(worker.accepted_by_position, worker.drafted_by_position, strict=True)
        ]
        if shares:
            percents = " ".join(f"{share:4.0%}" for share in shares)
            table.add_row(f"{worker.name} accepts", f"[green]{bars(shares)}[/]  {percents}")
    return table


def bars(shares: Sequence[float]) -> str:
    """One block per share of 1, its height in eighths; more than nothing is never an empty block."""
    return "".join(_BARS[min(8, max(1, round(share * 8)))] if share > 0 else _BARS[0] for share in shares)


def _gauge(used: int, total: int) -> str:
    if not total:
        return "–"
    filled = min(_GAUGE_WIDTH, -(-used * _GAUGE_WIDTH // total))  # rounded up: one page in use is to be seen
    colour = "red" if used > 0.95 * total else "yellow" if used > 0.8 * total else "cyan"
    return f"[{colour}]{'━' * filled}[/][dim]{'━' * (_GAUGE_WIDTH - filled)}[/] {used}/{total}"


def _rate(now: int, before: int | None, elapsed_s: float) -> str:
    if before is None or not elapsed_s or now < before:
        return "–"
    return f"{(now - before) / elapsed_s:.1f}"
