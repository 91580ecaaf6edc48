"""CUDA kernels compiled for a CPU, with `emulated.h` in the device's place, and called with torch's tensors."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

_HERE = Path(__file__).parent
_COMPILER = shutil.which("g++")
_LONGEST_S = 60.0


@functools.cache
def can_compile() -> bool:
    """Whether there is a compiler, with barriers of C++20."""
    if _COMPILER is None:
        return False
    command = [_COMPILER, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=b"#include <barrier>", capture_output=True).returncode == 0


class Map(ctypes.Structure):
    """A tensor as `emulated.h` takes it; up to five dimensions, innermost first."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("sizes", ctypes.c_longlong * 5),
        ("strides", ctypes.c_longlong * 5),
        ("box", ctypes.c_int * 5),
        ("fresh", ctypes.c_void_p),
    )

    @classmethod
    def of(
        cls,
        tensor: Tensor,
        sizes: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        fresh: Tensor | None = None,
    ) -> Map:
        """`strides`, in elements, of all dimensions but the innermost. What is missing is one."""
        missing = 5 - len(sizes)
        return cls(
            tensor.data_ptr(),
            (ctypes.c_longlong * 5)(*sizes, *[1] * missing),
            (ctypes.c_longlong * 5)(1, *strides, *[0] * missing),
            (ctypes.c_int * 5)(*box, *[1] * missing),
            None if fresh is None else fresh.data_ptr(),
        )


@functools.cache
def compiled(kernel: Path, **macros: int) -> ctypes.CDLL:
    """The kernel for these macros. Raises CalledProcessError for one that does not compile."""
    assert _COMPILER is not None
    directory = tempfile.mkdtemp()
    library = Path(directory) / "kernel.so"
    try:
        subprocess.run(
            [
                *(_COMPILER, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread"),
                *(f"-D{name}={value}" for name, value in macros.items()),
                *(f'-DKERNEL_FILE="{kernel}"', f"-I{_HERE}", "-o", str(library), str(_HERE / "emulate.cpp")),
            ],
            check=True,
            capture_output=True,
        )
        return ctypes.CDLL(str(library))
    finally:
        shutil.rmtree(directory)


def run(kernel: ctypes.CDLL, *arguments: object) -> None:
    """Call it in a process of its own, which it may end or keep waiting. What it writes to lies in shared memory.

    Raises RuntimeError for a kernel that was refused something (standard error says what) or never ended.
    """
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # the child runs the kernel and nothing of Python's threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            kernel.run(*arguments)
            status = 0
        finally:
            os._exit(status)
    until_s = time.monotonic() + _LONGEST_S
    while time.monotonic() < until_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status:
                raise RuntimeError(f"the kernel was ended: status {os.waitstatus_to_exitcode(status)}")
            return
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise RuntimeError(f"the kernel waits for what does not come: not over after {_LONGEST_S:g} s")


def address(tensor: Tensor) -> ctypes.c_void_p:
    """Of its first element."""
    return ctypes.c_void_p(tensor.data_ptr())
