"""Tokens per second of the smollm2 target without drafting, beside transformers on the same GPU and weights.

    python -m tests.bench.gpu.against_transformers [--batches 1 8] [--new-tokens 256] [--compiled]

transformers runs `generate` with its static cache, launched from Python, and with --compiled as it compiles it. Both
get prompts of equal length and bfloat16. What starts before the first token of ours (captures) is not counted, nor is
its first `generate`.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor

from kvmanager.ids import RequestId
from tests.bench.gpu.figures import report
from workers.aggregated import AggregatedEngine
from workers.assembly import Models, build, load_models
from workers.config import PairSpec, WorkerConfig
from workers.models.decoder import Decoder
from workers.models.mlp import DenseMlp
from workers.request import SamplingParams, SubmitRequest

PROMPT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    config = WorkerConfig(
        role="aggregated",
        pair=PairSpec(name="smollm2"),
        device="cuda",
        dtype="bfloat16",
        max_batch=max(options.batches),
        chunk_tokens=8192,
        drafting=False,
        prefix_cache=False,
    )
    models = load_models(config)
    theirs = transformers_model(models.decoder)
    for batch in options.batches:
        prompts = [[(7 * row + 13 * place) % 4000 + 100 for place in range(PROMPT)] for row in range(batch)]
        ours_s = run_ours(config, models, prompts, options.new_tokens)
        eager_s = run_theirs(theirs, prompts, options.new_tokens, compiled=False)
        tokens = batch * options.new_tokens
        report(
            "tokens per second: slipstream over transformers",
            batch,
            tokens / ours_s,
            "tok/s",
            tokens / eager_s,
        )
        if options.compiled:
            compiled_s = run_theirs(theirs, prompts, options.new_tokens, compiled=True)
            report(
                "tokens per second: slipstream over transformers compiled",
                batch,
                tokens / ours_s,
                "tok/s",
                tokens / compiled_s,
            )


def run_ours(config: WorkerConfig, models: Models, prompts: list[list[int]], new_tokens: int) -> float:
    assembly = build(config, models)
    assembly.prepare()
    engine = assembly.engine
    assert isinstance(engine, AggregatedEngine)
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    seconds = 0.0
    for turn in range(2):  # the first warms up
        began = time.perf_counter()
        for row, prompt in enumerate(prompts):
            request_id = RequestId(f"{turn} {row}")
            engine.submit(
                SubmitRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=sampling)
            )
        with torch.inference_mode():
            while not engine.idle:
                engine.step(0.0)
        seconds = time.perf_counter() - began
    return seconds


def transformers_model(decoder: Decoder) -> Any:
    """transformers' Llama with our weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = decoder.config
    config = LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        rms_norm_eps=ours.rms_norm_eps,
        rope_theta=ours.rope.theta,
        max_position_embeddings=ours.max_position_embeddings,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    left = model.load_state_dict(their_tensors(decoder), strict=False)
    assert not left.unexpected_keys
    assert left.missing_keys in ([], ["lm_head.weight"])
    model.tie_weights()
    return model


def their_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Our weights by the names of transformers' Llama."""
    ours = decoder.config
    tensors = {"model.embed_tokens.weight": decoder.embed_weight, "model.norm.weight": decoder._final_norm}
    q_rows, kv_rows = ours.num_heads * ours.head_dim, ours.num_kv_heads * ours.head_dim
    for index, layer in enumerate(decoder._layers):
        at = f"model.layers.{index}."
        q, k, v = layer.qkv.dense_weight().split([q_rows, kv_rows, kv_rows])
        assert isinstance(layer.mlp, DenseMlp)
        gate, up = layer.mlp.gate_up.dense_weight().chunk(2)
        tensors |= {
            f"{at}input_layernorm.weight": layer.input_norm,
            f"{at}post_attention_layernorm.weight": layer.post_attention_norm,
            f"{at}self_attn.q_proj.weight": q,
            f"{at}self_attn.k_proj.weight": k,
            f"{at}self_attn.v_proj.weight": v,
            f"{at}self_attn.o_proj.weight": layer.output.dense_weight(),
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": layer.mlp.down.dense_weight(),
        }
    return tensors


def run_theirs(model: Any, prompts: list[list[int]], new_tokens: int, *, compiled: bool) -> float:
    ids = torch.tensor(prompts, device="cuda")
    seconds = 0.0
    for _ in range(2):  # the first warms up
        began = time.perf_counter()
        with torch.inference_mode(not compiled), torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
                cache_implementation="static",
                disable_compile=not compiled,
            )
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return seconds


if __name__ == "__main__":
    main()
