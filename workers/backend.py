"""What computes on a worker's device: chosen once, when its models are loaded, and asked for each part after that.

    torch        any device, dtype and head size, drafters that keep a window; every operation launched from Python
    flashinfer   GPUs, bfloat16 and float16, heads of 64, 128 or 256: flashinfer's attention, fused kernels between the
                 matrix products, decode steps as captured graphs unless the target asks the host on its way; in them
                 products of few rows by `workers.skinny`, on Hopper and in bfloat16

`choose_backend` is the rule, pure. flashinfer, Triton and NVIDIA's bindings are imported only where they are used.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from drafter.dflash import BlockDrafter
from drafter.layers import TORCH_OPS, LayerOps
from kvmanager.layout import PoolLayout
from workers.attention.torch import TorchPagedAttention
from workers.device import multiprocessors
from workers.errors import ModelMismatch
from workers.models.decoder import Decoder
from workers.runner import ModelRunner
from workers.sampler import Sampler
from workers.step import DecodeStep, EagerStep
from workers.storage import KvPool
from workers.tables import StepTables
from workers.working import WorkingSet

if TYPE_CHECKING:
    from workers.skinny import SkinnyProducts

BackendName = Literal["torch", "flashinfer"]

_FLASHINFER_DTYPES = (torch.bfloat16, torch.float16)
_FLASHINFER_HEAD_DIMS = (64, 128, 256)


def choose_backend(
    device: torch.device, dtype: torch.dtype, head_dims: Iterable[int], windowed: bool = False
) -> BackendName:
    """Which back end serves models whose heads have these sizes. `windowed`: a draft layer sees less than all."""
    able = device.type == "cuda" and dtype in _FLASHINFER_DTYPES and not windowed
    return "flashinfer" if able and all(dim in _FLASHINFER_HEAD_DIMS for dim in head_dims) else "torch"


@dataclass(frozen=True, slots=True)
class Pools:
    """A worker's KV pools. `draft` is None without a drafter."""

    target: KvPool
    draft: KvPool | None
    layout: PoolLayout


@dataclass(frozen=True, slots=True)
class Computing:
    """What computes: prefill and plain forwards through `runner`, decode steps through `step`."""

    runner: ModelRunner
    step: DecodeStep


@dataclass(frozen=True, slots=True)
class Loaded:
    """What is to compute. `drafter` is None when nothing is drafted."""

    decoder: Decoder
    drafter: BlockDrafter | None
    tables: StepTables
    sampler: Sampler


class Backend(Protocol):
    """Computes on one device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def ops(self) -> LayerOps:
        """What models are loaded with."""

    def working_bytes(self, working: WorkingSet) -> int:
        """Memory that computing takes beside weights and pools, at most."""

    def bind(self, loaded: Loaded, pools: Pools, working: WorkingSet, *, decodes: bool) -> Computing:
        """Tie models to pools. Raises LayoutRefused for pools that cannot be read in their layout."""


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """Plain torch on `device`."""

    device: torch.device

    @property
    def ops(self) -> LayerOps:
        return TORCH_OPS

    def working_bytes(self, working: WorkingSet) -> int:
        return 0 if self.device.type == "cpu" else working.eager_bytes

    def bind(self, loaded: Loaded, pools: Pools, working: WorkingSet, *, decodes: bool) -> Computing:
        runner = ModelRunner(
            decoder=loaded.decoder,
            target_attention=TorchPagedAttention(pools.target, pools.layout),
            drafter=loaded.drafter,
            draft_attention=None if pools.draft is None else TorchPagedAttention(pools.draft, pools.layout),
            tables=loaded.tables,
            device=self.device,
        )
        return Computing(runner, _eager(loaded, runner))


@dataclass(frozen=True, slots=True)
class FlashInferBackend:
    """flashinfer, fused kernels and captured graphs on a CUDA device."""

    device: torch.device
    ops: LayerOps
    skinny: SkinnyProducts | None  # where there is such a thing for the device and dtype

    def working_bytes(self, working: WorkingSet) -> int:
        return working.captured_bytes(multiprocessors(self.device))

    def bind(self, loaded: Loaded, pools: Pools, working: WorkingSet, *, decodes: bool) -> Computing:
        from workers.attention.flashinfer import FlashInferPagedAttention, Workspace
        from workers.captured import CapturedStep, StepParts

        workspace = Workspace(working.attention_bytes(multiprocessors(self.device)), self.device)
        target = FlashInferPagedAttention(pools.target, pools.layout, workspace)
        draft = None
        if pools.draft is not None:
            draft = FlashInferPagedAttention(pools.draft, pools.layout, workspace)
        runner = ModelRunner(
            decoder=loaded.decoder,
            target_attention=target,
            drafter=loaded.drafter,
            draft_attention=draft,
            tables=loaded.tables,
            device=self.device,
        )
        if not decodes or loaded.decoder.asks_host:
            return Computing(runner, _eager(loaded, runner))
        if self.skinny is not None:
            for linear in (*loaded.decoder.linears, *(loaded.drafter.linears if loaded.drafter else ())):
                linear.skinny = None if linear.has_bias else self.skinny.of(linear.dense_weight())
        parts = StepParts(
            runner=runner,
            sampler=loaded.sampler,
            limits=loaded.tables.limits,
            decoder=loaded.decoder,
            target_attention=target,
            drafter=loaded.drafter,
            draft_attention=draft,
            max_batch=working.max_batch,
            skinny=self.skinny,
        )
        return Computing(runner, CapturedStep(parts))


TORCH_ON_CPU: Backend = TorchBackend(torch.device("cpu"))


def make_backend(
    device: torch.device, dtype: torch.dtype, head_dims: Iterable[int], windowed: bool = False
) -> Backend:
    """The back end that `choose_backend` names. Raises ModelMismatch when its packages are not installed."""
    if choose_backend(device, dtype, head_dims, windowed) == "torch":
        return TorchBackend(device)
    missing = [name for name in ("flashinfer", "triton", "cuda.bindings") if not _installed(name)]
    if missing:
        raise ModelMismatch(
            f"{dtype} on a GPU needs {' and '.join(missing)}: pip install 'slipstream-serve[gpu]'",
            field="device",
        )
    from workers.fused import FusedOps
    from workers.kernels import serves
    from workers.skinny import SkinnyProducts

    skinny = SkinnyProducts(device) if serves(device, dtype) else None
    return FlashInferBackend(device, FusedOps(), skinny)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package it is in
        return False


def _eager(loaded: Loaded, runner: ModelRunner) -> EagerStep:
    return EagerStep(runner=runner, sampler=loaded.sampler, clock=time.perf_counter)
