"""Containerfiles: pinned, in stages, unprivileged, and made of what is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.deploy.charts import CHART, CLONE
from tests.deploy.images import IMAGES, ancestry, stages

FILES = sorted(IMAGES.glob("Containerfile.*"))


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def containerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_there_is_one_for_cpus_and_one_for_gpus() -> None:
    assert [path.suffix for path in FILES] == [".cpu", ".cuda"]


def test_a_rehearsal_starts_with_the_steps_of_the_stages_below() -> None:
    _, found = stages(IMAGES / "Containerfile.cuda")
    assert [stage.name for stage in ancestry(found, "build")] == ["python", "build"]
    _, found = stages(IMAGES / "Containerfile.cpu")
    assert [stage.name for stage in ancestry(found, "build")] == ["build"]


def test_the_base_and_every_package_are_pinned(containerfile: Path) -> None:
    arguments, found = stages(containerfile)
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w.-]+", arguments["BASE"])
    for stage in found:
        for step in stage.all("RUN"):
            for install in re.findall(r"pip install ([^&]*)", step):
                assert "-c deploy/constraints.txt" in install or "-r deploy/weights.txt" in install


def test_the_last_stage_has_the_environment_without_what_built_it(containerfile: Path) -> None:
    _, found = stages(containerfile)
    assert len(found) >= 2
    last = found[-1]
    assert last.all("COPY") == ["--from=build /opt/slipstream /opt/slipstream"]
    assert not any("pip" in step for step in last.all("RUN"))


def test_it_runs_as_the_user_of_the_charts_pods(containerfile: Path) -> None:
    _, found = stages(containerfile)
    wanted = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurityContext"]
    assert found[-1].all("USER") == [f"{wanted['runAsUser']}:{wanted['runAsGroup']}"]


def test_what_is_copied_exists_and_reaches_the_build(containerfile: Path) -> None:
    _, found = stages(containerfile)
    reaching = (CLONE / ".dockerignore").read_text().splitlines()
    copied = [
        source
        for stage in found
        for step in stage.all("COPY")
        if not step.startswith("--from")
        for source in step.split()[:-1]
    ]
    for source in copied:
        assert (CLONE / source).exists(), source
        assert f"!{source}" in reaching, source
    built = tomllib.loads((CLONE / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    assert set(built["packages"]) <= set(copied)


def test_docker_and_kubernetes_agree_on_the_ports(containerfile: Path) -> None:
    _, found = stages(containerfile)
    monitoring = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]
    assert found[-1].all("EXPOSE") == [f"50051 8000 {monitoring['port']}"]
