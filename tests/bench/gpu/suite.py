"""Runs every GPU bench, prints each figure beside its physical limit, writes one JSON file and a PNG per figure.

    python -m tests.bench.gpu.suite [--out bench-gpu] [--only transfer exposed] [--skip load] [--plot FILE.json]

A bench is a module of this package that prints lines `{"figure", "x", "value", "unit", "limit", "ratio"}`. It runs in a
process of its own, so that a bench which fails costs its own figures alone; the suite then ends with status 1. A figure
named "what: which" is the line `which` of the plot `what`. PNGs need matplotlib (the extra `bench`); without it, and
where there is no GPU, `--plot` draws them from the JSON of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

NOT_BENCHES = frozenset({"figures", "kernels", "limits", "shape8b", "suite", "worker"})
FIRST = ("transfer",)


@dataclass(frozen=True)
class Figure:
    """One measured value. `limit` is of the same run; `ratio` is value / limit."""

    figure: str
    x: str | float
    value: float
    unit: str
    limit: float | None = None
    ratio: float | None = None

    @property
    def plot(self) -> str:
        return self.figure.partition(": ")[0]

    @property
    def line(self) -> str:
        return self.figure.partition(": ")[2]


@dataclass(frozen=True)
class Ran:
    """One bench's run: its figures in the order of their lines, and how it ended."""

    bench: str
    seconds: float
    status: int
    figures: tuple[Figure, ...]
    tail: str = ""


def benches() -> list[str]:
    """All benches of this package, those that others wait for first."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    found = [name for name in names if name not in NOT_BENCHES and not name.startswith("_")]
    return sorted(found, key=lambda name: (name not in FIRST, name))


def read_figures(lines: Iterable[str]) -> tuple[Figure, ...]:
    """The lines that are figures; whatever else a bench prints is for people."""
    found: list[Figure] = []
    for line in lines:
        if line.startswith("{"):
            try:
                found.append(Figure(**json.loads(line)))
            except (json.JSONDecodeError, TypeError):
                continue
    return tuple(found)


def run(bench: str, arguments: Sequence[str], timeout_s: float) -> Ran:
    start_s = time.monotonic()
    command = [sys.executable, "-m", f"tests.bench.gpu.{bench}", *arguments]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        overdue = threading.Timer(timeout_s, process.kill)
        overdue.start()
        try:
            for line in process.stdout:
                print(f"    {line}", end="", flush=True)
                lines.append(line)
            status = process.wait()
        finally:
            overdue.cancel()
            process.kill()
    return Ran(bench, round(time.monotonic() - start_s, 1), status, read_figures(lines), "".join(lines[-20:]))


def table(ran: Sequence[Ran]) -> str:
    """Every figure beside its limit, a bench after the other."""
    rows = [("bench", "figure", "x", "value", "limit", "ratio")]
    for one in ran:
        for figure in one.figures:
            limit = "" if figure.limit is None else f"{figure.limit:g}"
            ratio = "" if figure.ratio is None else f"{figure.ratio:.3f}"
            rows.append(
                (one.bench, figure.figure, f"{figure.x}", f"{figure.value:g} {figure.unit}", limit, ratio)
            )
        if one.status != 0:
            rows.append((one.bench, f"ended with status {one.status}", "", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def by_plot(figures: Iterable[Figure]) -> dict[str, list[Figure]]:
    plots: dict[str, list[Figure]] = {}
    for figure in figures:
        plots.setdefault(figure.plot, []).append(figure)
    return plots


def file_name(plot: str) -> str:
    words = "".join(letter if letter.isalnum() else " " for letter in plot.lower()).split()
    return "-".join(words) + ".png"


def draw(plot: str, figures: Sequence[Figure], path: Path) -> None:
    """Lines over numbers, bars over names; limits dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    if all(isinstance(figure.x, int | float) for figure in figures):
        for name in dict.fromkeys(figure.line for figure in figures):
            points = sorted((f for f in figures if f.line == name), key=lambda f: float(f.x))
            xs = [float(point.x) for point in points]
            (line,) = axes.plot(xs, [point.value for point in points], marker="o", label=name or plot)
            if all(point.limit is not None for point in points):
                limits = [point.limit or 0.0 for point in points]
                axes.plot(xs, limits, linestyle="--", color=line.get_color(), alpha=0.6, label="limit")
        axes.set_ylim(bottom=0)
        axes.legend()
    else:
        names = [f"{figure.line} {figure.x}".strip() for figure in figures]
        axes.barh(names, [figure.value for figure in figures])
        for limit in {figure.limit for figure in figures if figure.limit is not None}:
            axes.axvline(limit, linestyle="--", color="black", alpha=0.6)
        axes.invert_yaxis()
    axes.set_title(plot)
    (axes.set_xlabel if not isinstance(figures[0].x, int | float) else axes.set_ylabel)(figures[0].unit)
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def draw_all(ran: Sequence[Ran], out: Path) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no matplotlib (the extra `bench`): no PNGs", file=sys.stderr)
        return
    for one in ran:
        for plot, figures in by_plot(one.figures).items():
            draw(plot, figures, out / file_name(plot))


def load(path: Path) -> list[Ran]:
    return [
        Ran(**{**one, "figures": tuple(Figure(**figure) for figure in one["figures"])})
        for one in json.loads(path.read_text())["benches"]
    ]


def save(ran: Sequence[Ran], path: Path) -> None:
    path.write_text(json.dumps({"benches": [asdict(one) for one in ran]}, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("bench-gpu"))
    parser.add_argument("--only", nargs="+", choices=benches(), default=benches())
    parser.add_argument("--skip", nargs="+", choices=benches(), default=[])
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for one bench")
    parser.add_argument("--plot", type=Path, help="draw the figures of this JSON file and run nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.plot is not None:
        ran = load(options.plot)
    else:
        ran = []
        for bench in options.only:
            if bench not in options.skip:
                print(f"{bench}:", flush=True)
                own = (
                    ["--png", str(options.out / "load.png")] if bench == "load" else []
                )  # all its curves in one
                ran.append(run(bench, own, options.timeout_s))
                save(ran, options.out / "figures.json")
    draw_all(ran, options.out)
    print(table(ran))
    return int(any(one.status != 0 for one in ran))


if __name__ == "__main__":
    sys.exit(main())
