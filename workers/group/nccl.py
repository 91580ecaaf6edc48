"""NCCL between the GPUs of a group: the few calls that a step makes of it, on the stream that computes the step.

NCCL's own library is called rather than torch's process group around it. A step is captured in graphs and replayed,
which makes no call that a process group could time, and its thread ends the whole process when a call is late; here a
group ends by `abort`, which whoever finds that ranks are gone may call (see `workers.group.watch`).

    meet ──▶ calls, of which some are captured ──▶ abort

A captured call is replayed by all ranks or by none: they capture at the same steps, since a step has the same shape on
all of them, after warm-ups that connect what the capture uses. Aborting ends what runs on the device at once, and then
waits for the graphs that hold calls, in a thread that nobody waits for. Variables of NCCL's in the environment are left
to whoever starts the process.

Signatures: nccl.h, the same from NCCL 2.13 on.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = "libnccl.so.2"  # torch has loaded it
_UNIQUE_ID_BYTES = 128
_SUM = 0
_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
# A call that has begun gets so long to return before the communicator goes; it may itself wait for a rank that is gone.
_IN_CALL_S = 1.0
# Without graphs that hold calls, aborting takes less. A process that ends lets go of its graphs and waits longer: a
# library must not go while a thread is in it.
_ABORTING_S, _EXITING_S = 1.0, 5.0


class NcclError(RuntimeError):
    """A call failed, or its library is missing."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _UNIQUE_ID_BYTES),)


def load_nccl() -> Any:
    """The library with its signatures. Raises NcclError."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NcclError(f"a group of GPUs needs NCCL, which torch brings along for CUDA: {error}") from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, arguments in (
        ("ncclGetUniqueId", [ctypes.POINTER(_UniqueId)]),
        ("ncclCommInitRank", [ctypes.POINTER(pointer), number, _UniqueId, number]),
        ("ncclAllReduce", [pointer, pointer, size, number, number, pointer, pointer]),
        ("ncclAllGather", [pointer, pointer, size, number, pointer, pointer]),
        ("ncclBroadcast", [pointer, pointer, size, number, number, pointer, pointer]),
        ("ncclCommAbort", [pointer]),
    ):
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    for name, told in (("ncclGetErrorString", number), ("ncclGetLastError", pointer)):
        function = getattr(library, name)
        function.argtypes, function.restype = [told], ctypes.c_char_p
    return library


class Nccl:
    """Implements `workers.group.exchange.Exchange` for tensors on `device`."""

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        show: Callable[[bytes], bytes],
        library: Any = None,
        stream: Callable[[], int] | None = None,
    ) -> None:
        """Meet the others; `show` as in `workers.group.exchange.Connect`. Raises NcclError.

        `device`: the calling thread's present one. Waits without limit for the others, and nothing ends that: a
        communicator that does not wait here does not in later calls either, which then are to be asked again and again
        whether they have begun. `library`, `stream`: stand-ins for tests.
        """
        self._library = load_nccl() if library is None else library
        self._stream = stream or (lambda: int(torch.cuda.current_stream(device).cuda_stream))
        self._calling = threading.Lock()
        self._comm: ctypes.c_void_p | None = None
        unique_id = _UniqueId()
        if rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(unique_id)), "ncclGetUniqueId")
        shown = show(bytes(unique_id))
        comm = ctypes.c_void_p()
        self._stream()  # torch's own context of the device comes first
        joined = self._library.ncclCommInitRank(
            ctypes.byref(comm), size, _UniqueId.from_buffer_copy(shown), rank
        )
        self._check(joined, "ncclCommInitRank")
        self._comm = comm

    def sum(self, x: Tensor) -> None:
        self._call("ncclAllReduce", x.data_ptr(), x.data_ptr(), x.numel(), _TYPES[x.dtype], _SUM)

    def gather(self, own: Tensor, gathered: Tensor) -> None:
        self._call("ncclAllGather", own.data_ptr(), gathered.data_ptr(), own.numel(), _TYPES[own.dtype])

    def spread(self, x: Tensor, rank: int) -> None:
        self._call("ncclBroadcast", x.data_ptr(), x.data_ptr(), x.numel(), _TYPES[x.dtype], rank)

    def abort(self) -> None:
        comm, self._comm = self._comm, None  # no call begins from here on
        if comm is None:
            return
        returned = self._calling.acquire(timeout=_IN_CALL_S)
        aborting = threading.Thread(
            target=self._library.ncclCommAbort, args=(comm,), name="nccl-abort", daemon=True
        )
        aborting.start()
        atexit.register(_see_off, aborting)
        if returned:
            self._calling.release()
        aborting.join(_ABORTING_S)

    def _call(self, name: str, *arguments: int) -> None:
        with self._calling:
            if self._comm is None:
                raise NcclError("this rank has left the group")
            self._check(getattr(self._library, name)(*arguments, self._comm, self._stream()), name)

    def _check(self, result: int, name: str) -> None:
        if result != 0:
            error, last = self._library.ncclGetErrorString(result), self._library.ncclGetLastError(None)
            raise NcclError(f"{name}: {error.decode()}: {last.decode().strip()}")


def _see_off(aborting: threading.Thread) -> None:
    gc.collect()  # graphs that nobody needs any more, and that the thread waits for
    aborting.join(_EXITING_S)
