"""Check with promtool what Prometheus and Grafana will read: `python -m tests.deploy.prometheus PROMTOOL`.

Alert rules are checked and played against series in `alerts_test.yaml`. A panel's expression must parse as well: each
becomes a recording rule, with Grafana's variables replaced.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

DASHBOARDS = Path(__file__).parents[2] / "deploy" / "dashboards"
PLAYED = Path(__file__).parent / "alerts_test.yaml"
_VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$__interval": "1m"}


def expressions(panels: list[dict[str, Any]]) -> Iterator[str]:
    """Every panel's, rows opened."""
    for panel in panels:
        yield from (target["expr"] for target in panel.get("targets", ()) if "expr" in target)
        yield from expressions(panel.get("panels", []))


def as_rules(dashboard: Path) -> dict[str, Any]:
    """A file of recording rules, one for each expression of a dashboard."""
    rules = []
    for number, expression in enumerate(expressions(json.loads(dashboard.read_text())["panels"])):
        for name, value in _VARIABLES.items():
            expression = expression.replace(name, value)
        expression = re.sub(r"\$\w+|\$\{\w+\}", "x", expression)
        rules.append({"record": f"panel:{number}", "expr": expression})
    return {"groups": [{"name": dashboard.stem, "rules": rules}]}


def run(*command: str) -> bool:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print((done.stdout + done.stderr).strip(), flush=True)
    return done.returncode == 0


def main() -> None:
    promtool = str(Path(sys.argv[1]).absolute())
    good = run(promtool, "check", "rules", str(DASHBOARDS / "alerts.yaml"))
    good &= run(promtool, "test", "rules", str(PLAYED))
    with tempfile.TemporaryDirectory() as folder:
        for dashboard in DASHBOARDS.glob("*.json"):
            path = Path(folder) / f"{dashboard.stem}.yaml"
            path.write_text(yaml.safe_dump(as_rules(dashboard)))
            good &= run(promtool, "check", "rules", str(path))
    sys.exit(int(not good))


if __name__ == "__main__":
    main()
