"""Layers that the target model and the draft model share: RMS norm, rotary positions, gated activation.

`LayerOps` is what a model asks of its device between matrix products. `TORCH_OPS` defines what is right and serves
CPUs; `workers.fused` fuses the same steps into one kernel each on a GPU.

Rotary positions follow Hugging Face's "rotate half" convention: element i of a head is paired with element i
+ D/2. Angles are computed in float32 (float64 for a float64 model), as the checkpoints' own training code
does.

Shapes: T tokens flat over requests, N heads, D head_dim, H hidden size, I intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

# torch cuts larger elementwise operations among its threads, in the middle of a row too, and computes the ends of the
# pieces by another exponential: a row's result would depend on how many rows share the step.
_ELEMENTS_ON_ONE_THREAD = 32_768

RopeType = Literal["default", "linear", "llama3", "yarn"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension; `weight` has that dimension's size."""
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) * up, where the gate is the first half of the last dimension; returns [T, I]."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    rows = max(1, _ELEMENTS_ON_ONE_THREAD // gate.shape[-1])
    if len(gate) <= rows or gate.device.type != "cpu":
        return F.silu(gate) * up
    return torch.cat([F.silu(part) for part in gate.split(rows)]).mul_(up)


class RopeError(ValueError):
    """A checkpoint's rotary settings that this code does not implement; the message names the field."""


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Rotary settings of one model, parsed once from either dialect of config.json."""

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    divisors: tuple[float, ...] = ()  # per pair, applied last; GGUF files carry llama3 scaling in this form

    @classmethod
    def from_config(cls, config: Mapping[str, Any], default_theta: float = 10000.0) -> RopeParameters:
        """Read `rope_parameters` (new dialect) or `rope_theta` + `rope_scaling` (old one).

        Raises RopeError for a scaling type or field that is not implemented.
        """
        merged: dict[str, Any] = dict(config.get("rope_scaling") or {})
        merged.update(config.get("rope_parameters") or {})
        theta = float(merged.get("rope_theta") or config.get("rope_theta") or default_theta)
        partial = merged.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if float(partial) != 1.0:
            raise RopeError(f"partial_rotary_factor {partial} is not supported (only 1.0)")
        kind = merged.get("rope_type") or merged.get("type") or "default"
        if kind not in get_args(RopeType):
            raise RopeError(
                f"rope_type {kind!r} is not supported (supported: {', '.join(get_args(RopeType))})"
            )
        if kind == "default":
            return cls(theta)
        max_positions = int(config.get("max_position_embeddings") or 0)
        original = int(
            merged.get("original_max_position_embeddings")
            or config.get("original_max_position_embeddings")
            or max_positions
        )
        factor = merged.get("factor")
        if factor is None:
            if kind != "yarn" or not original:
                raise RopeError(f"rope_type {kind!r} needs the field 'factor'")
            factor = max_positions / original
        if kind == "linear":
            return cls(theta, "linear", float(factor))
        if not original:
            raise RopeError(f"rope_type {kind!r} needs the field 'original_max_position_embeddings'")
        if kind == "llama3":
            for field in ("low_freq_factor", "high_freq_factor"):
                if field not in merged:
                    raise RopeError(f"rope_type 'llama3' needs the field {field!r}")
            return cls(
                theta,
                "llama3",
                float(factor),
                original,
                low_freq_factor=float(merged["low_freq_factor"]),
                high_freq_factor=float(merged["high_freq_factor"]),
            )
        return cls(
            theta,
            "yarn",
            float(factor),
            original,
            attention_factor=_yarn_attention_factor(merged, float(factor)),
            beta_fast=float(merged.get("beta_fast") or 32.0),
            beta_slow=float(merged.get("beta_slow") or 1.0),
            truncate=bool(merged.get("truncate", True)),
        )


def _yarn_attention_factor(merged: Mapping[str, Any], factor: float) -> float:
    explicit = merged.get("attention_factor")
    if explicit is not None:
        return float(explicit)

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, mscale_all = merged.get("mscale"), merged.get("mscale_all_dim")
    if mscale and mscale_all:
        return scale(float(mscale)) / scale(float(mscale_all))
    return scale(1.0)


def inverse_frequencies(rope: RopeParameters, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Radians per position of each of the head_dim/2 pairs, [D/2], after scaling.

    Sources: llama3, the reference implementation of Llama 3.1; yarn, Peng et al. 2023, section 3.2.
    """
    scaled = _scaled_frequencies(rope, head_dim, dtype)
    return scaled / torch.tensor(rope.divisors, dtype=dtype) if rope.divisors else scaled


def _scaled_frequencies(rope: RopeParameters, head_dim: int, dtype: torch.dtype) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(dtype) / head_dim
    base = 1.0 / (rope.theta**exponents)
    match rope.rope_type:
        case "default":
            return base
        case "linear":
            return base / rope.factor
        case "llama3":
            return _llama3_frequencies(rope, base)
        case "yarn":
            return _yarn_frequencies(rope, base, head_dim)


def _llama3_frequencies(rope: RopeParameters, base: Tensor) -> Tensor:
    low_wavelength = rope.original_max_positions / rope.low_freq_factor
    high_wavelength = rope.original_max_positions / rope.high_freq_factor
    wavelength = 2 * math.pi / base
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * base / rope.factor + smooth * base
    scaled = torch.where(wavelength > low_wavelength, base / rope.factor, base)
    medium = (wavelength >= high_wavelength) & (wavelength <= low_wavelength)
    return torch.where(medium, blended, scaled)


def _yarn_frequencies(rope: RopeParameters, base: Tensor, head_dim: int) -> Tensor:
    def dimension_of(rotations: float) -> float:
        return (head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, head_dim - 1.0)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    ramp = ((torch.arange(head_dim // 2, dtype=base.dtype) - low) / (high - low)).clamp(0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)


class Rotation(NamedTuple):
    """Cosines and signed sines of a step's positions, [T, 1, D] each, ready for `rotate`."""

    cos_T1D: Tensor
    sin_T1D: Tensor  # the first half of D is negated, so rotate-half needs no negation of its own


class RotaryTable:
    """A model's rotary frequencies; `at` gives the rotation of a step's positions once for all its layers."""

    def __init__(
        self, rope: RopeParameters, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """`dtype` is the dtype of the queries and keys to rotate."""
        if head_dim % 2:
            raise RopeError(f"head_dim {head_dim} is odd; rotary positions need pairs")
        self.dtype = dtype
        self._angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        half = inverse_frequencies(rope, head_dim, self._angle_dtype)
        self.frequencies_D = torch.cat((half, half)).to(device)  # radians per position
        sign = torch.ones(head_dim, dtype=self._angle_dtype)
        sign[: head_dim // 2] = -1
        self.scale = rope.attention_factor
        self.signed_scale_D = (sign * rope.attention_factor).to(device)

    def at(self, positions_T: Tensor) -> Rotation:
        """The rotation of integer positions [T], on the table's device."""
        angles_T1D = positions_T.to(self._angle_dtype)[:, None, None] * self.frequencies_D
        cos = angles_T1D.cos()
        if self.scale != 1.0:
            cos = cos * self.scale
        return Rotation(cos.to(self.dtype), (angles_T1D.sin() * self.signed_scale_D).to(self.dtype))


def rotate(x_TND: Tensor, rotation: Rotation) -> Tensor:
    """Rotate every head of [T, N, D] to its position: x·cos + rotate_half(x)·sin."""
    half = x_TND.shape[-1] // 2
    swapped = torch.cat((x_TND[..., half:], x_TND[..., :half]), dim=-1)
    return torch.addcmul(x_TND * rotation.cos_T1D, swapped, rotation.sin_T1D)


class Heads(NamedTuple):
    """A step's queries, keys and values, [T, heads, D] each."""

    q_THD: Tensor
    k_THD: Tensor
    v_THD: Tensor


@dataclass(frozen=True, slots=True)
class Projection:
    """What a layer makes of its fused projection, [T, num_heads + 2 * num_kv_heads, D]: queries, keys, values.

    `norms`: of queries and of keys, [D] each, before both are rotated.
    """

    num_heads: int
    num_kv_heads: int
    norms: tuple[Tensor, Tensor] | None
    eps: float


def split_heads(fused_TND: Tensor, projection: Projection, rotation: Rotation) -> Heads:
    """A step's heads, normalised and rotated."""
    num_heads, first_v = projection.num_heads, projection.num_heads + projection.num_kv_heads
    v_THD = fused_TND[:, first_v:]
    if projection.norms is None:
        rotated = rotate(fused_TND[:, :first_v], rotation)
        return Heads(rotated[:, :num_heads], rotated[:, num_heads:], v_THD)
    q_norm, k_norm = projection.norms
    q_THD = rotate(rms_norm(fused_TND[:, :num_heads], q_norm, projection.eps), rotation)
    k_THD = rotate(rms_norm(fused_TND[:, num_heads:first_v], k_norm, projection.eps), rotation)
    return Heads(q_THD, k_THD, v_THD)


class LayerOps(Protocol):
    """The steps between a model's matrix products, as its device computes them best."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `rms_norm`."""

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of x + residual, and that sum, each [T, H]. The arguments stay as they are."""

    def swiglu(self, gate_up_T2I: Tensor) -> Tensor:
        """As `swiglu`."""

    def rotation(self, table: RotaryTable, positions_T: Tensor) -> Rotation:
        """As `RotaryTable.at`."""


class TorchOps:
    """`LayerOps` in plain torch, on any device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total_TH = residual_TH + x_TH
        return rms_norm(total_TH, weight, eps), total_TH

    def swiglu(self, gate_up_T2I: Tensor) -> Tensor:
        return swiglu(gate_up_T2I)

    def rotation(self, table: RotaryTable, positions_T: Tensor) -> Rotation:
        return table.at(positions_T)


TORCH_OPS: LayerOps = TorchOps()
