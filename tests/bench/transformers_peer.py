"""transformers' `generate`, greedy, behind stdin and stdout: run by a Python that has transformers and gguf.

python transformers_peer.py TARGET NUM_THREADS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def load(target: Path) -> torch.nn.Module:
    if target.is_dir():
        return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return AutoModelForCausalLM.from_pretrained(target.parent, gguf_file=target.name, dtype=torch.float32)


def main() -> None:
    target, num_threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(num_threads)
    model = load(target).eval()
    for line in sys.stdin:
        request = json.loads(line)
        prompts = request.get("prompts", [[1, 2, 3, 4]])
        max_tokens = request.get("max_tokens", 4)
        width = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        started_s = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started_s
        tokens = (output.shape[1] - width) * len(prompts)
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
