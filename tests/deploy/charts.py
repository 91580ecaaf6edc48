"""The chart, rendered with the real helm, and what of a render the tests look at."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

CLONE = Path(__file__).parents[2]
CHART = CLONE / "deploy" / "helm" / "slipstream"
EXAMPLES = ("laptop", "two-gpus", "rdma")
GOLDEN = Path(__file__).parent / "golden"
MONITORING = "monitoring.coreos.com/v1"

Object = dict[str, Any]


def helm(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run helm; skips the test where there is none (`make helm` puts it beside this Python)."""
    binary = Path(sys.executable).parent / "helm"
    if not binary.exists():
        pytest.skip("no helm: run 'make helm'")
    return subprocess.run(
        [str(binary), *arguments], capture_output=True, text=True, timeout=60, check=False, **options
    )


def example(name: str) -> tuple[str, ...]:
    return ("-f", str(CHART / "examples" / f"{name}.yaml"))


def template(*arguments: str, kubernetes: str = "1.33.0") -> str:
    """The rendered chart as release `slip`. Fails with helm's own words."""
    done = helm("template", "slip", str(CHART), "--kube-version", kubernetes, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(*arguments: str, kubernetes: str = "1.33.0") -> list[Object]:
    documents = yaml.safe_load_all(template(*arguments, kubernetes=kubernetes))
    return [document for document in documents if document is not None]


def one(objects: list[Object], kind: str, suffix: str = "") -> Object:
    """The object of a kind whose name ends so."""
    [found] = [o for o in objects if o["kind"] == kind and o["metadata"]["name"].endswith(suffix)]
    return found


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """(where it comes from, {metadata, spec}) of every pod that the objects lead to."""
    for made in objects:
        name = f"{made['kind']} {made['metadata']['name']}"
        spec = made.get("spec", {})
        match made["kind"]:
            case "Pod":
                yield name, made
            case "Deployment":
                yield name, spec["template"]
            case "RayJob":
                yield name, spec["submitterPodTemplate"]
            case "RayCluster":
                yield f"{name} head", spec["headGroupSpec"]["template"]
                for group in spec["workerGroupSpecs"]:
                    yield f"{name} {group['groupName']}", group["template"]


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as such."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def golden(objects: list[Object]) -> str:
    """A render as it is kept: sorted, without what other tests look after (dashboards and alert rules)."""
    kept = [o for o in objects if not o["metadata"]["name"].endswith(("-alerts", "-dashboard"))]
    kept.sort(key=lambda o: (o["kind"], o["metadata"]["name"]))
    return yaml.dump_all(kept, Dumper=_Dumper, sort_keys=True, width=110)


def main() -> None:
    """Write the golden renders anew."""
    GOLDEN.mkdir(exist_ok=True)
    for name in EXAMPLES:
        rendered = golden(render(*example(name), "--api-versions", MONITORING))
        (GOLDEN / f"{name}.yaml").write_text(rendered, encoding="utf-8")


if __name__ == "__main__":
    main()
