"""Write what of the helm chart follows from elsewhere: README.md's table of values, and the schema of `config`.

The table comes from values.yaml, where a comment `# -- text` describes the key below it. The schema's part comes from
`cluster.config`, without the keys that the chart sets itself. With --check nothing is written, and a file that is out
of date is an error.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster.config import ClusterConfig

# What the chart decides; values.yaml has other names for most of it.
OWNED = frozenset(
    {
        *("pair", "mode", "listen", "http", "metrics", "context_workers", "generation_workers"),
        *("aggregated_workers", "drain_s", "startup_timeout_s", "placement", "token_file", "tls_cert_file"),
        *("tls_key_file", "tls_client_ca_file", "ray_auth_mode", "object_store_bytes"),
        *("registry", "attach", "keep_workers", "ray_namespace", "context", "generation", "aggregated"),
    }
)
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


def readme(old: str) -> str:
    """The README with the table of today's values."""
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table((CHART / 'values.yaml').read_text(encoding='utf-8'))}\n{END}{after}"


def schema(old: str) -> str:
    """The schema with today's keys of the configuration."""
    found = json.loads(old)
    types = msgspec.json.schema(ClusterConfig)["$defs"]

    def inline(part: Any) -> Any:
        match part:
            case {"$ref": reference}:
                return inline(types[reference.rpartition("/")[2]])
            case dict():
                return {key: inline(inner) for key, inner in part.items() if key not in ("default", "title")}
            case list():
                return [inline(inner) for inner in part]
            case _:
                return part

    keys = types["ClusterConfig"]["properties"]
    found["properties"]["config"]["properties"] = {
        key: inline(part) for key, part in keys.items() if key not in OWNED
    }
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    stale = []
    for name, renew in (("README.md", readme), ("values.schema.json", schema)):
        path = CHART / name
        old = path.read_text(encoding="utf-8")
        new = renew(old)
        if new != old:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    if stale and "--check" in sys.argv:
        sys.exit(f"the chart's {' and '.join(stale)} is out of date: run 'python deploy/chart.py'")


if __name__ == "__main__":
    main()
