"""Machine code of kernels, kept between processes: a worker needs some dozens, and compiles two or three a second.

A file is named by everything that its code depends on, and begins with its checksum. Whoever cannot read a file
compiles, and whoever cannot write one does without.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

log = logging.getLogger(__name__)
_CHECKSUM_BYTES = hashlib.sha256().digest_size


def user_directory() -> Path | None:
    """~/.cache/slipstream/kernels. None for a user without a home."""
    try:
        return Path.home() / ".cache" / "slipstream" / "kernels"
    except RuntimeError:
        return None


class KernelCache:
    """Files of a directory, which need not exist. Processes may share it. None: nothing is kept."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def code(self, made_from: Iterable[bytes], compiled: Callable[[], bytes]) -> bytes:
        """What `compiled` returned for the same parts before, or returns now."""
        if self._directory is None:
            return compiled()
        path = self._directory / f"{_digest(made_from)}.cubin"
        found = _read(path)
        if found is None:
            found = compiled()
            _write(path, found)
        return found


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _write(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as own:
            file = Path(own) / path.name
            file.write_bytes(hashlib.sha256(code).digest() + code)
            file.replace(path)  # a reader finds all of it or nothing
    except OSError as error:
        log.info("kernels are compiled at every start: %s", error)


def _read(path: Path) -> bytes | None:
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    checksum, code = kept[:_CHECKSUM_BYTES], kept[_CHECKSUM_BYTES:]
    return code if hashlib.sha256(code).digest() == checksum else None
