"""Prompts: the shipped sets, which no training may touch, and the stream of training prompts that keeps clear of them.

A training prompt is too near to a held-out one when both are the same words in the same order, numbers aside, or
when four fifths of the shorter one's four-word runs stand in the longer one. Sharing a template with other values
is allowed (the model cards say so); sharing the values is not.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random

from drafter.training.paragraphs import long_paragraph, paragraph
from drafter.training.questions import question
from drafter.training.word_problems import word_problem

FAMILIES = ("chat", "questions", "word_problems", "paragraphs")
FROM_TEMPLATES: dict[str, Callable[[Random], str]] = {
    "questions": question,
    "word_problems": word_problem,
    "paragraphs": paragraph,
    "long_paragraphs": long_paragraph,
}

_RUN = 4
_TOO_NEAR = 0.8
_NOT_A_WORD = re.compile(r"[^\w]+|\d+|_+")


def read_prompts(file: Path) -> list[str]:
    """The prompts of one JSON-lines file."""
    return [
        json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
    ]


def write_prompts(file: Path, prompts: Iterable[str]) -> None:
    """One {"prompt": ...} a line."""
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def shipped_prompts(directory: Path) -> dict[str, list[str]]:
    """The shipped sets by family. Raises FileNotFoundError for a missing one: training without them could touch them."""
    return {family: read_prompts(directory / f"{family}.jsonl") for family in FAMILIES}


class HeldOut:
    """Knows whether a text is, or nearly is, one of the held-out prompts."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self._exact: set[tuple[str, ...]] = set()
        self._num_runs: list[int] = []
        self._holders: dict[tuple[str, ...], list[int]] = {}
        for prompt in prompts:
            self.add(prompt)

    def add(self, prompt: str) -> None:
        """Hold out one more prompt."""
        words = _words(prompt)
        self._exact.add(words)
        runs = _runs(words)
        for run in runs:
            self._holders.setdefault(run, []).append(len(self._num_runs))
        self._num_runs.append(len(runs))

    def touches(self, text: str) -> bool:
        """Whether the text is too near to a held-out prompt."""
        words = _words(text)
        if words in self._exact:
            return True
        runs = _runs(words)
        shared = Counter(holder for run in runs for holder in self._holders.get(run, ()))
        return any(
            count >= _TOO_NEAR * min(len(runs), self._num_runs[holder]) for holder, count in shared.items()
        )


def _words(text: str) -> tuple[str, ...]:
    return tuple(_NOT_A_WORD.sub(" ", text.lower()).split())


def _runs(words: tuple[str, ...]) -> set[tuple[str, ...]]:
    return {words[i : i + _RUN] for i in range(len(words) - _RUN + 1)}


def training_prompts(family: str, count: int, seed: int, held_out: HeldOut) -> Iterator[str]:
    """`count` prompts of a template family, none of them near a held-out one."""
    rng = Random(f"{family} {seed}")
    make = FROM_TEMPLATES[family]
    made = 0
    while made < count:
        text = make(rng)
        if not held_out.touches(text):
            made += 1
            yield text


def choose_held_out(family: str, count: int) -> list[str]:
    """The shipped set of a template family: the generator under a seed that no training uses, no two prompts near."""
    rng = Random(f"{family} held out")
    return spread_out((FROM_TEMPLATES[family](rng) for _ in range(100 * count)), count)


def spread_out(candidates: Iterable[str], count: int) -> list[str]:
    """The first `count` candidates of which none is near an earlier one. Raises ValueError if there are too few."""
    chosen: list[str] = []
    seen = HeldOut(())
    for candidate in candidates:
        if not seen.touches(candidate):
            chosen.append(candidate)
            seen.add(candidate)
            if len(chosen) == count:
                return chosen
    raise ValueError(f"only {len(chosen)} different prompts for {count}")
