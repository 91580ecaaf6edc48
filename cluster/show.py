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
        title=f"{plan.cluster.pair}: {len(plan.prompts)} prompts, up to {plan.max_tokens} tokens, {plan.cluster.dtype}"
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


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:.1f} KiB"
