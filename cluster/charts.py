"""Charts as SVG text: lines over numbers, bars over names. Pure: the same figures give the same text.

y label                            the SVG carries classes, never colours: `STYLE` gives them for light and for dark
  │   ┌ line per series ┐          backgrounds. Each series has a colour, a dash pattern and a marker of its own, so
  │   └─────────────────┘          that no reader needs the colour. A mouse above a marker is told its figures, and
  └──────────── x label            a screen reader the chart's title and description.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 16, 52
_MARKERS = ("circle", "square", "diamond", "triangle", "cross")

STYLE = """
svg { width: 100%; height: auto; font: 13px system-ui, sans-serif; }
svg text { fill: var(--ink); }
svg .tick { fill: var(--faint-ink); font-size: 12px; }
svg .grid { stroke: var(--grid); }
svg .axis { stroke: var(--faint-ink); }
svg .band { fill: var(--band); }
svg .least { stroke: var(--ink); stroke-dasharray: 2 4; }
svg .line { fill: none; stroke-width: 2; }
svg .s0 { stroke: var(--s0); } svg .f0 { fill: var(--s0); }
svg .s1 { stroke: var(--s1); stroke-dasharray: 7 4; } svg .f1 { fill: var(--s1); }
svg .s2 { stroke: var(--s2); stroke-dasharray: 2 3; } svg .f2 { fill: var(--s2); }
svg .s3 { stroke: var(--s3); stroke-dasharray: 9 3 2 3; } svg .f3 { fill: var(--s3); }
svg .s4 { stroke: var(--s4); stroke-dasharray: 4 4; } svg .f4 { fill: var(--s4); }
svg .s0.line { stroke-width: 6; opacity: 0.45; }
"""
"""CSS of the charts; wants the variables --ink, --faint-ink, --grid, --band and --s0 to --s4."""


@dataclass(frozen=True)
class Point:
    """`told` is what a reader above it sees."""

    x: float
    y: float
    told: str = ""


@dataclass(frozen=True)
class Series:
    """`style`: 0 to 4. Style 0 is drawn wide and pale, so that a series that covers it leaves it visible."""

    name: str
    style: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Known:
    """What is expected at each x, and the least that passes."""

    points: tuple[tuple[float, float, float], ...]  # (x, expected, least)


@dataclass(frozen=True)
class Chart:
    """Titles and axis labels, units included. `whole_x`: ticks of x at whole numbers only."""

    title: str
    description: str
    x_label: str
    y_label: str
    whole_x: bool = False


def tick(span: float) -> float:
    """Between two marks of an axis: 1, 2 or 5 times a power of ten, for at most ten of them."""
    rough = span / 10
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def lines(chart: Chart, series: Sequence[Series], known: Known | None = None) -> str:
    """A chart with a line for each series, x and y from their least and from 0 to their most."""
    xs = [point.x for one in series for point in one.points] or [0.0]
    ys = [point.y for one in series for point in one.points]
    ys += [expected for _, expected, _ in known.points] if known is not None else []
    axes = _Axes(min(xs), max(xs), max(ys, default=1.0))
    parts = [*axes.ticks_y(), *axes.ticks_x(chart.whole_x)]
    if known is not None and known.points:
        parts += axes.band(known)
    for one in series:
        parts += axes.line(one)
    return _document(chart, parts, series)


def bars(chart: Chart, groups: Sequence[str], series: Sequence[Series], known: Known | None = None) -> str:
    """A chart with a group of bars for each name; a series' point n is its bar in group n."""
    ys = [point.y for one in series for point in one.points]
    ys += [expected for _, expected, _ in known.points] if known is not None else []
    axes = _Axes(-0.5, len(groups) - 0.5, max(ys, default=1.0))
    parts = list(axes.ticks_y())
    for at, name in enumerate(groups):
        parts.append(
            f"<text class='tick' x='{axes.x(at)}' y='{HEIGHT - _BOTTOM + 18}' {_MIDDLE}>{escape(name)}</text>"
        )
    share = 0.8 / max(len(series), 1)
    for number, one in enumerate(series):
        for point in one.points:
            left, right = (axes.x(point.x - 0.4 + share * (number + side)) for side in (0.06, 0.94))
            top, bottom = axes.y(point.y), axes.y(0.0)
            box = f"x='{left}' y='{top}' width='{round(right - left, 2)}' height='{round(bottom - top, 2)}'"
            parts.append(
                f"<rect class='f{one.style}' {box} rx='2'><title>{escape(point.told)}</title></rect>"
            )
    for x, expected, least in known.points if known is not None else ():
        left, right = axes.x(x - 0.42), axes.x(x + 0.42)
        told = f"<title>reference {expected:.3f}, least that passes {least:.3f}</title>"
        y = axes.y(least)
        parts.append(
            f"<line class='least' x1='{left}' y1='{y}' x2='{right}' y2='{y}' stroke-width='2'>{told}</line>"
        )
    return _document(chart, parts, series, bars=True)


_MIDDLE = "text-anchor='middle'"


class _Axes:
    def __init__(self, left: float, right: float, top: float) -> None:
        self._left = left
        self._right = right if right > left else left + 1.0
        top = top or 1.0  # nothing was accepted at all
        self._step = tick(top) * (1 if top / tick(top) <= 6 else 2)
        self._top = math.ceil(top / self._step + 1e-9) * self._step

    def x(self, value: float) -> float:
        share = (value - self._left) / (self._right - self._left)
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 2)

    def y(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - value / self._top * (HEIGHT - _TOP - _BOTTOM), 2)

    def ticks_y(self) -> Iterator[str]:
        for number in range(round(self._top / self._step) + 1):
            value = number * self._step
            y = self.y(value)
            mark = "grid" if number else "axis"
            yield f"<line class='{mark}' x1='{_LEFT}' y1='{y}' x2='{WIDTH - _RIGHT}' y2='{y}'/>"
            yield f"<text class='tick' x='{_LEFT - 8}' y='{y + 4}' text-anchor='end'>{value:g}</text>"

    def ticks_x(self, whole: bool) -> Iterator[str]:
        step = tick(self._right - self._left)
        step = max(step, 1.0) if whole else step
        for number in range(math.ceil(self._left / step - 1e-9), math.floor(self._right / step + 1e-9) + 1):
            x = self.x(number * step)
            yield f"<text class='tick' x='{x}' y='{HEIGHT - _BOTTOM + 18}' {_MIDDLE}>{number * step:g}</text>"

    def band(self, known: Known) -> Iterator[str]:
        """From what is expected down to the least that passes."""
        above = [(self.x(x), self.y(expected)) for x, expected, _ in known.points]
        below = [(self.x(x), self.y(least)) for x, _, least in known.points]
        corners = " ".join(f"{x},{y}" for x, y in [*above, *reversed(below)])
        told = "<title>reference, down to the least that passes</title>"
        yield f"<polygon class='band' points='{corners}'>{told}</polygon>"
        path = " ".join(f"{x},{y}" for x, y in below)
        yield f"<polyline class='least' fill='none' points='{path}'/>"

    def line(self, series: Series) -> Iterator[str]:
        places = [(self.x(point.x), self.y(point.y), point.told) for point in series.points]
        path = " ".join(f"{x},{y}" for x, y, _ in places)
        yield f"<polyline class='line s{series.style}' points='{path}'/>"
        for x, y, told in places:
            marker = _marker(series.style, x, y)
            yield f"<path class='f{series.style}' d='{marker}'><title>{escape(told)}</title></path>"


def _marker(style: int, x: float, y: float, r: float = 4.0) -> str:
    match _MARKERS[style]:
        case "circle":
            return f"M{x - r},{y}a{r},{r} 0 1,0 {2 * r},0a{r},{r} 0 1,0 {-2 * r},0Z"
        case "square":
            return f"M{x - 3},{y - 3}h6v6h-6Z"
        case "diamond":
            return f"M{x},{y - r}l{r},{r}l{-r},{r}l{-r},{-r}Z"
        case "triangle":
            return f"M{x},{y - r}l{r},{2 * r - 1}h{-2 * r}Z"
        case _:
            return f"M{x - r},{y - 1}h3v-3h2v3h3v2h-3v3h-2v-3h-3Z"


def _document(chart: Chart, parts: Sequence[str], series: Sequence[Series], *, bars: bool = False) -> str:
    middle, left = (_LEFT + WIDTH - _RIGHT) / 2, 16
    height = HEIGHT + 22 * math.ceil(len(series) / 2)
    high = (HEIGHT - _BOTTOM + _TOP) / 2
    turned = f"transform='rotate(-90 {left} {high})'"
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img'>",
            f"<title>{escape(chart.title)}</title><desc>{escape(chart.description)}</desc>",
            *parts,
            f"<text x='{middle}' y='{HEIGHT - 14}' {_MIDDLE}>{escape(chart.x_label)}</text>",
            f"<text x='{left}' y='{high}' {_MIDDLE} {turned}>{escape(chart.y_label)}</text>",
            *_legend(series, bars),
            "</svg>",
        ]
    )


def _legend(series: Sequence[Series], bars: bool) -> Iterator[str]:
    for number, one in enumerate(series):
        x, y = _LEFT + number % 2 * 345, HEIGHT + 4 + number // 2 * 22
        if bars:
            yield f"<rect class='f{one.style}' x='{x + 10}' y='{y - 6}' width='14' height='12' rx='2'/>"
        else:
            yield f"<line class='line s{one.style}' x1='{x}' y1='{y}' x2='{x + 34}' y2='{y}'/>"
            yield f"<path class='f{one.style}' d='{_marker(one.style, x + 17, y)}'/>"
        yield f"<text x='{x + 42}' y='{y + 4}'>{escape(one.name)}</text>"
