"""Decode speed of our target beside transformers' generate, in one run: the same weights, prompts and thread count.

    .venv-parity/bin/python -m tests.parity.target_speed [--threads 2] [--tokens 64] [--rounds 3]

The two take turns, so a busy machine slows both; the best round of each counts. Prints tokens/s at batch 1 and 8.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.parity.greedy import GreedyBatch
from workers.models.decoder import Decoder
from workers.models.load import load_decoder
from workers.pairs import resolve_pair


def main() -> None:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = resolve_pair("smollm2").target_path
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    decoder = load_decoder(path, torch.float32)
    for batch_size in (1, 8):
        ours, theirs = compared(decoder, peer, batch_size, options.tokens, options.rounds)
        print(
            f"batch {batch_size}: ours {ours:.1f} tokens/s, transformers {theirs:.1f}, ratio {ours / theirs:.2f}"
        )


def compared(
    decoder: Decoder, peer: Any, batch_size: int, num_tokens: int, rounds: int
) -> tuple[float, float]:
    """Tokens per second of ours and of the peer."""
    prompts = torch.randint(100, 40000, (batch_size, 64), generator=torch.Generator().manual_seed(1))
    batch = GreedyBatch(decoder, batch_size, 64 + num_tokens)

    def generate_ours() -> None:
        batch.generate(prompts.tolist(), num_tokens, frozenset())

    def generate_theirs() -> None:
        mask = torch.ones_like(prompts)
        peer.generate(
            prompts,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )

    seconds: dict[Callable[[], None], list[float]] = {generate_ours: [], generate_theirs: []}
    for _ in range(rounds):
        for generate, taken in seconds.items():
            start = time.perf_counter()
            generate()
            taken.append(time.perf_counter() - start)
    count = batch_size * num_tokens
    return count / min(seconds[generate_ours]), count / min(seconds[generate_theirs])


if __name__ == "__main__":
    main()
