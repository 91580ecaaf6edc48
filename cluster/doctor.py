"""What `slipstream doctor` looks at. Every finding says what it means and, when something is wrong, what to do.

"fail": serving will not work, or will not be what it claims. "warn": it works, with less than there could be.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from cluster.config import ray_address, ray_auth_mode, ray_token_set

Level = Literal["ok", "warn", "fail"]
_LEAST_SHARED_MEMORY_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class Finding:
    """`remedy` is empty when there is nothing to do."""

    name: str
    level: Level
    detail: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def examine(pair: str, floor_gigabytes_per_s: float) -> list[Finding]:
    """All findings, in the order in which problems should be fixed."""
    checks: tuple[Callable[[], list[Finding]], ...] = (
        _python,
        _torch,
        _ray,
        _shared_memory,
        lambda: _transport(floor_gigabytes_per_s),
        _device_transport,
        _flashinfer,
        lambda: _pair(pair),
    )
    return [finding for check in checks for finding in check()]


def _python() -> list[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    return [Finding("python", "ok", f"Python {version}, {os.cpu_count()} cores")]


def _torch() -> list[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Finding("torch", "fail", f"cannot be imported: {error}", "Run 'make setup'.")]
    found = [Finding("torch", "ok", f"torch {torch.__version__}")]
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        found.append(Finding("gpu", "ok", f"{torch.cuda.device_count()} × {', '.join(sorted(names))}"))
    elif torch.version.cuda is None:
        found.append(
            Finding(
                "gpu",
                "warn",
                "this torch is built for CPU only; workers compute on the CPU",
                "For GPUs install the CUDA build of the pinned torch version.",
            )
        )
    else:
        found.append(
            Finding(
                "gpu",
                "warn",
                "no GPU is visible; workers compute on the CPU",
                "If this machine has one, check nvidia-smi and CUDA_VISIBLE_DEVICES.",
            )
        )
    return found


def _ray() -> list[Finding]:
    version = _version("ray")
    if version is None:
        return [Finding("ray", "fail", "ray is not installed", "Run 'make setup'.")]
    found = [Finding("ray", "ok", f"ray {version}")]
    mode, address = ray_auth_mode(), ray_address()
    token_file = Path.home() / ".ray" / "auth_token"
    has_token = ray_token_set() or token_file.is_file()
    if mode is None and address is None:
        found.append(
            Finding(
                "ray auth",
                "ok",
                "RAY_AUTH_MODE is unset; slipstream sets it to 'disabled' for its own local Ray",
            )
        )
    elif mode is None:
        found.append(
            Finding(
                "ray auth",
                "warn",
                f"RAY_ADDRESS is {address}, but RAY_AUTH_MODE is unset: Ray's clients then never authenticate",
                "Set RAY_AUTH_MODE to 'disabled', or to 'token' together with RAY_AUTH_TOKEN.",
            )
        )
    elif mode == "token" and not has_token:
        found.append(
            Finding(
                "ray auth",
                "fail",
                f"RAY_AUTH_MODE is 'token', but there is no token in RAY_AUTH_TOKEN or {token_file}",
                "Set RAY_AUTH_TOKEN, or RAY_AUTH_MODE=disabled on a machine of your own.",
            )
        )
    elif mode in ("token", "disabled"):
        found.append(Finding("ray auth", "ok", f"RAY_AUTH_MODE is '{mode}'"))
    else:
        found.append(
            Finding("ray auth", "fail", f"RAY_AUTH_MODE is {mode!r}", "Ray knows 'disabled' and 'token'.")
        )
    if mode is None and token_file.is_file():
        found.append(
            Finding(
                "ray token",
                "warn",
                f"{token_file} exists, left by an earlier ray.init: 'ray start' turns authentication on because of it",
                "Delete it, or set RAY_AUTH_MODE explicitly wherever Ray is started.",
            )
        )
    return found


def _shared_memory() -> list[Finding]:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return [Finding("shared memory", "warn", "/dev/shm does not exist; Ray will use files instead")]
    free = shutil.disk_usage(shared).free
    detail = f"/dev/shm has {free // 2**20} MiB free"
    if free < _LEAST_SHARED_MEMORY_BYTES:
        return [
            Finding(
                "shared memory", "warn", detail, "Give the container a larger --shm-size (Ray wants 128 MiB)."
            )
        ]
    return [Finding("shared memory", "ok", detail)]


def _transport(floor_gigabytes_per_s: float) -> list[Finding]:
    version = _version("nixl-cu12") or _version("nixl-cu13") or _version("nixl")
    if version is None:
        return [
            Finding("nixl", "fail", "nixl is not installed; split mode cannot ship KV", "Run 'make setup'.")
        ]
    found = [Finding("nixl", "ok", f"nixl {version}")]
    from transceiver import selftest
    from transceiver.errors import SelfTestFailed

    try:
        measured = selftest.run()
    except SelfTestFailed as error:
        remedy = "Split mode will not work. See UCX_LOG_LEVEL=info; in containers allow shared memory and ptrace (CMA)."
        return [*found, Finding("transport", "fail", str(error), remedy)]
    detail = (
        f"UCX chose {measured.transport}: {measured.gigabytes_per_s:.2f} GB/s between two processes "
        f"(memcpy here {measured.memcpy_gigabytes_per_s:.1f} GB/s), first transfer {measured.first_s * 1000:.0f} ms"
    )
    if measured.gigabytes_per_s < floor_gigabytes_per_s:
        remedy = f"The floor is {floor_gigabytes_per_s:g} GB/s (--floor). Look for what keeps UCX from shared memory."
        return [*found, Finding("transport", "fail", detail, remedy)]
    if "tcp" in measured.transport:
        remedy = "Workers in separate PID or IPC namespaces cannot share memory; let them share both."
        return [*found, Finding("transport", "warn", detail, remedy)]
    return [*found, Finding("transport", "ok", detail)]


def _device_transport() -> list[Finding]:
    """Between the first two devices, or within the only one. Nothing where there is none."""
    from transceiver import cuda, selftest
    from transceiver.errors import SelfTestFailed

    count = cuda.device_count()
    if not count:
        return []
    try:
        measured = selftest.run(512 << 20, devices=(0, 1 % count))
    except SelfTestFailed as error:
        remedy = "Split mode will not work on these devices. See UCX_LOG_LEVEL=info."
        return [Finding("device transport", "fail", str(error), remedy)]
    detail = (
        f"UCX chose {measured.transport}: {measured.gigabytes_per_s:.1f} GB/s between two processes (a plain copy "
        f"{measured.memcpy_gigabytes_per_s:.1f} GB/s), first transfer {measured.first_s * 1000:.0f} ms"
    )
    if "cuda" not in measured.transport:
        remedy = (
            "KV goes through host memory. Workers must share a PID namespace, and see each other's devices."
        )
        return [Finding("device transport", "warn", detail, remedy)]
    return [Finding("device transport", "ok", detail)]


def _flashinfer() -> list[Finding]:
    version = _version("flashinfer-python") or _version("flashinfer")
    if version is not None:
        return [Finding("flashinfer", "ok", f"flashinfer {version}")]
    if any(finding.name == "gpu" and finding.level == "ok" for finding in _torch()):
        detail = "not installed: workers on a GPU compute in float32 only, slowly"
        return [Finding("flashinfer", "warn", detail, "pip install 'slipstream-serve[gpu]'")]
    return [Finding("flashinfer", "ok", "not installed, and not needed: there is no GPU to use it on")]


def _pair(pair: str) -> list[Finding]:
    from workers.pairs import PairError, resolve_pair

    try:
        resolved = resolve_pair(pair)
    except PairError as error:
        return [Finding("pair", "fail", str(error), "Run 'make setup', or pass --pair.")]
    drafter = resolved.drafter_path
    if drafter is None:
        return [
            Finding("pair", "warn", f"{resolved.target_path}, no drafter", "Without one nothing is drafted.")
        ]
    return [Finding("pair", "ok", f"target {resolved.target_path}, drafter {drafter}")]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
