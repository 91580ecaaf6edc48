"""A request's timeline as an SVG picture. Pure: the same timeline gives the same text.

    ┌ title: ids, outcome, seconds ────────────────────────────────┐
    │ gateway        ▒▒ admit │ run 1 ─────────┐│ run 2 ──────────  │
    │ context-0      ·leg··············                             │
    │   prefill       ████ ████ ██                                  │
    │   transfer           ─────────                                │
    │ generation-0   ·leg······················                     │
    │   decode                      ▂▁▃▂▂▃▁                         │
    └ seconds ─────────────────────────────────────────────────────┘

One row per kind of span and place, in the order in which they begin. A bar tells its figures to a mouse above it. Steps
are drawn as ticks as high as the tokens that they emitted. What has not ended yet reaches to the right edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from cluster.charts import tick
from cluster.timeline import GATEWAY, Piece, Step, Timeline

WIDTH = 1080
_LEFT, _RIGHT, _TOP = 190, 24, 84
_ROW, _BAR, _GAP = 26, 16, 10
_COLOURS = {
    "admit": "#b8b8b8",
    "run": "#6b7a8f",
    "leg": "#e9edf2",
    "queue": "#e0b04c",
    "prefill": "#3b7dd8",
    "transfer": "#9b59b6",
    "decode": "#2f9e6e",
}
_OTHER = "#888888"
_ORDER = ("admit", "run", "leg", "queue", "prefill", "transfer", "decode")
_FONT = "font-family='system-ui, sans-serif' font-size='12'"


@dataclass(frozen=True)
class _Row:
    """Pieces of one name at one place. The legs of a place are its heading."""

    where: str
    name: str
    pieces: tuple[Piece, ...]
    steps: tuple[Step, ...] = ()


def draw(timeline: Timeline) -> str:
    """A whole SVG document."""
    rows = _rows(timeline)
    end_s = _end_s(timeline)
    height = _TOP + sum(_height(row) for row in rows) + 40
    canvas = _Canvas(end_s, height)
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' "
        f"viewBox='0 0 {WIDTH} {height}' {_FONT}>",
        f"<rect width='{WIDTH}' height='{height}' fill='#ffffff'/>",
        *_title(timeline),
        *canvas.axis(),
    ]
    y = _TOP
    for row in rows:
        y += _GAP if row.name in ("leg", "admit") else 0
        parts += canvas.row(row, y)
        y += _ROW
    if timeline.first_token_s is not None:
        parts += canvas.mark(timeline.first_token_s, "first token")
    return "\n".join([*parts, "</svg>", ""])


class _Canvas:
    def __init__(self, end_s: float, height: int) -> None:
        self._end_s = end_s
        self._height = height

    def x(self, at_s: float) -> float:
        share = min(max(at_s / self._end_s, 0.0), 1.0)
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 2)

    def axis(self) -> Iterator[str]:
        bottom = self._height - 30
        step_s = tick(self._end_s)
        for number in range(int(self._end_s / step_s + 1e-9) + 1):
            x = self.x(number * step_s)
            yield f"<line x1='{x}' y1='{_TOP - 6}' x2='{x}' y2='{bottom}' stroke='#eeeeee'/>"
            label = seconds(number * step_s)
            yield f"<text x='{x}' y='{bottom + 16}' fill='#666666' text-anchor='middle'>{label}</text>"

    def mark(self, at_s: float, label: str) -> Iterator[str]:
        x = self.x(at_s)
        yield (
            f"<line x1='{x}' y1='{_TOP - 10}' x2='{x}' y2='{self._height - 30}' stroke='#c0392b' "
            "stroke-dasharray='3 3'/>"
        )
        yield (
            f"<text x='{x}' y='{_TOP - 14}' fill='#c0392b' text-anchor='middle'>{label} {seconds(at_s)}</text>"
        )

    def row(self, row: _Row, y: int) -> Iterator[str]:
        heading = row.name in ("leg", "admit")
        label = row.where if heading else row.name
        colour, weight = ("#222222", " font-weight='600'") if heading else ("#555555", "")
        x = 16 if heading else 32
        yield f"<text x='{x}' y='{y + 13}' fill='{colour}'{weight}>{escape(label)}</text>"
        for piece in row.pieces:
            yield self._bar(piece, y)
        most = max((step.tokens for step in row.steps), default=1)
        for step in row.steps:
            high = round(_BAR * step.tokens / most, 2)
            where = f"x='{self.x(step.at_s)}' y='{round(y + _BAR - high, 2)}' width='1.5' height='{high}'"
            told = f"{step.tokens} tokens at {seconds(step.at_s)}"
            yield f"<rect {where} fill='#14532d'><title>{told}</title></rect>"

    def _bar(self, piece: Piece, y: int) -> str:
        ended_s = self._end_s if piece.ended_s is None else piece.ended_s
        left, right = self.x(piece.began_s), self.x(ended_s)
        width = max(round(right - left, 2), 1.0)
        colour = _COLOURS.get(piece.name, _OTHER)
        faint = " fill-opacity='0.45'" if piece.name == "decode" else ""
        said = [f"{piece.name}: {seconds(piece.began_s)} to "]
        said[0] += "now" if piece.ended_s is None else seconds(ended_s)
        said += [f"{name} {count}" for name, count in piece.counts]
        said += [f"run {piece.run}"] if piece.run else []
        said += [piece.detail] if piece.detail else []
        return (
            f"<rect x='{left}' y='{y}' width='{width}' height='{_BAR}' rx='2' fill='{colour}'{faint}>"
            f"<title>{escape('; '.join(said))}</title></rect>"
        )


def _title(timeline: Timeline) -> Iterator[str]:
    name = escape(timeline.request_id)
    yield f"<text x='16' y='24' font-size='15' font-weight='600' fill='#222222'>request {name}</text>"
    total = "under way" if timeline.total_s is None else seconds(timeline.total_s)
    said = [timeline.route, timeline.outcome, total]
    if (num_runs := len(timeline.internal_ids)) > 1:
        said.append(f"{num_runs} runs")
    if timeline.steps:
        said.append(
            f"{sum(step.tokens for step in timeline.steps)} tokens in {len(timeline.steps)} steps shown"
        )
    said.append(timeline.error)
    line = escape(" · ".join(part for part in said if part))
    yield f"<text x='16' y='44' fill='#555555'>{line}</text>"


def _rows(timeline: Timeline) -> list[_Row]:
    """The gateway first, then places by their first piece; within a place the order of a request's life."""
    places = sorted(
        {piece.where for piece in timeline.pieces},
        key=lambda where: (
            where != GATEWAY,
            min(piece.began_s for piece in timeline.pieces if piece.where == where),
            where,
        ),
    )
    rows = []
    for where in places:
        here = [piece for piece in timeline.pieces if piece.where == where]
        names = sorted({piece.name for piece in here}, key=_rank)
        for name in names:
            steps = [s for s in timeline.steps if s.where == where] if name == "decode" else []
            pieces = tuple(piece for piece in here if piece.name == name)
            rows.append(_Row(where, name, pieces, tuple(steps)))
    return rows


def _rank(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


def _height(row: _Row) -> int:
    return _ROW + (_GAP if row.name in ("leg", "admit") else 0)


def _end_s(timeline: Timeline) -> float:
    """What the right edge stands for."""
    if timeline.total_s:
        return timeline.total_s
    return max((*_times(timeline.pieces), *(step.at_s for step in timeline.steps)), default=0.0) or 1e-3


def _times(pieces: Sequence[Piece]) -> Iterator[float]:
    for piece in pieces:
        yield piece.began_s
        if piece.ended_s is not None:
            yield piece.ended_s


def seconds(value_s: float) -> str:
    """Short: milliseconds under a second."""
    return f"{value_s:.3g} s" if value_s >= 1 else f"{value_s * 1000:.3g} ms"
