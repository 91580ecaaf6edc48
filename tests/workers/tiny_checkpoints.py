"""Random checkpoints of a few thousand weights, and a dense float64 model of their families to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file
from torch import Tensor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
MIXTURE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json: 3 layers, 4 heads over 2 kv heads, vocabulary 61; of `qwen3_moe`, 3 of 8 experts move a token."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family.startswith("qwen3") else 16,
        "hidden_act": "silu",
        "vocab_size": 61,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | (MIXTURE if family == "qwen3_moe" else {}) | changes


def has_experts(config: dict[str, Any], layer: int) -> bool:
    if config["model_type"] != "qwen3_moe":
        return False
    return layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Float32 tensors under Hugging Face's names, as the config demands them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    family = config["model_type"]
    tensors = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, scale=1.0)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        mlps = {"mlp": inner}
        if has_experts(config, index):
            tensors[f"{layer}mlp.gate.weight"] = normal(config["num_experts"], hidden, scale=2 * hidden**-0.5)
            mlps = {f"mlp.experts.{e}": config["moe_intermediate_size"] for e in range(config["num_experts"])}
        for name, rows, columns in (
            ("self_attn.q_proj", q_rows, hidden),
            ("self_attn.k_proj", kv_rows, hidden),
            ("self_attn.v_proj", kv_rows, hidden),
            ("self_attn.o_proj", hidden, q_rows),
            *((f"{mlp}.{part}_proj", rows, hidden) for mlp, rows in mlps.items() for part in ("gate", "up")),
            *((f"{mlp}.down_proj", hidden, columns) for mlp, columns in mlps.items()),
        ):
            tensors[f"{layer}{name}.weight"] = normal(rows, columns, scale=columns**-0.5)
            if family == "qwen2" and name[-6] in "qkv" and "attn" in name:
                tensors[f"{layer}{name}.bias"] = normal(rows, scale=0.5)
        for name, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            tensors[f"{layer}{name}.weight"] = 1 + normal(size, scale=0.2)
        if family.startswith("qwen3"):
            for name in ("q_norm", "k_norm"):
                tensors[f"{layer}self_attn.{name}.weight"] = 1 + normal(head_dim, scale=0.2)
    tensors["model.norm.weight"] = 1 + normal(hidden, scale=0.2)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = normal(config["vocab_size"], hidden, scale=hidden**-0.5)
    return tensors


def stacked_experts(config: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same checkpoint as transformers 5 may write it: one tensor each for a layer's gates and ups, and downs."""
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for index in range(config["num_hidden_layers"]):
        if has_experts(config, index):
            part = f"model.layers.{index}.mlp.experts."
            gates, ups, downs = (
                torch.stack([tensors[f"{part}{e}.{kind}_proj.weight"] for e in range(config["num_experts"])])
                for kind in ("gate", "up", "down")
            )
            kept |= {f"{part}gate_up_proj": torch.cat((gates, ups), 1), f"{part}down_proj": downs}
    return kept


def write_directory(
    path: Path, config: dict[str, Any], tensors: dict[str, Tensor], num_shards: int = 1
) -> Path:
    """A Hugging Face directory, with an index when there are several shards."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def write_gguf(
    path: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tokens: list[str] | None = None,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it: rotary rows of the Llama family interleaved."""
    family = config["model_type"]
    writer = GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
    for name, tensor in tensors.items():
        array = tensor.numpy()
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        if array.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, index, part = stem.split(".", 3)
    return f"blk.{index}.{GGUF_NAMES[part]}.{kind}"


def dense_forward(
    config: dict[str, Any], tensors: dict[str, Tensor], token_ids: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, V] and every layer's output [T, H] of one sequence, straight from the definitions, in float64."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    head_dim, eps = config["head_dim"], config["rms_norm_eps"]
    num_tokens = len(token_ids)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[name + ".weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        product = x @ weights[name + ".weight"].T
        return product + weights[name + ".bias"] if name + ".bias" in weights else product

    def rotated(x_HTD: Tensor) -> Tensor:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        angle = torch.arange(num_tokens, dtype=torch.float64)[:, None] * config["rope_theta"] ** -exponent
        first, second = x_HTD.chunk(2, dim=-1)
        return torch.cat(
            (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1
        )

    def mlp(x: Tensor, part: str) -> Tensor:
        gated = F.silu(linear(x, part + "gate_proj")) * linear(x, part + "up_proj")
        return linear(gated, part + "down_proj")

    def mixture(x: Tensor, part: str) -> Tensor:
        chances = linear(x, part + "gate").softmax(-1)
        least = chances.sort(descending=True)[0][:, config["num_experts_per_tok"] - 1, None]
        chances = chances * (chances >= least)
        if config["norm_topk_prob"]:
            chances = chances / chances.sum(-1, keepdim=True)
        moved = [mlp(x, f"{part}experts.{e}.") for e in range(config["num_experts"])]
        return (torch.stack(moved, 1) * chances[:, :, None]).sum(1)

    x = weights["model.embed_tokens.weight"][token_ids]
    outputs: list[Tensor] = []
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        normed = norm(x, layer + "input_layernorm")
        q, k, v = (
            linear(normed, f"{layer}self_attn.{part}_proj").view(num_tokens, -1, head_dim).transpose(0, 1)
            for part in "qkv"
        )
        if config["model_type"].startswith("qwen3"):
            q, k = norm(q, layer + "self_attn.q_norm"), norm(k, layer + "self_attn.k_norm")
        repeats = q.shape[0] // k.shape[0]
        k, v = rotated(k).repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
        scores = rotated(q) @ k.transpose(1, 2) / head_dim**0.5
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(num_tokens, -1)
        x = x + linear(mixed, layer + "self_attn.o_proj")
        normed = norm(x, layer + "post_attention_layernorm")
        if has_experts(config, index):
            x = x + mixture(normed, layer + "mlp.")
        else:
            x = x + mlp(normed, layer + "mlp.")
        outputs.append(x)
    head = weights["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, "model.norm") @ head.T, outputs
