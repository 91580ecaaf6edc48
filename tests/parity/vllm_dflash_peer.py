"""Runs under vLLM's own Python: greedy answers with its DFlash, as JSON on standard output.

    python vllm_dflash_peer.py JOB.json

JOB.json: {"target", "drafter", "num_draft", "prompts": [[token id]], "max_tokens", "stop_token_ids", "at_once",
"own_k_norm"}. With own_k_norm, one fault of the CPU build of 0.32.0 is put right: it hands all layers' k_norm weights,
[layers, head_dim], to a kernel that on a CPU applies the first row to every layer, so the context keys of all draft
layers but the first are scaled by the wrong weights.
The last line printed is {"answers": [{"tokens": [...], "step_tokens": [...]}], "drafts", "accepted"}: tokens of each
decode step as the engine emitted them, and vLLM's own counters of draft rounds and accepted draft tokens.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import vllm.model_executor.models.qwen3_dflash as qwen3_dflash
from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt
from vllm.sampling_params import RequestOutputKind


def normalize_with_own_weights(self: object, all_k: torch.Tensor) -> torch.Tensor:
    """Keys [L, T, N, D], each layer's scaled by its own k_norm."""
    unit = torch.nn.functional.rms_norm(all_k, all_k.shape[-1:], None, self._rms_norm_eps)  # type: ignore[attr-defined]
    return unit * self._k_norm_weights[:, None, None, :]  # type: ignore[attr-defined]


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if job["own_k_norm"]:
        qwen3_dflash.DFlashQwen3Model._normalize_context_k = normalize_with_own_weights
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=job["target"],
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=job["at_once"],
            enable_prefix_caching=False,
            async_scheduling=False,
            disable_log_stats=False,
            speculative_config={
                "method": "dflash",
                "model": job["drafter"],
                "num_speculative_tokens": job["num_draft"],
            },
        )
    )
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_tokens"],
        stop_token_ids=job["stop_token_ids"],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    answers = [{"tokens": [], "step_tokens": []} for _ in job["prompts"]]
    for index, prompt in enumerate(job["prompts"]):
        engine.add_request(str(index), TokensPrompt(prompt_token_ids=prompt), sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            if not tokens:
                continue
            answer = answers[int(output.request_id.split("-")[0])]
            if answer["tokens"]:
                answer["step_tokens"].append(len(tokens))
            answer["tokens"].extend(tokens)
    counters = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    print(
        json.dumps(
            {
                "answers": answers,
                "drafts": counters.get("vllm:spec_decode_num_drafts"),
                "accepted": counters.get("vllm:spec_decode_num_accepted_tokens"),
            }
        )
    )


if __name__ == "__main__":
    main()
