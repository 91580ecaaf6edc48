"""How the GPU benches say what they measured: a JSON line per figure, beside its physical limit of the same run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence


def report(figure: str, x: str | float, value: float, unit: str, limit: float | None = None) -> None:
    """Print one figure. `ratio` is value / limit; the suite knows which way is good."""
    line = {
        "figure": figure,
        "x": x,
        "value": _rounded(value),
        "unit": unit,
        "limit": None if limit is None else _rounded(limit),
        "ratio": None if not limit else round(value / limit, 4),
    }
    print(json.dumps(line), flush=True)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
