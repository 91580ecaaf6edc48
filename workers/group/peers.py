"""Sums of a step's activations straight out of the other GPUs' memory: one kernel each, where NCCL's take several times
as long for so few bytes.

Every rank has a region of memory that the others can read: signals, and two halves for data. In call e of a rank,

    own part ──▶ own half e % 2 ── e ──▶ the others' signals
    their signals reach e ──▶ all parts, added in rank order in float32 ──▶ the result, rounded once

so all ranks have the same sum, bit for bit, whatever shares the step. A half is written again two calls later: a rank
that has seen another's signal of call e + 1 knows that its call e, with all that it read, is over. Calls are counted on
the device, so that captured ones count too. Each program of a kernel has a slice of its own and waits for the same
program of the other ranks alone; there are never more programs than multiprocessors, so all of them run.

A rank that is gone leaves the others waiting here as in NCCL, until `abort` says on the host that they are to go on:
what they leave then is void. Larger tensors, other calls and ranks without such memory go over NCCL.

The region is the driver's (cuMemAlloc, cuIpc*) and stays until the process ends, for others may read it.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.group.exchange import Exchange

_log = logging.getLogger(__name__)

_LIBRARY = "libcuda.so.1"
_HANDLE_BYTES = 64
_ENABLE_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_PROGRAMS = 128
_BLOCK, _LARGE_BLOCK = (
    4096,
    8192,
)  # elements of a program at a time; the larger where there are several turns of them
_SIGNAL = 16  # int64s from one signal to the next: a line of the cache each, which one program alone looks at
_HEADER_BYTES = 1 << 18  # signals, [ranks, programs]
_HALF_BYTES = 16 << 20
_LOOK_EVERY = 2048  # turns of waiting between looks at the host's word
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BOOT_ID_BYTES = 36
_SUMMED = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _peer_sum_kernel(
    x_ptr,
    regions_ptr,
    calls_ptr,
    left_ptr,
    numel,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADER: tl.constexpr,
    HALF: tl.constexpr,
    SIGNAL: tl.constexpr,
    LOOK_EVERY: tl.constexpr,
):
    program = tl.program_id(0)
    call = tl.load(calls_ptr + program) + 1
    tl.debug_barrier()  # all threads have read it
    tl.store(calls_ptr + program, call)
    begin = program * BLOCK
    if begin >= numel:
        return
    data = HEADER + (call % 2) * HALF
    own = tl.load(regions_ptr + RANK)
    elements = tl.arange(0, BLOCK)

    half_ptr = tl.multiple_of((own + data).to(x_ptr.dtype), 16)
    for at in range(begin, numel, PROGRAMS * BLOCK):
        inside = at + elements < numel
        tl.store(half_ptr + at + elements, tl.load(x_ptr + at + elements, mask=inside), mask=inside)

    tl.debug_barrier()  # every thread has stored before one of them says so
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            signals_ptr = tl.load(regions_ptr + rank).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(
                signals_ptr + (RANK * PROGRAMS + program) * SIGNAL, call, sem="release", scope="sys"
            )
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            signal_ptr = own.to(tl.pointer_type(tl.int64)) + (rank * PROGRAMS + program) * SIGNAL
            seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
            turns = 0
            while seen < call:
                seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
                turns += 1
                if turns % LOOK_EVERY == 0:  # noqa: SIM102 (`and` would look in every turn)
                    if tl.load(left_ptr, volatile=True) != 0:
                        seen = call
    tl.debug_barrier()

    for at in range(begin, numel, PROGRAMS * BLOCK):
        inside = at + elements < numel
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            half_ptr = tl.multiple_of((tl.load(regions_ptr + rank) + data).to(x_ptr.dtype), 16)
            part = tl.load(half_ptr + at + elements, mask=inside, other=0.0, cache_modifier=".cg")
            total += part.to(tl.float32)
        tl.store(x_ptr + at + elements, total.to(x_ptr.dtype.element_ty), mask=inside)


class PeerSums:
    """Implements `workers.group.exchange.Exchange` where `open_regions` found the ranks' memory within reach."""

    def __init__(self, over: Exchange, rank: int, regions: list[int], device: torch.device) -> None:
        """`over`: what everything else goes over. `regions`: where each rank's lies, as this one reaches it."""
        self._over = over
        self._rank = rank
        self._size = len(regions)
        with torch.inference_mode(False):
            self._regions = torch.tensor(regions, dtype=torch.int64, device=device)
            self._calls = torch.zeros(_PROGRAMS, dtype=torch.int64, device=device)
            self._left = torch.zeros(1, dtype=torch.int32).pin_memory()

    def sum(self, x: Tensor) -> None:
        if x.dtype not in _SUMMED or not 0 < x.nbytes <= _HALF_BYTES or x.data_ptr() % 16:
            self._over.sum(x)
            return
        _peer_sum_kernel[(_PROGRAMS,)](
            x,
            self._regions,
            self._calls,
            self._left,
            x.numel(),
            RANK=self._rank,
            SIZE=self._size,
            PROGRAMS=_PROGRAMS,
            BLOCK=_BLOCK if x.numel() <= _PROGRAMS * _BLOCK else _LARGE_BLOCK,
            HEADER=_HEADER_BYTES,
            HALF=_HALF_BYTES,
            SIGNAL=_SIGNAL,
            LOOK_EVERY=_LOOK_EVERY,
            num_warps=16,
        )

    def gather(self, own: Tensor, gathered: Tensor) -> None:
        self._over.gather(own, gathered)

    def spread(self, x: Tensor, rank: int) -> None:
        self._over.spread(x, rank)

    def abort(self) -> None:
        self._left.fill_(1)
        self._over.abort()


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * _HANDLE_BYTES),)


def with_peer_sums(over: Exchange, rank: int, size: int, device: torch.device) -> Exchange:
    """`over`, with sums over peers' memory if every rank reaches every other's; all ranks call it, and agree."""
    regions = open_regions(over, rank, size, device)
    return over if regions is None else PeerSums(over, rank, regions, device)


def open_regions(over: Exchange, rank: int, size: int, device: torch.device) -> list[int] | None:
    """Where each rank's region lies, or None on all ranks: they are on several hosts, or their GPUs have no way to each
    other. The ranks show each other their handles over `over`.
    """
    driver = _Driver()
    torch.zeros(1, device=device)  # makes torch's context this thread's
    own = driver.new_region()
    shown = _gathered(over, size, _BOOT_ID.read_bytes()[:_BOOT_ID_BYTES] + (own[1] if own else b""), device)
    regions = [0] * size
    if own is not None and all(
        len(each) == len(shown[rank]) and each[:_BOOT_ID_BYTES] == shown[rank][:_BOOT_ID_BYTES]
        for each in shown
    ):
        regions = [
            own[0] if each == rank else driver.open(handle[_BOOT_ID_BYTES:])
            for each, handle in enumerate(shown)
        ]
    found = _gathered(over, size, bytes((all(regions),)), device)
    if all(answer == b"\x01" for answer in found):
        return regions
    without = [each for each, answer in enumerate(found) if answer != b"\x01"]
    _log.info("ranks %s do not reach the others' memory: sums go over NCCL", without)
    return None


def _gathered(over: Exchange, size: int, own: bytes, device: torch.device) -> list[bytes]:
    """What each rank shows, of at most 255 bytes."""
    frame = bytes((len(own),)) + own
    mine = torch.frombuffer(bytearray(frame.ljust(256, b"\0")), dtype=torch.uint8).to(device)
    gathered = torch.empty((size, 256), dtype=torch.uint8, device=device)
    over.gather(mine, gathered)
    return [bytes(row[1 : 1 + row[0]]) for row in gathered.tolist()]


class _Driver:
    """The few calls that are made of CUDA's driver."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(_LIBRARY)
        address = ctypes.POINTER(ctypes.c_uint64)
        for name, arguments in (
            ("cuMemAlloc_v2", [address, ctypes.c_size_t]),
            ("cuMemsetD8_v2", [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t]),
            ("cuIpcGetMemHandle", [ctypes.POINTER(_Handle), ctypes.c_uint64]),
            ("cuIpcOpenMemHandle_v2", [address, _Handle, ctypes.c_uint]),
        ):
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, ctypes.c_int

    def new_region(self) -> tuple[int, bytes] | None:
        """Its address and its handle; None where the driver makes none."""
        address, handle = ctypes.c_uint64(), _Handle()
        num_bytes = _HEADER_BYTES + 2 * _HALF_BYTES
        if self._library.cuMemAlloc_v2(ctypes.byref(address), num_bytes) != 0:
            return None
        if self._library.cuMemsetD8_v2(address, 0, num_bytes) != 0:
            return None
        if self._library.cuIpcGetMemHandle(ctypes.byref(handle), address) != 0:
            return None
        torch.cuda.synchronize()  # it is zero before anybody hears of it
        return address.value, bytes(handle)

    def open(self, handle: bytes) -> int:
        """Another rank's region, as this one reaches it; 0 when it does not."""
        address = ctypes.c_uint64()
        opened = self._library.cuIpcOpenMemHandle_v2(
            ctypes.byref(address), _Handle.from_buffer_copy(handle), _ENABLE_PEERS
        )
        return address.value if opened == 0 else 0
