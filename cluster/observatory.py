"""An evaluation's acceptance lengths as one HTML page: pictures, the figures behind them, and which gates failed.

The page is a file of its own: styles and pictures are in it, it loads nothing, and it is readable on light and on dark
backgrounds. `page` is pure; `write` puts it on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from cluster.charts import STYLE, Chart, Known, Point, Series, bars, lines
from cluster.evaluate import Evaluation
from cluster.modes import MODES
from cluster.reference import Bounds
from cluster.report import Answer, ModeReport

FILE_NAME = "index.html"
_LEAST_SHARE = 0.25
"""Of requests that must still run for a step, or that a group must hold, to be drawn."""
_LENGTH_GROUPS = 6
_LEAST_IN_GROUP = 4

_CSS = (
    """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --faint-ink: #5a6470; --grid: #e3e7ec;
  --band: #cfe3d4; --s0: #2f6fc4; --s1: #b4530a; --s2: #a3247a; --s3: #55606e; --s4: #7a5fd0; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e8ebef; --faint-ink: #a3adb9; --grid: #2d343d;
  --band: #24402e; --s0: #74a9f7; --s1: #f0a05a; --s2: #ec86c6; --s3: #b4bfcc; --s4: #b09cff; --bad: #ff8a80; } }
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 60rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 0.2rem; } p { margin: 0.3rem 0 0.8rem; }
.faint { color: var(--faint-ink); } .bad { color: var(--bad); font-weight: 600; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--grid); padding: 0.25rem 0.7rem; text-align: right; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; } summary { cursor: pointer; color: var(--faint-ink); }
.wide { overflow-x: auto; }
"""
    + STYLE
)

_MEANING = (
    "Acceptance length (AL) is the number of tokens emitted by decode steps divided by the number of target decode "
    "steps, summed over requests; the token that prefill emits counts in neither. Modes with a fault injected give the "
    "same text as the others: only these pictures tell them apart."
)


@dataclass(frozen=True)
class _Shown:
    """A mode that drafts, in the order and style in which every picture shows it."""

    title: str
    style: int
    answers: Sequence[Answer]
    report: ModeReport


def write(evaluation: Evaluation, directory: Path) -> Path:
    """Write the page; returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / FILE_NAME
    path.write_text(page(evaluation), encoding="utf-8")
    return path


def page(evaluation: Evaluation) -> str:
    """The whole document."""
    plan = evaluation.plan
    known = [mode for mode in MODES if mode.drafting]
    shown = [
        _Shown(mode.title, style, evaluation.answers[mode.name], evaluation.reports[mode.name])
        for style, mode in enumerate(known)
        if mode.name in evaluation.reports
    ]
    title = f"Acceptance length of {plan.cluster.pair}"
    settings = (
        f"{len(plan.prompts)} prompts, up to {plan.max_tokens} tokens, {plan.cluster.dtype}, "
        f"{plan.cluster.concurrency} at a time, temperature {plan.temperature:g}, "
        f"draft tokens {plan.cluster.draft_tokens}, draft vocabulary {plan.cluster.draft_vocab or 'all'}"
    )
    return "\n".join(
        [
            "<!doctype html>",
            f"<html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>",
            "<meta name='viewport' content='width=device-width, initial-scale=1'>",
            f"<style>{_CSS}</style></head><body><main>",
            f"<h1>{escape(title)}</h1><p class='faint'>{escape(settings)}</p>",
            *_verdict(evaluation),
            *_modes(evaluation),
            *_by_position(shown, plan.bounds),
            *_by_step(shown),
            *_by_prompt_length(shown),
            *_by_kind(shown, evaluation),
            f"<h2>What the figures mean</h2><p>{_MEANING}</p></main></body></html>",
            "",
        ]
    )


def _verdict(evaluation: Evaluation) -> Iterator[str]:
    bounds = evaluation.plan.bounds
    if evaluation.failures:
        said = "".join(f"<li class='bad'>{escape(failure)}</li>" for failure in evaluation.failures)
        yield f"<p class='bad'>{len(evaluation.failures)} gates failed:</p><ul>{said}</ul>"
    else:
        held = "tokens, split against aggregated, leaks"
        held += " and the reference of this pair" if bounds is not None else ""
        yield f"<p>Every gate passed: {held}.</p>"
    if bounds is None:
        yield "<p class='faint'>There is no reference for these prompts and answers: "
        yield "<code>eval --update-reference</code> makes one.</p>"


def _modes(evaluation: Evaluation) -> Iterator[str]:
    titles = {mode.name: mode.title for mode in MODES}
    rows = [
        (
            titles[name],  # type: ignore[index]
            f"{report.acceptance_length:.3f}",
            f"{report.acceptance_length_first8:.3f}",
            f"{report.decode_steps}",
            f"{report.output_tokens}",
            f"{report.kv_bytes_target / 2**20:.1f}",
            f"{report.kv_bytes_draft / 2**20:.1f}",
        )
        for name, report in evaluation.reports.items()
    ]
    heads = (
        "mode",
        "AL",
        "AL, first 8 steps",
        "decode steps",
        "output tokens",
        "target KV shipped, MiB",
        "draft KV, MiB",
    )
    yield _table(heads, rows)


def _by_position(shown: Sequence[_Shown], bounds: Bounds | None) -> Iterator[str]:
    chart = Chart(
        title="Acceptance by draft position",
        description="Share of decode steps in which the draft at each position, and all before it, were accepted.",
        x_label="position in the draft block",
        y_label="accepted, % of steps that drafted it",
        whole_x=True,
    )
    series = [
        Series(
            mode.title,
            mode.style,
            tuple(
                Point(at + 1, 100 * share, f"{mode.title}: draft {at + 1}, {share:.1%}")
                for at, share in enumerate(mode.report.acceptance_by_position)
            ),
        )
        for mode in shown
    ]
    known = None
    if bounds is not None:
        known = Known(
            tuple((at + 1, 100 * b.expected, 100 * b.least) for at, b in enumerate(bounds.positions))
        )
    yield from _section(chart, lines(chart, series, known), series, "position", known is not None)


def _by_step(shown: Sequence[_Shown]) -> Iterator[str]:
    chart = Chart(
        title="Acceptance length over the steps of an answer",
        description="Mean tokens of the n-th decode step after the first token, over the requests still running.",
        x_label="decode steps since the first token",
        y_label="AL, tokens per step",
        whole_x=True,
    )
    series = []
    for mode in shown:
        traced = [answer.step_tokens for answer in mode.answers if answer.step_tokens]
        least = max(_LEAST_SHARE * len(traced), 1)
        points = []
        for step in range(max((len(steps) for steps in traced), default=0)):
            emitted = [steps[step] for steps in traced if step < len(steps)]
            if len(emitted) < least:
                break
            mean = sum(emitted) / len(emitted)
            points.append(
                Point(step + 1, mean, f"{mode.title}: step {step + 1}, {mean:.2f} over {len(emitted)}")
            )
        if points:
            series.append(Series(mode.title, mode.style, tuple(points)))
    note = f"Drawn while at least {_LEAST_SHARE:.0%} of the requests run; a last step may emit less than it could."
    yield from _section(chart, lines(chart, series), series, "step", False, note)


def _by_prompt_length(shown: Sequence[_Shown]) -> Iterator[str]:
    chart = Chart(
        title="Acceptance length over the length of the prompt",
        description="AL of groups of requests with prompts of similar length, at the group's mean length.",
        x_label="prompt length, tokens",
        y_label="AL, tokens per step",
    )
    series = []
    for mode in shown:
        ordered = sorted(mode.answers, key=lambda answer: answer.prompt_tokens)
        count = max(min(_LENGTH_GROUPS, len(ordered) // _LEAST_IN_GROUP), 1)
        edges = [round(len(ordered) * edge / count) for edge in range(count + 1)]
        points = []
        for start, end in pairwise(edges):
            group = ordered[start:end]
            mean = sum(answer.prompt_tokens for answer in group) / len(group)
            al = _al(group)
            first, last = group[0].prompt_tokens, group[-1].prompt_tokens
            points.append(
                Point(
                    mean, al, f"{mode.title}: {len(group)} prompts of {first} to {last} tokens, AL {al:.3f}"
                )
            )
        series.append(Series(mode.title, mode.style, tuple(points)))
    yield from _section(chart, lines(chart, series), series, "mean prompt length", False)


def _by_kind(shown: Sequence[_Shown], evaluation: Evaluation) -> Iterator[str]:
    chart = Chart(
        title="Acceptance length by kind of prompt",
        description="AL of each prompt set, for each mode.",
        x_label="prompt set",
        y_label="AL, tokens per step",
    )
    kinds = list(dict.fromkeys(prompt.kind for prompt in evaluation.plan.prompts))
    names = [kind.replace("_", " ") for kind in kinds]
    series = []
    for mode in shown:
        points = []
        for at, kind in enumerate(kinds):
            al = _al([answer for answer in mode.answers if answer.kind == kind])
            points.append(Point(at, al, f"{mode.title}: {names[at]}, AL {al:.3f}"))
        series.append(Series(mode.title, mode.style, tuple(points)))
    reference, known = evaluation.plan.reference, None
    if reference is not None and evaluation.plan.bounds is not None:
        each = [reference.kinds[kind] for kind in kinds]
        known = Known(tuple((at, kind.ref_al, kind.min_al) for at, kind in enumerate(each)))
    note = (
        "The dashed mark is the least AL that 64 requests of the set may have." if known is not None else ""
    )
    yield from _section(
        chart, bars(chart, names, series, known), series, "prompt set", False, note, lambda x: names[int(x)]
    )


def _al(answers: Sequence[Answer]) -> float:
    steps = sum(answer.decode_steps for answer in answers)
    return sum(answer.decode_tokens for answer in answers) / steps if steps else 0.0


def _section(
    chart: Chart,
    picture: str,
    series: Sequence[Series],
    x_name: str,
    with_band: bool,
    note: str = "",
    said: Callable[[float], str] = lambda x: f"{x:g}" if x == int(x) else f"{x:.1f}",
) -> Iterator[str]:
    """A picture under its title, and its figures for who cannot see it."""
    if with_band:
        note = "The band reaches from the reference down to the least that passes. " + note
    yield f"<section><h2>{escape(chart.title)}</h2><p class='faint'>{escape(f'{chart.description} {note}'.strip())}</p>"
    yield picture
    rows = []
    for x in sorted({point.x for one in series for point in one.points}):
        cells = [next((f"{point.y:.3f}" for point in one.points if point.x == x), "") for one in series]
        rows.append((said(x), *cells))
    yield f"<details><summary>the figures ({escape(chart.y_label)})</summary>"
    yield _table((x_name, *(one.name for one in series)), rows)
    yield "</details></section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
