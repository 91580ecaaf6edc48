"""The commands `slipstream eval` and `slipstream demo`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from cluster import observatory
from cluster.cli import number_or_text
from cluster.evaluate import Evaluation, EvaluationPlan, evaluate
from cluster.modes import MODES, EvaluationCluster, parse_modes
from cluster.prompt_sets import EvalPrompt, builtin_prompts, file_prompts, task_prompts
from cluster.reference import Reference, measure
from cluster.reference_files import PROMPT_FORM, facts_of, reference_of, write_reference
from cluster.show import Watch, changes, table
from workers.config import DraftPolicy
from workers.errors import InvalidRequest

# Narrower than this the comparison loses columns; a narrow terminal had better wrap its lines.
_TABLE_WIDTH = 118

ALL_MODES = ",".join(mode.name for mode in MODES)
DEMO_PROMPTS = 8
DEMO_TOKENS = 24


class DraftTokens(click.ParamType[Any]):
    """`full`, `adaptive`, or a number of draft tokens per step."""

    name = "full|adaptive|N"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> DraftPolicy | int:
        if value in ("full", "adaptive"):
            policy: DraftPolicy = value
            return policy
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither full, adaptive nor a number", param, ctx)


@click.command("eval")
@click.option(
    "--pair", default="smollm2", show_default=True, help="Built-in pair or TARGET_PATH:DRAFTER_PATH."
)
@click.option("--modes", default=ALL_MODES, show_default=True, help="Comma-separated modes to compare.")
@click.option(
    "--prompts",
    default="32",
    show_default=True,
    help="How many built-in prompts (evenly from the sets), or a JSONL file.",
)
@click.option(
    "--task",
    type=click.Path(path_type=Path),
    help="JSONL file of `question`/`answer` lines: adds exact-match accuracy.",
)
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "float64", "bfloat16", "float16"]),
)
@click.option(
    "--concurrency",
    default=8,
    show_default=True,
    type=click.IntRange(min=1),
    help="Requests at a time; with 1, decode steps must be identical.",
)
@click.option(
    "--draft-tokens", default="full", show_default=True, type=DraftTokens(), help="Draft tokens per step."
)
@click.option(
    "--draft-vocab",
    default="0",
    callback=number_or_text,
    help="Tokens that the drafter may say: so many, or those in a file; 0 is all.",
)
@click.option("--max-seq-len", default=1024, show_default=True, type=click.IntRange(min=2))
@click.option("--temperature", default=0.0, show_default=True, type=float)
@click.option("--seed", default=0, show_default=True, type=int)
@click.option("--min-al", type=float, help="Fail when the AL of aggregated or split is under this.")
@click.option(
    "--reference-accuracy",
    type=float,
    help="Accuracy in percent that --task is held against; target_only's own if not given.",
)
@click.option(
    "--reference/--no-reference",
    "use_reference",
    default=True,
    show_default=True,
    help="Fail when acceptance is under what is known of the pair, where it is known for such prompts and answers.",
)
@click.option(
    "--update-reference",
    is_flag=True,
    help="Make this run what is known of the pair, if it passes all other gates.",
)
@click.option(
    "--report",
    "report_directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write a page with pictures of the acceptance length into this directory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def eval_command(
    as_json: bool, update_reference: bool, report_directory: Path | None, **options: Any
) -> None:
    """Compare modes on the same prompts: tokens, acceptance length, bytes shipped, leaks."""
    if update_reference:
        _check_updating(options)
        options["use_reference"] = False
    plan = _plan(**options)
    progress = Console(stderr=True)
    with Watch(progress) as watch:
        evaluation = asyncio.run(evaluate(plan, watch))
    if report_directory is not None:
        progress.print(f"written: {observatory.write(evaluation, report_directory)}", highlight=False)
    if update_reference and not evaluation.failures:
        _update(evaluation)
    _finish(evaluation, as_json)


def _check_updating(options: dict[str, Any]) -> None:
    """A reference is of greedy answers, all drafts verified, any token drafted. Raises InvalidRequest for others."""
    for field, needed in (("temperature", 0.0), ("draft_tokens", "full"), ("draft_vocab", 0)):
        if options[field] != needed:
            raise InvalidRequest(
                f"--update-reference needs {field} {needed}, not {options[field]}",
                field=field,
                limit=str(needed),
            )
    facts_of(options["pair"])


def _update(evaluation: Evaluation) -> None:
    """Write the reference that the evaluation's answers make, and say what was before."""
    plan, pair = evaluation.plan, evaluation.plan.cluster.pair
    answers = evaluation.answers.get("split") or evaluation.answers.get("aggregated")
    if answers is None:
        raise InvalidRequest("--update-reference needs the mode split or aggregated", field="modes")
    family, drafter = facts_of(pair)
    before: Reference | None = reference_of(pair, plan.max_tokens)
    try:
        reference = measure(
            plan.prompts,
            answers,
            pair=pair,
            family=family,
            drafter=drafter,
            prompt_form=PROMPT_FORM,
            max_tokens=plan.max_tokens,
        )
    except ValueError as error:
        raise InvalidRequest(f"--update-reference: {error}", field="prompts") from error
    path = write_reference(reference)
    console = Console()
    console.print(changes(before, reference))
    console.print(f"written: {path}", highlight=False)


@click.command("demo")
@click.option("--pair", default="smollm2", show_default=True)
@click.option("--max-tokens", default=DEMO_TOKENS, show_default=True, type=click.IntRange(min=1))
@click.option("--concurrency", default=1, show_default=True, type=click.IntRange(min=1))
def demo_command(pair: str, max_tokens: int, concurrency: int) -> None:
    """Show what a drafter's context is worth: 8 prompts through all modes of a split cluster."""
    plan = _plan(
        pair=pair, modes=ALL_MODES, prompts=str(DEMO_PROMPTS), max_tokens=max_tokens, concurrency=concurrency
    )
    with Watch(Console(), list(plan.prompts)) as watch:
        evaluation = asyncio.run(evaluate(plan, watch))
    _finish(evaluation, as_json=False)


def _plan(
    *,
    pair: str,
    modes: str,
    prompts: str,
    max_tokens: int,
    concurrency: int,
    task: Path | None = None,
    dtype: Any = "float32",
    draft_tokens: DraftPolicy | int = "full",
    draft_vocab: int | str = 0,
    max_seq_len: int = 1024,
    temperature: float = 0.0,
    seed: int = 0,
    min_al: float | None = None,
    use_reference: bool = True,
    reference_accuracy: float | None = None,
) -> EvaluationPlan:
    return EvaluationPlan(
        cluster=EvaluationCluster(
            pair=pair,
            dtype=dtype,
            draft_tokens=draft_tokens,
            draft_vocab=draft_vocab,
            concurrency=concurrency,
            max_seq_len=max_seq_len,
        ),
        modes=parse_modes(modes),
        prompts=task_prompts(task) if task is not None else _prompts(prompts),
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        min_al=min_al,
        reference=reference_of(pair, max_tokens) if use_reference else None,
        reference_accuracy=reference_accuracy,
    )


def _prompts(source: str) -> list[EvalPrompt]:
    if source.isdecimal():
        return builtin_prompts(int(source))
    path = Path(source)
    if not path.exists():
        raise InvalidRequest(
            f"--prompts {source!r} is neither a number nor a file: give how many built-in prompts, or a JSONL file",
            field="prompts",
        )
    return file_prompts(path)


def _finish(evaluation: Evaluation, as_json: bool) -> None:
    console = Console(width=max(Console().width, _TABLE_WIDTH))
    console.print(table(evaluation))
    for failure in evaluation.failures:
        console.print(f"FAILED {failure}", style="bold red", markup=False, highlight=False)
    if as_json:
        print(json.dumps(evaluation.json()), flush=True)
    if evaluation.failures:
        sys.exit(1)
