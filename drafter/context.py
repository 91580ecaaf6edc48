"""From the target's hidden states to the drafter's context: keys and values of every draft layer.

For each committed token the taps (outputs of chosen target layers, concatenated) are projected once to
c = hidden_norm(fc · taps). Every draft layer's context keys and values are linear in that same c, without the
layer's input norm, MLP or residual, so all layers' projections are one matrix product; keys then get their
layer's k_norm and the rotation of the token's position. Values stay raw. (z-lab/dflash,
`Qwen3DFlashAttention`.)

Shapes: T tokens flat over requests, X = taps × target hidden size, H draft hidden size, L draft layers, N KV
heads, D head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.layers import TORCH_OPS, LayerOps, RotaryTable, rotate
from drafter.linear import Linear


class ContextProjection:
    """Weights that turn taps into context keys and values; stateless between calls."""

    def __init__(
        self,
        *,
        fc_HX: Tensor,
        hidden_norm_H: Tensor,
        k_proj_LMH: Tensor,
        v_proj_LMH: Tensor,
        k_norm_LD: Tensor,
        eps: float,
        rotary: RotaryTable,
        ops: LayerOps = TORCH_OPS,
    ) -> None:
        """`k_proj_LMH`, `v_proj_LMH`: each layer's projection, M = N·D rows."""
        self._fc = Linear(fc_HX)
        self._hidden_norm_H = hidden_norm_H
        self._num_layers, self._head_dim = k_norm_LD.shape
        # Rows ordered [L, K|V, N, D]: one product serves all layers, and each layer's K and V are plain views
        # of it.
        self._kv_proj = Linear(torch.stack((k_proj_LMH, v_proj_LMH), dim=1).flatten(0, 2))
        self._k_norm_L1D = k_norm_LD[:, None, :]
        self._eps = eps
        self._rotary = rotary
        self._ops = ops

    @property
    def linears(self) -> tuple[Linear, Linear]:
        return self._fc, self._kv_proj

    def project(self, taps_TX: Tensor, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values for T committed tokens at `positions_T`: two tensors [L, T, N, D]."""
        num_tokens = taps_TX.shape[0]
        context_TH = self._ops.rms_norm(self._fc(taps_TX), self._hidden_norm_H, self._eps)
        kv = self._kv_proj(context_TH).view(num_tokens, self._num_layers, 2, -1, self._head_dim)
        keys_TLND = F.rms_norm(kv[:, :, 0], (self._head_dim,), None, self._eps) * self._k_norm_L1D
        # `rotate` wants [T, heads, D]; a rotation does not care which layer a head belongs to.
        rotation = self._ops.rotation(self._rotary, positions_T)
        rotated = rotate(keys_TLND.reshape(num_tokens, -1, self._head_dim), rotation)
        keys_LTND = rotated.view(num_tokens, self._num_layers, -1, self._head_dim).transpose(0, 1)
        return keys_LTND, kv[:, :, 1].transpose(0, 1)
