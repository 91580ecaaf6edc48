"""The command `slipstream plan`: what a pair's KV takes of one rank's memory, before anything is loaded.

The weights of a served target are told too; they lie beside that memory.

Reads two config.json files and nothing else; of a target with a drafter inside its checkpoint, the tensors' names too,
since they alone tell how many layers it has. Exits with 1 when the pair would not start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from drafter.embedded import is_embedded, num_stages, stage_tensors
from drafter.errors import DrafterCheckpointError
from kvmanager.errors import KvError
from kvmanager.layout import KvGeometry
from kvmanager.shape import ELEMENT_BYTES, KvShape
from kvmanager.sizing import Sizing, SizingRequest, size
from kvmanager.weights import RankWeights, WeightDivision, rank_weights

GIB = 1 << 30


@click.command("plan")
@click.option(
    "--model", required=True, type=click.Path(path_type=Path), help="The target's directory or config.json."
)
@click.option("--drafter", type=click.Path(path_type=Path), help="The drafter's directory or config.json.")
@click.option("--max-seq-len", required=True, type=click.IntRange(min=1), help="Prompt and output together.")
@click.option(
    "--max-batch",
    required=True,
    type=click.IntRange(min=1),
    help="Requests decoded at once, on each rank with --attention-dp.",
)
@click.option(
    *("--tp", "--tensor-parallel-size", "tp"),
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Ranks of a worker.",
)
@click.option("--attention-dp", is_flag=True, help="Every rank keeps all KV heads of its own requests.")
@click.option("--expert-parallel", is_flag=True, help="Every rank keeps whole experts, its share of them.")
@click.option("--memory-gib", required=True, type=float, help="Memory of one rank for everything KV.")
@click.option("--page-size", default=16, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--dtype", type=click.Choice(sorted(ELEMENT_BYTES)), help="KV dtype; else each checkpoint's own."
)
@click.option(
    "--staging-mib", default=0.0, show_default=True, type=click.FloatRange(min=0), help="Transfer buffers."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(
    model: Path, drafter: Path | None, memory_gib: float, staging_mib: float, as_json: bool, **options: Any
) -> None:
    """Say what target and drafter take of one rank's memory, and whether they start in it."""
    if not 0 < memory_gib < 1 << 30:
        raise click.BadParameter("must be positive", param_hint="--memory-gib")
    try:
        sizing = size(
            SizingRequest(
                target=read_shape(model),
                drafter=read_shape(drafter) if drafter is not None else read_embedded_shape(model),
                max_seq_len=options["max_seq_len"],
                max_batch=options["max_batch"],
                tensor_parallel=options["tp"],
                attention_dp=options["attention_dp"],
                budget_bytes=max(int(memory_gib * GIB), 1),
                page_size=options["page_size"],
                dtype=options["dtype"],
                staging_bytes=int(staging_mib * (1 << 20)),
            )
        )
        weights = rank_weights(
            _read_config(model)[1],
            WeightDivision(
                num_ranks=options["tp"],
                attention_dp=options["attention_dp"],
                expert_parallel=options["expert_parallel"],
            ),
        )
    except KvError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(as_dict(sizing) | {"target_weights": _weight_bytes(sizing, weights)}))
    else:
        _show(sizing)
        _show_weights(_weight_bytes(sizing, weights))
    if not sizing.starts:
        sys.exit(1)


def read_shape(path: Path) -> KvShape:
    """The KV shape of a checkpoint, from its directory or its config.json. Raises ClickException."""
    file, config = _read_config(path)
    try:
        return KvShape.from_config(config)
    except KvError as error:
        raise click.ClickException(f"{file}: {error}") from error


def read_embedded_shape(path: Path) -> KvShape | None:
    """The KV shape of the drafter inside a target; None without one. Raises ClickException."""
    file, config = _read_config(path)
    if not is_embedded(config):
        return None
    if not path.is_dir():
        raise click.ClickException(
            f"{file} speaks of a drafter inside the checkpoint, whose tensors tell how many layers it has: "
            "give the checkpoint's directory, or a drafter"
        )
    try:
        return KvShape.embedded(config, num_stages(path, stage_tensors(path)))
    except (KvError, DrafterCheckpointError) as error:
        raise click.ClickException(str(error)) from error


def _read_config(path: Path) -> tuple[Path, dict[str, Any]]:
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".gguf":
        raise click.ClickException(f"{file}: plan reads a config.json; give the checkpoint's, or one like it")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise click.ClickException(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise click.ClickException(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise click.ClickException(f"{file}: expected an object, got {type(config).__name__}")
    return file, config


def as_dict(sizing: Sizing) -> dict[str, Any]:
    """The machine-readable plan. All sizes are of one rank; pages leave out the dummy page."""
    request, demand, plan = sizing.request, sizing.demand, sizing.plan
    draft = demand.draft
    return {
        "starts": sizing.starts,
        "reason": sizing.reason,
        "max_seq_len": request.max_seq_len,
        "max_batch": request.max_batch,
        "tp": request.tensor_parallel,
        "attention_dp": request.attention_dp,
        "page_size": request.page_size,
        "lookahead": demand.limits.lookahead,
        "budget_bytes": request.budget_bytes,
        "least_bytes": demand.least_bytes,
        "bytes_per_token": demand.bytes_per_token,
        "target": _pool(demand.target, plan.num_target_pages if plan else 0),
        "drafter": None if draft is None else _pool(draft, plan.num_draft_pages if plan else 0),
        "fixed_bytes": demand.fixed_bytes,
        "table_bytes": demand.table_bytes,
        "staging_bytes": demand.staging_bytes,
        "total_bytes": plan.total_bytes if plan else 0,
        "tokens_that_fit": plan.num_tokens if plan else 0,
        "requests_of_max_seq_len": sizing.full_requests,
        "dense_arena_bytes": sizing.arena_bytes,
        "dense_arena_gib": round(sizing.arena_bytes / GIB, 2),
        "notes": list(sizing.notes),
    }


def _pool(geometry: KvGeometry, num_pages: int) -> dict[str, int | None]:
    return {
        "window": geometry.window,
        "bytes_per_token": geometry.bytes_per_token,
        "layers": geometry.num_layers,
        "kv_heads_per_rank": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "page_bytes": geometry.page_bytes,
        "pages": max(num_pages - 1, 0),
        "pool_bytes": num_pages * geometry.page_bytes,
    }


def _show(sizing: Sizing) -> None:
    request, demand, plan = sizing.request, sizing.demand, sizing.plan
    ranks = request.tensor_parallel
    title = f"KV of each of {ranks} ranks" if ranks > 1 else "KV of one rank"
    table = Table(title=title, title_justify="left")
    for heading in ("", "bytes/token", "pages", "GiB"):
        table.add_column(heading, justify="left" if not heading else "right")
    pools = [("target", demand.target, plan.num_target_pages if plan else 0)]
    if demand.draft is not None:
        pools.append(("drafter", demand.draft, plan.num_draft_pages if plan else 0))
    for name, geometry, num_pages in pools:
        table.add_row(
            name,
            f"{geometry.bytes_per_token:,}",
            f"{num_pages - 1:,}" if plan else "-",
            _gib(num_pages * geometry.page_bytes) if plan else "-",
        )
    table.add_row("tables, staging", "", "", _gib(demand.table_bytes + demand.staging_bytes))
    total = _gib(plan.total_bytes) if plan else "-"
    table.add_row("together", f"{demand.bytes_per_token:,}", "", f"{total} of {_gib(request.budget_bytes)}")
    console = Console(highlight=False)
    console.print(table)
    if demand.draft is not None:
        console.print(
            f"a dense draft arena ({request.max_batch} requests + 1 dummy) x {request.max_seq_len:,} tokens would "
            f"take {_gib(sizing.arena_bytes)} GiB; paged, only tokens in use take memory",
            soft_wrap=True,
        )
    for note in sizing.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    if plan is not None:
        console.print(
            f"[green]starts[/]: {plan.num_tokens:,} tokens fit, or {sizing.full_requests} requests of "
            f"max_seq_len {request.max_seq_len:,} at once",
            soft_wrap=True,
        )
    else:
        console.print("[bold red]does not start[/]:", end=" ")
        console.print(sizing.reason, markup=False, soft_wrap=True)


def _weight_bytes(sizing: Sizing, weights: RankWeights | None) -> dict[str, int] | None:
    """Of one rank; None for a target that is not served."""
    if weights is None:
        return None
    element_bytes = ELEMENT_BYTES[sizing.request.dtype or sizing.request.target.dtype]
    return {
        "total_bytes": (weights.of_experts + weights.others) * element_bytes,
        "expert_bytes": weights.of_experts * element_bytes,
    }


def _show_weights(weights: dict[str, int] | None) -> None:
    if weights is None:
        return
    experts = f", {_gib(weights['expert_bytes'])} GiB of it experts" if weights["expert_bytes"] else ""
    Console(highlight=False).print(
        f"beside this memory: {_gib(weights['total_bytes'])} GiB of the target's weights on each rank{experts}",
        soft_wrap=True,
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.2f}"
