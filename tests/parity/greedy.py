"""A greedy loop over our decoder: the least an engine does, for comparisons with other implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvmanager.layout import KvGeometry
from workers.attention.torch import TorchPagedAttention
from workers.models.decoder import Decoder
from workers.storage import KvStorage


class GreedyBatch:
    """Requests that start together and decode in step, each over pages of its own."""

    def __init__(self, decoder: Decoder, num_requests: int, max_positions: int, page_size: int = 16) -> None:
        config = decoder.config
        geometry = KvGeometry(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            element_bytes=decoder.dtype.itemsize,
        )
        pages_each = geometry.pages_for(max_positions)
        storage = KvStorage(geometry, num_requests * pages_each, decoder.dtype)
        self._decoder = decoder
        self._attention = TorchPagedAttention(storage)
        self._page_rows = torch.arange(num_requests * pages_each, dtype=torch.int32).view(num_requests, -1)

    @torch.inference_mode()
    def logits(self, request: int, token_ids: Sequence[int]) -> Tensor:
        """Logits [T, V] of a whole sequence from position 0."""
        return self._decoder.logits(self._forward([request], [list(token_ids)], [0]))

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, eos: frozenset[int]
    ) -> list[list[int]]:
        """Greedy answers, without the token that ended them; a finished request keeps its place till all are."""
        last = [
            int(self._decoder.logits(self._forward([request], [list(prompt)], [0])[-1:]).argmax())
            for request, prompt in enumerate(prompts)
        ]
        answers: list[list[int]] = [[] for _ in prompts]
        running = set(range(len(prompts)))
        for step in range(max_tokens):
            running -= {request for request in running if last[request] in eos}
            for request in running:
                answers[request].append(last[request])
            if not running or step == max_tokens - 1:
                break
            hidden = self._forward(
                range(len(prompts)), [[token] for token in last], [len(prompt) + step for prompt in prompts]
            )
            last = self._decoder.logits(hidden).argmax(dim=-1).tolist()
        return answers

    def _forward(self, requests: Sequence[int], tokens: Sequence[list[int]], starts: Sequence[int]) -> Tensor:
        q_lens = [len(chunk) for chunk in tokens]
        kv_lens = [start + q_len for start, q_len in zip(starts, q_lens, strict=True)]
        plan = self._attention.plan(self._page_rows[list(requests)], q_lens, kv_lens, causal=True)
        ids = torch.tensor([token for chunk in tokens for token in chunk])
        positions = torch.cat([torch.arange(a, b) for a, b in zip(starts, kv_lens, strict=True)])
        return self._decoder.forward(ids, positions, self._attention, plan).hidden_TH
