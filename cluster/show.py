"""What an evaluation shows a person: progress while it runs, the table at its end."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBars
from rich.table import Table
from rich.text import Text

from cluster.evaluate import Evaluation
from cluster.modes import MODES, Mode
from cluster.prompt_sets import EvalPrompt
from cluster.reference import Reference

_SHOWN_CHARACTERS = 220


class Watch:
    """Progress on a terminal: a bar per mode, and with `prompts` given the growing answers of the first split mode."""

    def __init__(self, console: Console, prompts: list[EvalPrompt] | None = None) -> None:
        self._bars = ProgressBars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._start = self._bars.add_task("starting", total=None)
        self._task = self._start
        self._prompts = prompts or []
        self._answers = ["" for _ in self._prompts]
        self._streaming = False
        self._streamed = False
        self._live = Live(console=console, refresh_per_second=8, get_renderable=self._render, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def starting(self, worker: str, stage: str) -> None:
        self._bars.update(self._start, description=f"{worker}: {stage}")

    def mode(self, mode: Mode, num_prompts: int) -> None:
        if self._task == self._start:
            self._bars.update(self._start, description="cluster started", total=1, completed=1)
        self._streaming = bool(self._prompts) and mode.name == "split" and not self._streamed
        self._streamed = self._streamed or self._streaming
        self._task = self._bars.add_task(mode.title, total=num_prompts)

    def text(self, index: int, text: str) -> None:
        if self._streaming:
            self._answers[index] += text

    def answered(self, index: int) -> None:
        self._bars.advance(self._task)

    def _render(self) -> Group:
        answers = []
        for prompt, answer in zip(self._prompts, self._answers, strict=True):
            if answer:
                asked = " ".join(prompt.text.split())
                shown = " ".join(answer.split())
                answers.append(
                    Text(f"> {asked[:_SHOWN_CHARACTERS]}", style="bold", overflow="ellipsis", no_wrap=True)
                )
                answers.append(Text(f"  {shown[:_SHOWN_CHARACTERS]}", overflow="ellipsis", no_wrap=True))
        return Group(*answers, self._bars)


def table(evaluation: Evaluation) -> Table:
    """The comparison, a row per mode."""
    plan = evaluation.plan
    shown = Table(
        title=f"{plan.cluster.pair}: {len(plan.prompts)} prompts, up to {plan.max_tokens} tokens, {plan.cluster.dtype}",
        caption=_expected(evaluation),
    )
    shown.add_column("mode", min_width=18)
    for heading in (
        "AL",
        "AL, first 8 steps",
        "decode steps",
        "output tokens",
        "prompt tokens computed on generation",
        "KV shipped: target / draft",
        "tokens/s",
    ):
        shown.add_column(heading, justify="right", max_width=12)
    for name, report in evaluation.reports.items():
        mode = next(mode for mode in MODES if mode.name == name)
        shipped = f"{_size(report.kv_bytes_target)} / {_size(report.kv_bytes_draft)}" if mode.split else "–"
        shown.add_row(
            mode.title,
            f"{report.acceptance_length:.3f}",
            f"{report.acceptance_length_first8:.3f}",
            str(report.decode_steps),
            str(report.output_tokens),
            str(report.prompt_tokens_computed_on_generation) if mode.split else "–",
            shipped,
            f"{report.tokens_per_s:.1f}",
        )
    return shown


def _expected(evaluation: Evaluation) -> str | None:
    bounds = evaluation.plan.bounds
    if bounds is None:
        return None
    length, early = bounds.length, bounds.length_first8
    return (
        f"reference for such prompts: AL {length.expected:.3f}, at least {length.least:.3f}; "
        f"first 8 steps {early.expected:.3f}, at least {early.least:.3f}"
    )


def changes(before: Reference | None, after: Reference) -> Table:
    """What an update of a reference changes, a row per prompt set."""
    shown = Table(title=f"{after.pair}, {after.family}, {after.prompt_form}, up to {after.max_tokens} tokens")
    for heading in ("prompts", "requests", "reference AL", "least AL of 64 requests"):
        shown.add_column(heading, justify="left" if heading == "prompts" else "right")
    for name in after.kinds:
        new, old = after.kinds[name], before.kinds.get(name) if before is not None else None
        shown.add_row(
            name.replace("_", " "),
            str(new.requests),
            _change(old.ref_al if old is not None else None, new.ref_al),
            _change(old.min_al if old is not None else None, new.min_al),
        )
    shown.add_row(
        "all, equally",
        str(sum(kind.requests for kind in after.kinds.values())),
        _change(before.ref_al if before is not None else None, after.ref_al),
        _change(before.min_al if before is not None else None, after.min_al),
    )
    return shown


def _change(old: float | None, new: float) -> str:
    return f"{'none' if old is None else f'{old:.3f}'} -> {new:.3f}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:.1f} KiB"
