"""Compiled kernels are found again by what they were made from, and nothing that happens to a file does harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.kernel_cache import KernelCache, user_directory


class Compiler:
    def __init__(self, code: bytes = b"code") -> None:
        self.code, self.calls = code, 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.code


def test_another_process_finds_what_one_compiled(tmp_path: Path) -> None:
    directory, compiler = tmp_path / "not" / "there", Compiler()
    for _ in range(3):
        assert KernelCache(directory).code([b"source", b"-DROWS=16"], compiler) == b"code"
    assert compiler.calls == 1
    assert len(list(directory.iterdir())) == 1


@pytest.mark.parametrize(
    "other", [[b"source", b"-DROWS=32"], [b"source-DROWS=16"], [b"sourc", b"e-DROWS=16"], [b"source"]]
)
def test_what_is_made_from_something_else_is_compiled(tmp_path: Path, other: list[bytes]) -> None:
    cache = KernelCache(tmp_path)
    cache.code([b"source", b"-DROWS=16"], Compiler(b"of 16"))
    assert cache.code(other, Compiler(b"other")) == b"other"
    assert cache.code([b"source", b"-DROWS=16"], Compiler(b"wrong")) == b"of 16"


@pytest.mark.parametrize("damage", [b"", b"x" * 31, b"x" * 32, b"x" * 100])
def test_a_damaged_file_is_compiled_again(tmp_path: Path, damage: bytes) -> None:
    cache, compiler = KernelCache(tmp_path), Compiler()
    cache.code([b"source"], compiler)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert cache.code([b"source"], compiler) == b"code"
    assert cache.code([b"source"], compiler) == b"code"
    assert compiler.calls == 2


def test_who_cannot_write_compiles_every_time(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    compiler = Compiler()
    for _ in range(2):
        assert KernelCache(file / "kernels").code([b"source"], compiler) == b"code"
    assert compiler.calls == 2


def test_what_fails_to_compile_is_not_kept(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("line 3")

    cache = KernelCache(tmp_path)
    with pytest.raises(RuntimeError, match="line 3"):
        cache.code([b"source"], fail)
    assert cache.code([b"source"], Compiler()) == b"code"


def test_a_user_without_a_home_compiles_every_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_directory() == tmp_path / ".cache" / "slipstream" / "kernels"
    monkeypatch.setattr(Path, "home", homeless)
    assert user_directory() is None
    compiler = Compiler()
    for _ in range(2):
        assert KernelCache(user_directory()).code([b"source"], compiler) == b"code"
    assert compiler.calls == 2
