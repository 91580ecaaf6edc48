"""Prompts that an evaluation sends: the built-in held-out sets, a JSONL file, or a task with known answers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from importlib import resources
from pathlib import Path

from workers.errors import InvalidRequest

BUILTIN_SETS = ("chat", "questions", "word_problems", "paragraphs")
"""The sets that ship with the repository, in the order in which evaluations and tables name them."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class EvalPrompt:
    """One prompt as user text. `kind` names its set; `answer` is the expected number when it belongs to a task."""

    kind: str
    text: str
    answer: Decimal | None = None


def builtin_set(name: str) -> list[EvalPrompt]:
    """All prompts of one built-in set, in file order."""
    source = resources.files("cluster") / "prompts" / f"{name}.jsonl"
    return _parse(source.read_text(encoding="utf-8"), kind=name, where=f"{name}.jsonl")


def builtin_prompts(count: int) -> list[EvalPrompt]:
    """`count` prompts, evenly from the built-in sets: the first of each set, the second of each, and so on."""
    if count < 1:
        raise InvalidRequest(f"--prompts is {count}: ask for at least 1", field="prompts", limit=1)
    sets = [builtin_set(name) for name in BUILTIN_SETS]
    available = sum(len(prompts) for prompts in sets)
    if count > available:
        raise InvalidRequest(
            f"--prompts is {count}, the built-in sets hold {available}", field="prompts", limit=available
        )
    depth = max(len(prompts) for prompts in sets)
    ordered = [prompts[row] for row in range(depth) for prompts in sets if row < len(prompts)]
    return ordered[:count]


def file_prompts(path: Path) -> list[EvalPrompt]:
    """Prompts of a JSONL file with `prompt` lines; the file's stem becomes their kind."""
    return _parse(_read(path), kind=path.stem, where=str(path))


def task_prompts(path: Path) -> list[EvalPrompt]:
    """A task in GSM8K's form: lines with `question` and `answer`, whose last number (after `####`) is expected."""
    prompts = []
    for number, line in _lines(_read(path)):
        entry = _object(line, str(path), number)
        question, answer = entry.get("question"), entry.get("answer")
        expected = final_number(str(answer)) if answer is not None else None
        if not isinstance(question, str) or expected is None:
            raise InvalidRequest(
                f"{path}:{number}: a task line needs `question` (text) and `answer` (ending in a number)",
                field="task",
            )
        prompts.append(EvalPrompt(kind=path.stem, text=question, answer=expected))
    if not prompts:
        raise InvalidRequest(f"{path} holds no task lines", field="task")
    return prompts


def final_number(text: str) -> Decimal | None:
    """The last number of a text, commas removed: GSM8K's answer convention. None when there is none."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}", field="prompts") from error


def _lines(text: str) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]


def _object(line: str, where: str, number: int) -> dict[str, object]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{where}:{number}: not JSON: {error}", field="prompts") from error
    if not isinstance(entry, dict):
        raise InvalidRequest(f"{where}:{number}: expected an object", field="prompts")
    return entry


def _parse(text: str, kind: str, where: str) -> list[EvalPrompt]:
    prompts = []
    for number, line in _lines(text):
        prompt = _object(line, where, number).get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise InvalidRequest(f"{where}:{number}: needs a non-empty `prompt`", field="prompts")
        prompts.append(EvalPrompt(kind=kind, text=prompt))
    if not prompts:
        raise InvalidRequest(f"{where} holds no prompts", field="prompts")
    return prompts
