"""Write the table of values into the chart's README.md, from the comments in values.yaml.

A comment `# -- text` describes the key below it; keys without one are listed without words. With --check nothing is
written, and a README that is out of date is an error.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import yaml

CHART = Path(__file__).parent / "helm" / "slipstream"
BEGIN, END = "<!-- values -->", "<!-- end of values -->"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z][\w]*):(?P<rest>.*)$")


def rows(text: str) -> list[tuple[str, str, str]]:
    """(dotted key, default as JSON, description) of every leaf, in the file's order."""
    found: list[tuple[str, str, str]] = []
    values = yaml.safe_load(text)
    path: list[str] = []
    described: list[str] = []
    for line in text.splitlines():
        comment = line.strip()
        if comment.startswith("# -- "):
            described = [comment.removeprefix("# -- ")]
            continue
        if comment.startswith("#") and described:
            described.append(comment.removeprefix("# "))
            continue
        match = _KEY.match(line)
        if match is None:
            described = []
            continue
        path = [*path[: len(match["indent"]) // 2], match["key"]]
        value = values
        for key in path:
            value = value[key] if isinstance(value, dict) else None
        if value is None:  # a line inside a list
            continue
        branch = isinstance(value, dict) and value and not match["rest"].strip()
        if branch and not described:
            continue
        default = "" if branch else json.dumps(value, ensure_ascii=False)
        found.append((".".join(path), default, " ".join(described)))
        described = []
    return found


def table(text: str) -> str:
    """The Markdown table of a values file."""
    lines = ["| key | default | what |", "| --- | --- | --- |"]
    for key, default, what in rows(text):
        shown = f"`{default}`" if default else ""
        lines.append(f"| `{key}` | {shown} | {what.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def main() -> None:
    readme = CHART / "README.md"
    old = readme.read_text(encoding="utf-8")
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n{table((CHART / 'values.yaml').read_text(encoding='utf-8'))}\n{END}{after}"
    if new == old:
        return
    if "--check" in sys.argv:
        sys.exit("the chart's README is out of date: run 'python deploy/chart_readme.py'")
    readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
