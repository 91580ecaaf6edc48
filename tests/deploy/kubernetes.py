"""Validate all that the chart renders with Kubernetes' own schemas: `python -m tests.deploy.kubernetes VALIDATOR`.

Pod templates inside KubeRay's objects, which those schemas leave open, are validated as pods of their own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.deploy.charts import EXAMPLES, Object, example, pods, render

FOREIGN = ("ray.io/v1", "monitoring.coreos.com/v1")
VERSIONS = [f"1.{minor}" for minor in range(31, 38)]


def standard_objects(objects: list[Object]) -> Iterator[Object]:
    """Objects of Kubernetes itself, and a pod for every pod template of the others."""
    for made in objects:
        if made["apiVersion"] not in FOREIGN:
            yield made
            continue
        for where, template in pods([made]):
            metadata = {**template.get("metadata", {}), "name": where.lower().replace(" ", "-")}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def validate(validator: str, kubernetes: str, objects: list[Object]) -> str:
    """The validator's complaints; empty when there are none."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump_all(objects, file)
        file.flush()
        done = subprocess.run(
            [validator, "--strict", "-k", kubernetes, file.name], capture_output=True, text=True, check=False
        )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def main() -> None:
    validator = str(Path(sys.argv[1]).absolute())
    wrong: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "dat": {}}
    if not validate(validator, VERSIONS[0], [wrong]):
        sys.exit("the validator finds nothing wrong with a wrong object")
    failed = False
    for kubernetes in VERSIONS:
        for name in EXAMPLES:
            objects = list(standard_objects(render(*example(name), kubernetes=f"{kubernetes}.0")))
            complaints = validate(validator, kubernetes, objects)
            print(
                f"Kubernetes {kubernetes}, {name}: {len(objects)} objects {complaints or 'valid'}", flush=True
            )
            failed = failed or bool(complaints)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
