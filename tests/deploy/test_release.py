"""A release's life with the real helm, against a stand-in API server: install, test, upgrade, roll back, uninstall."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.deploy.api_server import ApiServer
from tests.deploy.charts import CHART, EXAMPLES, example, helm, render


class Helm(Protocol):
    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def api() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()


@pytest.fixture
def run(api: ApiServer, tmp_path: Path) -> Helm:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))}
    env = {**kept, "HOME": str(tmp_path), "KUBECONFIG": str(api.kubeconfig(tmp_path))}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return helm(*arguments, env=env)

    return run


def good(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


INSTALL = ("install", "slip", str(CHART), *example("laptop"))
UPGRADE = ("upgrade", "slip", str(CHART), *example("laptop"))


def test_a_release_from_install_to_uninstall(api: ApiServer, run: Helm) -> None:
    notes = good(run(*INSTALL))
    assert "kubectl -n default rollout status deployment/slip-slipstream-gateway" in notes
    assert "set gateway.tls.existingSecret for TLS" in notes
    installed = api.names(but="secrets")
    assert {"rayclusters/slip-slipstream", "deployments/slip-slipstream-gateway"} <= installed
    assert "servicemonitors/slip-slipstream" in installed  # this server has the operator's API
    assert "pods/slip-slipstream-test-generate" not in installed  # a test is no part of an install

    changed = ("--set", "config.max_batch=2,gateway.kind=RayJob")
    good(run(*UPGRADE, *changed))
    assert "deployments/slip-slipstream-gateway" not in api.names()
    [job] = [made for (plural, _), made in api.objects.items() if plural == "rayjobs"]
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": "slip-slipstream"}
    good(run(*UPGRADE, *changed, "--set", "config.max_batch=3"))
    [other] = [made for (plural, _), made in api.objects.items() if plural == "rayjobs"]
    assert other["metadata"]["name"] != job["metadata"]["name"]

    good(run("rollback", "slip", "1"))
    assert api.names(but="secrets") == installed
    config = api.objects["configmaps", "slip-slipstream-config"]["data"]["slipstream.toml"]
    assert "max_batch = 4" in config

    good(run("uninstall", "slip"))
    assert api.names() == set()


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_is_installed_whole_and_removed_whole(name: str, api: ApiServer, run: Helm) -> None:
    good(run("install", "slip", str(CHART), *example(name)))
    installed = {made["metadata"]["name"] for made in api.objects.values() if made["kind"] != "Secret"}
    rendered = {made["metadata"]["name"] for made in render(*example(name)) if made["kind"] != "Pod"}
    assert installed == rendered
    good(run("uninstall", "slip"))
    assert api.names() == set()


def test_a_releases_test_is_a_pod_whose_end_is_its_result(api: ApiServer, run: Helm) -> None:
    good(run(*INSTALL))
    assert "Phase:          Succeeded" in good(run("test", "slip", "--timeout", "20s"))
    assert "pods/slip-slipstream-test-generate" not in api.names()
    api.pod_phase = "Failed"
    failed = run("test", "slip", "--timeout", "20s")
    assert failed.returncode != 0
    assert "pod slip-slipstream-test-generate failed" in failed.stderr


def test_a_refused_upgrade_leaves_the_release_as_it_was_when_it_is_rolled_back(
    api: ApiServer, run: Helm
) -> None:
    good(run(*INSTALL))
    before = api.names(but="secrets")
    api.refused.add("RayCluster")
    failed = run(*UPGRADE, "--set", "context.replicas=2,context.maxReplicas=2")
    assert failed.returncode != 0
    assert "admission webhook denied the RayCluster" in failed.stderr
    api.refused.clear()
    good(run("rollback", "slip", "1"))
    assert api.names(but="secrets") == before
    groups = api.objects["rayclusters", "slip-slipstream"]["spec"]["workerGroupSpecs"]
    assert [group["replicas"] for group in groups] == [1, 1]


def test_wrong_values_do_not_reach_the_cluster(api: ApiServer, run: Helm) -> None:
    failed = run(*INSTALL, "--set", "context.replicas=none")
    assert failed.returncode != 0
    assert "at '/context/replicas': got string, want integer" in failed.stderr
    assert api.names() == set()
