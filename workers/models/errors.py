"""The one error a checkpoint can raise, whatever its format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names the file and the tensor or field at fault."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


def missing_tensors(path: Path, names: Sequence[str]) -> CheckpointError:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return CheckpointError(path, f"missing tensor{'s' if len(names) > 1 else ''} {shown}")


def wrong_shape(path: Path, name: str, *, expected: Sequence[int], found: Sequence[int]) -> CheckpointError:
    return CheckpointError(path, f"tensor {name}: expected shape {list(expected)}, found {list(found)}")
