"""Containerfiles, parsed as far as the tests and the rehearsal of a build need."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

IMAGES = Path(__file__).parents[2] / "deploy" / "images"


@dataclass
class Stage:
    """A FROM and what follows it. `steps` are (instruction, its text) in order."""

    base: str
    name: str = ""
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for found, text in self.steps if found == instruction]


def stages(path: Path) -> tuple[dict[str, str], list[Stage]]:
    """(default arguments before the first FROM, stages)."""
    arguments: dict[str, str] = {}
    found: list[Stage] = []
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, text = line.partition(" ")
        text = " ".join(text.split())
        if instruction == "FROM":
            base, _, name = text.partition(" AS ")
            found.append(Stage(base.replace("${BASE}", arguments["BASE"]), name))
        elif not found:
            name, _, value = text.partition("=")
            arguments[name] = value
        else:
            found[-1].steps.append((instruction, text))
    return arguments, found


def ancestry(found: list[Stage], name: str) -> list[Stage]:
    """The stage of this name, behind the stages of the same file that it is built on. Raises KeyError."""
    by_name = {stage.name: stage for stage in found}
    line = [by_name[name]]
    while line[0].base in by_name:
        line.insert(0, by_name[line[0].base])
    return line
