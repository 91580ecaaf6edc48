"""Submitting: what is told to Ray, and how a driver's output becomes an address or a reason."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cluster.config import ClusterConfig, ConfigError, load_config
from cluster.doors import Addresses
from cluster.jobs import JobClient, JobFailed, JobPlan, Over, Said, Serving, ready_address, reason
from cluster.logs import last_words
from cluster.progress import StartDisplay
from cluster.submit_command import make_plan

CLONE = Path(__file__).parents[2]


class Status(str):
    """As Ray's JobStatus: a string with a value."""

    @property
    def value(self) -> str:
        return str(self)

    def is_terminal(self) -> bool:
        return self in ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass
class FakeRay:
    """A job that goes through `(status, output so far)`, one step per look."""

    steps: list[tuple[str, str]]
    message: str = ""
    submitted: dict[str, Any] = field(default_factory=dict)
    now: int = -1

    def submit_job(self, **options: Any) -> str:
        self.submitted = options
        return "job-1"

    def get_job_info(self, job: str) -> SimpleNamespace:
        self.now = min(self.now + 1, len(self.steps) - 1)
        driver = SimpleNamespace(node_ip_address="10.1.2.3")
        return SimpleNamespace(
            status=Status(self.steps[self.now][0]), driver_info=driver, message=self.message
        )

    def get_job_logs(self, job: str) -> str:
        return self.steps[self.now][1]


def follow(ray: FakeRay) -> Iterator[object]:
    return JobClient(ray).follow("job-1", sleep=lambda seconds: None)


def test_the_display_of_a_start_and_the_reader_of_a_drivers_output_agree() -> None:
    output = io.StringIO()
    display = StartDisplay(Console(file=output, width=60))
    with display:
        display.report("ray", "ready")
        display.ready(Addresses("0.0.0.0:50051"), 3.2, ClusterConfig())
    assert ready_address(output.getvalue(), "10.1.2.3") == "10.1.2.3:50051"
    assert ready_address(output.getvalue().split("ready on")[0], "10.1.2.3") is None


def test_an_address_that_names_its_host_is_kept() -> None:
    assert ready_address("ready on 10.9.9.9:1 after 1.0 s\n", "10.1.2.3") == "10.9.9.9:1"


def test_ray_waits_for_the_drain_and_for_the_end_behind_it() -> None:
    ray = FakeRay([])
    job = JobClient(ray).submit(JobPlan(CLONE, drain_s=45.2, config="a.toml", options=("--pair", "a b")))
    assert job == "job-1"
    assert ray.submitted["entrypoint"] == "python -m cluster serve --config a.toml --pair 'a b'"
    assert int(ray.submitted["runtime_env"]["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) >= 45.2 + 10
    assert ray.submitted["runtime_env"]["working_dir"] == str(CLONE)


def test_lines_come_once_and_whole_then_the_address_then_the_end() -> None:
    ready = "one\nready on 0.0.0.0:7 after 1.0 s\n"
    ray = FakeRay(
        [
            ("PENDING", ""),
            ("RUNNING", "on"),
            ("RUNNING", "one\nrea"),
            ("RUNNING", ready),
            ("STOPPED", ready + "bye\n"),
        ]
    )
    assert list(follow(ray)) == [
        Said("one\n"),
        Said("ready on 0.0.0.0:7 after 1.0 s\n"),
        Serving("10.1.2.3:7"),
        Said("bye\n"),
        Over("STOPPED"),
    ]


def test_a_failed_driver_is_reported_with_its_own_last_error() -> None:
    ray = FakeRay([("FAILED", "a\nerror: no such pair\nb\n")], message="exit code 1")
    with pytest.raises(JobFailed, match=r"job job-1 failed: no such pair$"):
        list(follow(ray))


def test_a_job_that_is_stopped_before_it_serves_has_failed() -> None:
    with pytest.raises(JobFailed, match="was stopped before it served"):
        list(follow(FakeRay([("RUNNING", "loading\n"), ("STOPPED", "loading\n")])))
    with pytest.raises(JobFailed, match="ended before it served: loading"):
        list(follow(FakeRay([("RUNNING", "loading\n"), ("SUCCEEDED", "loading\n")])))


def test_a_process_that_died_is_told_with_the_last_that_any_wrote(tmp_path: Path) -> None:
    assert last_words(tmp_path) == ""
    logs = tmp_path / "session_latest" / "logs"
    logs.mkdir(parents=True)
    for age_s, name, text in (
        (9, "worker-a-1.err", "old\n"),
        (0, "worker-b-2.err", "Fatal error\n\n  at x\n"),
    ):
        (logs / name).write_text(text)
        os.utime(logs / name, (1e9 - age_s, 1e9 - age_s))
    (logs / "worker-c-3.err").write_text("")
    assert last_words(tmp_path) == "Fatal error | at x"


def test_without_output_rays_message_is_the_reason() -> None:
    assert reason("", "the node died") == "the node died"
    assert reason("\nSegmentation fault\n", "exit code 139") == "Segmentation fault"


def test_another_python_than_slipstreams_says_so_in_one_line() -> None:
    """What Ray finds as `python` when it was started without the environment on its PATH."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ran = subprocess.run(
        [sys.executable, "-S", "-m", "cluster", "serve"],
        capture_output=True,
        text=True,
        env=bare,
        cwd=CLONE,
        check=False,
    )
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert "has no module" in reason(ran.stderr, "")
    assert "first on PATH" in reason(ran.stderr, "")


def test_an_address_that_is_no_dashboards_is_refused_at_once() -> None:
    with pytest.raises(JobFailed, match=r"127\.0\.0\.1:8265 is no address of a Ray dashboard: write http://"):
        JobClient.connect("127.0.0.1:8265")


def test_a_plan_is_checked_where_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="no clone of Slipstream"):
        make_plan(tmp_path, None, ())
    outside = tmp_path / "mine.toml"
    outside.write_text("drain_s = 9\n")
    with pytest.raises(JobFailed, match="would not travel with the job"):
        make_plan(CLONE, outside, ())
    with pytest.raises(JobFailed, match="before '--'"):
        make_plan(CLONE, None, ("--config=deploy/examples/laptop.toml",))
    with pytest.raises(ConfigError, match="cannot read"):
        make_plan(CLONE, Path("deploy/examples/missing.toml"), ())
    plan = make_plan(CLONE, Path("deploy/examples/laptop.toml"), ("--listen", "0.0.0.0:1"))
    assert plan.config == "deploy/examples/laptop.toml"
    assert plan.drain_s == load_config(CLONE / plan.config, {}).drain_s


def test_what_travels_is_what_serving_needs(tmp_path: Path) -> None:
    from ray._private.runtime_env.packaging import create_package

    package = tmp_path / "package.zip"
    create_package(str(CLONE), package, include_gitignore=True)
    with zipfile.ZipFile(package) as archive:
        names = set(archive.namelist())
    assert {"cluster/__main__.py", "cluster/rpc/v1/inference_pb2.py", "workers/host.py"} <= names
    assert {"drafter/pairs/tiny/drafter/model.safetensors", "deploy/examples/laptop.toml"} <= names
    assert not [
        name for name in names if name.startswith(("tests/", ".git/", "proto/", ".venv", "deploy/he"))
    ]
    assert package.stat().st_size < 64 * 2**20
