"""A Llama-style target in the batched form that training needs: whole sequences at once, and one token of many
sequences at once over a static cache.

The serving engine has its own paged form of the same mathematics; this one exists because data generation decodes
thousands of sequences in lockstep and training reads hidden states of whole answers. Weights come in and go out
under Hugging Face names, so either form loads what the other has written.

Legend: B sequences, S positions, H hidden size, N query heads, G key/value heads, D head_dim, V vocabulary,
X taps times hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """What fixes the sizes of a Llama-style model with tied embeddings."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int

    def to_config(self, *, bos_token_id: int, eos_token_id: int, dtype: str) -> dict[str, Any]:
        """The config.json of a Hugging Face directory that holds such a model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": dtype,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
        }


class RmsNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Autocast would widen the input in memory; the fused kernel widens it in registers.
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32, shape positions.shape + [head_dim], for the "rotate half" convention."""
    inverse = theta ** (
        -torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    )
    angles = positions[..., None].float() * inverse
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x; cos and sin broadcast against it."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class LlamaLayer(nn.Module):
    """One decoder layer; q, k, v and gate, up are fused."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.qkv = nn.Linear(shape.hidden_size, q_size + 2 * kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)
        self.gate_up = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [..., N, D], k and v [..., G, D] of normalised input; rotary applied to q and k."""
        s = self.shape
        qkv = self.qkv(self.input_layernorm(x)).unflatten(-1, (s.num_heads + 2 * s.num_kv_heads, s.head_dim))
        q, k, v = qkv.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=-2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection and MLP, each with its residual; attended is [..., N*D]."""
        x = x + self.o_proj(attended)
        gate, up = self.gate_up(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down_proj(F.silu(gate) * up)
        return out

    def forward(self, x_BSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.project(x_BSH, cos, sin))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.finish(x_BSH, attended.transpose(1, 2).flatten(2))


class Llama(nn.Module):
    """The whole model. Right-padded input is safe: causal attention never looks at padding from a real position."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.num_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def blocks(self) -> Iterator[LlamaLayer]:
        """The layers in order, typed."""
        for layer in self.layers:
            assert isinstance(layer, LlamaLayer)
            yield layer

    @property
    def embedding_VH(self) -> Tensor:
        """Embedding and, tied, the output projection."""
        return self.embed_tokens.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Final normalised hidden states [B, S, H]."""
        x = self._run(tokens_BS, ())[0]
        normed: Tensor = self.norm(x)
        return normed

    @torch.no_grad()
    def taps(self, tokens_BS: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
        """Outputs of the named layers (0-based), concatenated: [B, S, X]. Layers behind the last tap are not run."""
        return torch.cat(self._run(tokens_BS, layer_ids)[1], dim=-1)

    @torch.no_grad()
    def taps_and_final(self, tokens_BS: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The same outputs, and the final normalised hidden states [B, S, H]."""
        x, taps = self._run(tokens_BS, layer_ids, to_the_end=True)
        return torch.cat(taps, dim=-1), self.norm(x)

    def _run(
        self, tokens_BS: Tensor, layer_ids: tuple[int, ...], *, to_the_end: bool = False
    ) -> tuple[Tensor, list[Tensor]]:
        positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x = self.embed_tokens(tokens_BS)
        cos, sin = rotary_tables(positions, self.shape.head_dim, self.shape.rope_theta)
        cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        taps: list[Tensor] = []
        for index, layer in enumerate(self.blocks()):
            x = layer(x, cos, sin)
            if index in layer_ids:
                taps.append(x)
                if len(taps) == len(layer_ids) and not to_the_end:
                    break
        return x, taps

    def load_weights(self, named: Mapping[str, Tensor]) -> None:
        """Take weights under Hugging Face names. Raises KeyError naming a missing tensor."""
        state = {
            "embed_tokens.weight": named["model.embed_tokens.weight"],
            "norm.weight": named["model.norm.weight"],
        }
        for i in range(self.shape.num_layers):
            theirs, ours = f"model.layers.{i}.", f"layers.{i}."
            qkv = [named[f"{theirs}self_attn.{part}_proj.weight"] for part in "qkv"]
            state[f"{ours}qkv.weight"] = torch.cat(qkv)
            state[f"{ours}o_proj.weight"] = named[f"{theirs}self_attn.o_proj.weight"]
            gate_up = [named[f"{theirs}mlp.{part}_proj.weight"] for part in ("gate", "up")]
            state[f"{ours}gate_up.weight"] = torch.cat(gate_up)
            state[f"{ours}down_proj.weight"] = named[f"{theirs}mlp.down_proj.weight"]
            for norm in ("input_layernorm", "post_attention_layernorm"):
                state[f"{ours}{norm}.weight"] = named[f"{theirs}{norm}.weight"]
        self.load_state_dict(state)

    def weights(self) -> dict[str, Tensor]:
        """The weights under Hugging Face names, contiguous, on the CPU."""
        s = self.shape
        named = {"model.embed_tokens.weight": self.embed_tokens.weight, "model.norm.weight": self.norm.weight}
        q_size, kv_size = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        for i, layer in enumerate(self.blocks()):
            prefix = f"model.layers.{i}."
            q, k, v = layer.qkv.weight.split((q_size, kv_size, kv_size))
            gate, up = layer.gate_up.weight.chunk(2)
            named |= {
                f"{prefix}self_attn.q_proj.weight": q,
                f"{prefix}self_attn.k_proj.weight": k,
                f"{prefix}self_attn.v_proj.weight": v,
                f"{prefix}self_attn.o_proj.weight": layer.o_proj.weight,
                f"{prefix}mlp.gate_proj.weight": gate,
                f"{prefix}mlp.up_proj.weight": up,
                f"{prefix}mlp.down_proj.weight": layer.down_proj.weight,
                f"{prefix}input_layernorm.weight": layer.input_layernorm.weight,
                f"{prefix}post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
            }
        return {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
