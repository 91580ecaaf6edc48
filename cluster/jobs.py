"""Serving as a Ray job: package this folder, submit `python -m cluster serve`, and watch it until it serves.

    connect ──▶ submit (package, upload) ──▶ pending ──▶ running ──"ready on"──▶ serving ──drain──▶ over
                                                  └──────────── failed: the reason is the driver's last words

The job's driver is the gateway, and blocks as long as it serves. Ray's client library is imported on the first call,
so that what is wrong with the installation or the address becomes one readable error.
"""

from __future__ import annotations

import logging
import math
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import prepare_job_client
from cluster.version import VERSION

STOP_MARGIN_S = 15.0
"""What a driver takes for its end beside the drain: workers, Ray, its own exit."""
_POLL_INTERVAL_S = 0.5
_READY = re.compile(r"^ready on (?P<host>\S+):(?P<port>\d+) after ", re.MULTILINE)
_ANY_ADDRESS = ("0.0.0.0", "[::]")


class JobFailed(Exception):
    """The job cannot be submitted, or ended before it served; the message is the reason and what to do."""


@dataclass(frozen=True)
class JobPlan:
    """What is submitted. `config` is a path inside `working_dir`; `options` are further options of `serve`.

    `drain_s` must be the one that the job will run with: Ray kills a driver that takes longer than it was told.
    """

    working_dir: Path
    drain_s: float
    config: str = ""
    options: tuple[str, ...] = ()

    @property
    def entrypoint(self) -> str:
        """The driver's command line."""
        chosen = ("--config", self.config) if self.config else ()
        return shlex.join(("python", "-m", "cluster", "serve", *chosen, *self.options))

    @property
    def stop_wait_s(self) -> int:
        """Seconds between Ray's SIGTERM and its SIGKILL."""
        return math.ceil(self.drain_s + STOP_MARGIN_S)

    def runtime_env(self) -> dict[str, Any]:
        return {
            "working_dir": str(self.working_dir),
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(self.stop_wait_s)},
        }


@dataclass(frozen=True)
class Submitted:
    """Ray has taken the job."""

    job: str


@dataclass(frozen=True)
class Said:
    """New lines of the driver's output, with their ends."""

    text: str


@dataclass(frozen=True)
class Serving:
    """Clients can connect to `address`."""

    address: str


@dataclass(frozen=True)
class Over:
    """The job ended well after it served: it was stopped, or told to drain."""

    status: str


Event = Submitted | Said | Serving | Over


def ready_address(output: str, driver_host: str) -> str | None:
    """The gRPC address in a driver's output. A driver that listens on all its addresses is named by `driver_host`."""
    found = _READY.search(output)
    if found is None:
        return None
    host = found["host"]
    return f"{driver_host if host in _ANY_ADDRESS else host}:{found['port']}"


def reason(output: str, message: str) -> str:
    """Why a driver failed: its own last error, otherwise its last line, otherwise what Ray says."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    return lines[-1] if lines else message or "it said nothing"


class JobClient:
    """One Ray cluster's jobs. `connect` is a constructor: a client in a Ray test double's place needs no Ray."""

    def __init__(self, ray_client: Any) -> None:
        self._ray = ray_client

    @classmethod
    def connect(cls, address: str) -> JobClient:
        """Raises JobFailed when nobody answers, or answers that a token is missing or wrong."""
        if not address.startswith(
            ("http://", "https://")
        ):  # Ray would look for its control store there, for a minute
            raise JobFailed(f"{address} is no address of a Ray dashboard: write http://HOST:8265")
        prepare_job_client()
        try:
            from ray.exceptions import AuthenticationError
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise JobFailed(
                f"submitting needs the extra 'jobs': pip install 'slipstream-serve[jobs]' ({error})"
            ) from error
        try:
            client = JobSubmissionClient(address)
        except AuthenticationError as error:
            raise JobFailed(
                f"the Ray cluster at {address} wants another token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
            ) from error
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise JobFailed(
                f"no Ray cluster answers at {address}: start one ('ray start --head'), or name its dashboard "
                f"(--address http://HOST:8265) ({error})"
            ) from error
        # The client has just set them up to tell what it packages, and how.
        for name in ("ray", "ray.dashboard.modules.dashboard_sdk"):
            logging.getLogger(name).setLevel(logging.ERROR)
        return cls(client)

    def submit(self, plan: JobPlan) -> str:
        """Package the folder, upload it, start the driver; the job's id. Raises JobFailed."""
        try:
            job: str = self._ray.submit_job(
                entrypoint=plan.entrypoint,
                runtime_env=plan.runtime_env(),
                metadata={"slipstream": VERSION},
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise JobFailed(f"the job was not taken: {error}") from error
        return job

    def stop(self, job: str) -> None:
        """Ask the driver to drain. Returns at once."""
        self._ray.stop_job(job)

    def follow(self, job: str, *, sleep: Callable[[float], None] = time.sleep) -> Iterator[Event]:
        """What happens to a job, until it is over. Raises JobFailed when it fails, or ends before it serves."""
        seen = ""
        serving = False
        while True:
            info = self._ray.get_job_info(job)
            output: str = self._ray.get_job_logs(job)
            whole_lines = output[: output.rfind("\n") + 1]
            if len(whole_lines) > len(seen):
                yield Said(whole_lines[len(seen) :])
                seen = whole_lines
            if not serving:
                address = ready_address(seen, getattr(info.driver_info, "node_ip_address", "127.0.0.1"))
                if address is not None:
                    serving = True
                    yield Serving(address)
            if info.status.is_terminal():
                if info.status == "FAILED":
                    raise JobFailed(f"job {job} failed: {reason(output, info.message or '')}")
                if info.status == "STOPPED" and not serving:
                    raise JobFailed(f"job {job} was stopped before it served")
                if not serving:
                    raise JobFailed(f"job {job} ended before it served: {reason(output, info.message or '')}")
                yield Over(str(info.status.value))
                return
            sleep(_POLL_INTERVAL_S)


def serve_options(extra: Sequence[str]) -> tuple[str, ...]:
    """Options behind `--` as they go to `serve`. Raises JobFailed for a second configuration file."""
    if any(option.split("=")[0] == "--config" for option in extra):
        raise JobFailed("give --config to submit itself, before '--'")
    return tuple(extra)
