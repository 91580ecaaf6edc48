"""A decoder with a pool of its own, driven a chunk at a time as an engine would."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvmanager.layout import KvGeometry
from workers.attention.torch import TorchPagedAttention
from workers.models.decoder import Decoder, DecoderOutput
from workers.storage import KvStorage


class PagedDecoder:
    """Requests 0 .. num_requests - 1, each with shuffled pages of its own and nothing written yet."""

    def __init__(
        self, decoder: Decoder, *, page_size: int = 4, max_positions: int = 64, num_requests: int = 1
    ) -> None:
        config = decoder.config
        geometry = KvGeometry(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            element_bytes=decoder.dtype.itemsize,
        )
        pages_each = geometry.pages_for(max_positions)
        storage = KvStorage(geometry, 1 + num_requests * pages_each, decoder.dtype, decoder.device)
        storage.pool.fill_(float("nan"))  # what was never written must never be read
        self.decoder = decoder
        self.attention = TorchPagedAttention(storage)
        order = torch.randperm(num_requests * pages_each, generator=torch.Generator().manual_seed(7)) + 1
        self.page_rows = order.to(torch.int32).view(num_requests, pages_each)
        self.lengths = [0] * num_requests

    @torch.inference_mode()
    def step(
        self, chunks: dict[int, Sequence[int]], taps: tuple[int, ...] = (), commit: bool = True
    ) -> DecoderOutput:
        """One step over {request: its next tokens}; `commit=False` leaves lengths as they were."""
        requests = list(chunks)
        q_lens = [len(chunks[request]) for request in requests]
        starts = [self.lengths[request] for request in requests]
        kv_lens = [start + q_len for start, q_len in zip(starts, q_lens, strict=True)]
        plan = self.attention.plan(self.page_rows[requests], q_lens, kv_lens, causal=True)
        device = self.decoder.device
        tokens = torch.tensor([token for request in requests for token in chunks[request]], device=device)
        positions = torch.cat(
            [torch.arange(a, b, device=device) for a, b in zip(starts, kv_lens, strict=True)]
        )
        output = self.decoder.forward(tokens, positions, self.attention, plan, taps)
        if commit:
            for request, kv_len in zip(requests, kv_lens, strict=True):
                self.lengths[request] = kv_len
        return output

    @torch.inference_mode()
    def logits(self, chunks: dict[int, Sequence[int]], commit: bool = True) -> Tensor:
        """Logits [T, V] of every token of the step."""
        return self.decoder.logits(self.step(chunks, commit=commit).hidden_TH)
