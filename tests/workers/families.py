"""The drafter families that are served, as small random pairs: a row each, and every test over families runs it.

A family of `kvmanager.families` has a row here, is tested in a file of its own, or is named as not served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvmanager.families import DRAFT_KV_FORMS
from kvmanager.layout import DraftKv
from tests.workers.random_pair import ANOTHER_SHAPE, dflash2, dspark, load_random_pair
from workers.assembly import Models

TESTED_APART = frozenset({"dspark_embedded"})  # tests.workers.test_embedded_drafter
NOT_SERVED = frozenset({"mtp", "eagle3"})


@dataclass(frozen=True)
class Row:
    """`load` writes a pair into an empty directory and loads it. The target is that of `load_random_pair`."""

    family: str
    load: Callable[[Path], Models]

    @property
    def forms(self) -> list[DraftKv]:
        """Where its KV may live when split."""
        return sorted(DRAFT_KV_FORMS[self.family]["split"])


def _row(
    family: str, drafting: dict[str, Any] | None = None, vocabulary: frozenset[int] | None = None
) -> Row:
    return Row(family, partial(load_random_pair, drafting=drafting, vocabulary=vocabulary))


# A window over context and block, which no context of the tests is shorter than for long.
WINDOWED: dict[str, Any] = {
    "layer_types": ["sliding_attention"],
    "use_sliding_window": True,
    "sliding_window": 12,
}
SOME_TOKENS = frozenset({0, 2, 3, 5, 6, 8, 10})
FAMILIES: dict[str, Row] = {
    "dflash": _row("dflash"),
    "dflash of another shape": _row("dflash", ANOTHER_SHAPE),
    "dflash of a window that sees ahead": _row("dflash", WINDOWED | {"is_causal": False}),
    "dflash of some tokens": _row("dflash", vocabulary=SOME_TOKENS),
    "dflash2": _row("dflash2", dflash2()),
    "dflash2 of a causal window": _row("dflash2", dflash2(**WINDOWED)),
    "dflash2 of another shape": _row("dflash2", dflash2(**ANOTHER_SHAPE)),
    "dspark vanilla": _row("dspark", dspark("vanilla")),
    "dspark gated": _row("dspark", dspark("gated")),
    "dspark rnn": _row("dspark", dspark("rnn")),
    "dspark without heads": _row("dspark", dspark("vanilla", markov_rank=0, enable_confidence_head=False)),
    "dspark of some tokens": _row("dspark", dspark("rnn"), SOME_TOKENS),
    "dspark of another shape": _row("dspark", dspark("vanilla", **ANOTHER_SHAPE)),
}
