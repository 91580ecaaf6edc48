"""Validate all that the chart renders with Kubernetes' own schemas, on every supported version.

`python -m tests.deploy.kubernetes VALIDATOR` asks kubernetes-validate itself, a package of 100 MB. What it knows of the
kinds that the chart renders is kept beside this file for the oldest and the newest version, so that every test run
checks renders without it; `--write` writes that anew. Pod templates inside KubeRay's objects, which those schemas leave
open, are validated as pods of their own.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.deploy.charts import EXAMPLES, Object, example, pods, render

FOREIGN = ("ray.io/v1", "monitoring.coreos.com/v1")
VERSIONS = [f"1.{minor}" for minor in range(31, 38)]
KEPT_VERSIONS = (VERSIONS[0], VERSIONS[-1])
KEPT = Path(__file__).parent / "kubernetes_schemas.json"
COMMENT = (
    "From the JSON schemas in kubernetes-validate 1.37.0 (github.com/willthames/kubernetes-validate), made from the "
    "OpenAPI specifications of Kubernetes (github.com/kubernetes/kubernetes, Copyright The Kubernetes Authors), both "
    "Apache License 2.0. Changed: only the kinds that the chart renders, without status, descriptions and formats."
)
# (apiVersion, kind) → the schema's file name.
KINDS = {
    ("v1", "ConfigMap"): "configmap-v1",
    ("v1", "Pod"): "pod-v1",
    ("v1", "Service"): "service-v1",
    ("v1", "ServiceAccount"): "serviceaccount-v1",
    ("apps/v1", "Deployment"): "deployment-apps-v1",
    ("autoscaling/v2", "HorizontalPodAutoscaler"): "horizontalpodautoscaler-autoscaling-v2",
    ("networking.k8s.io/v1", "NetworkPolicy"): "networkpolicy-networking-v1",
    ("policy/v1", "PodDisruptionBudget"): "poddisruptionbudget-policy-v1",
}
WRONG: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "dat": {}}


def standard_objects(objects: list[Object]) -> Iterator[Object]:
    """Objects of Kubernetes itself, and a pod for every pod template of the others."""
    for made in objects:
        if made["apiVersion"] not in FOREIGN:
            yield made
            continue
        for where, template in pods([made]):
            metadata = {**template.get("metadata", {}), "name": where.lower().replace(" ", "-")}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def complaint(kubernetes: str, made: Object) -> str:
    """What the kept schema of a version says against an object; empty when nothing. KeyError: no such kind is kept."""
    validator = _validator(kubernetes, f"{made['apiVersion']} {made['kind']}")
    error = jsonschema.exceptions.best_match(validator.iter_errors(made))
    return f"{'/'.join(map(str, error.path))}: {error.message}" if error is not None else ""


@functools.cache
def _validator(kubernetes: str, kind: str) -> jsonschema.Draft202012Validator:
    kept = json.loads(KEPT.read_text(encoding="utf-8"))[kubernetes]
    return jsonschema.Draft202012Validator({**kept["kinds"][kind], "definitions": kept["definitions"]})


def kept_schemas(package: Path) -> dict[str, Any]:
    """What is kept, from the files of an installed kubernetes-validate."""

    def slim(part: Any, wanted: set[str]) -> Any:
        match part:
            case {"$ref": str(reference)}:
                name = reference.rpartition("/")[2]
                wanted.add(name)
                return {"$ref": f"#/definitions/{name}"}
            case dict():
                return {
                    key: slim(inner, wanted)
                    for key, inner in part.items()
                    if not (key in ("description", "format") and isinstance(inner, str))
                    and not key.startswith("x-kubernetes")
                }
            case list():
                return [slim(inner, wanted) for inner in part]
            case _:
                return part

    found: dict[str, Any] = {"$comment": COMMENT}
    for version in KEPT_VERSIONS:
        folder = package / "kubernetes-json-schema" / f"v{version}.0-local-strict"
        definitions = json.loads((folder / "_definitions.json").read_text(encoding="utf-8"))["$defs"]
        wanted: set[str] = set()
        kinds = {}
        for (api, kind), name in KINDS.items():
            schema = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
            schema["properties"].pop("status", None)
            kinds[f"{api} {kind}"] = slim(schema, wanted)
        kept: dict[str, Any] = {}
        while missing := sorted(wanted - kept.keys()):
            kept.update({name: slim(definitions[name], wanted) for name in missing})
        found[version] = {"kinds": kinds, "definitions": dict(sorted(kept.items()))}
    return found


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
    validator = Path(sys.argv[1]).absolute()
    [package] = validator.parents[1].glob("lib/python*/site-packages/kubernetes_validate")
    schemas = json.dumps(kept_schemas(package), separators=(",", ":"), ensure_ascii=False) + "\n"
    if "--write" in sys.argv:
        KEPT.write_text(schemas, encoding="utf-8")
    elif KEPT.read_text(encoding="utf-8") != schemas:
        sys.exit(f"{KEPT.name} is out of date: run with --write")
    if not validate(str(validator), VERSIONS[0], [WRONG]):
        sys.exit("the validator finds nothing wrong with a wrong object")
    failed = False
    for kubernetes in VERSIONS:
        for name in EXAMPLES:
            objects = list(standard_objects(render(*example(name), kubernetes=f"{kubernetes}.0")))
            complaints = validate(str(validator), kubernetes, objects)
            print(
                f"Kubernetes {kubernetes}, {name}: {len(objects)} objects {complaints or 'valid'}", flush=True
            )
            failed = failed or bool(complaints)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
