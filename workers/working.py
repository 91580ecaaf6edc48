"""Memory that computing takes beside weights and pools: pure arithmetic on a worker's sizes.

Estimates that err on the large side: what they leave over is lost to KV, what they lack ends a worker. The largest
parts are what a prefill step holds at its widest layer, and the logits of a decode step.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.layout import KvGeometry

_OF_LIBRARIES = (
    512 << 20
)  # handles, compiled kernels and workspaces of CUDA's libraries, loaded as they are used
_FRAGMENTATION = 1.2
_LEAST_ATTENTION_BYTES = 128 << 20
_QUERY_TILE = 128  # flashinfer's largest
_BLOCKS_PER_MULTIPROCESSOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingSet:
    """Sizes of one worker. `width`: tokens verified per request and step; `block_size`: 0 without a drafter;
    `expert_elements`: what a token's way through a mixture of experts holds at most at a time, 0 without one.

    `num_ranks_met`: ranks whose tokens meet in its MLPs, 1 unless each has tokens of its own. Its part of an MLP is as
    much smaller as it has more tokens then, but for what goes in and comes out, and for a mixture, where all experts of
    a token have their rows on every rank.
    """

    target: KvGeometry
    draft: KvGeometry | None
    num_heads: int
    draft_heads: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_taps: int
    max_batch: int
    width: int
    block_size: int
    chunk_tokens: int
    num_ranks_met: int = 1
    expert_elements: int = 0

    @property
    def eager_bytes(self) -> int:
        """Of plain torch on a GPU: a step's activations, some of them in float32 copies."""
        return int(2 * self._step_bytes * _FRAGMENTATION) + _OF_LIBRARIES

    def captured_bytes(self, num_multiprocessors: int) -> int:
        """Of captured steps with flashinfer."""
        return self.eager_bytes + self._logits_bytes + self.attention_bytes(num_multiprocessors)

    def attention_bytes(self, num_multiprocessors: int) -> int:
        """Scratch of flashinfer for partial results: float32, one tile of queries for every unit of its schedule."""
        need = _LEAST_ATTENTION_BYTES
        parts = [(self.target, self.num_heads, self.width)]
        if self.draft is not None:
            parts.append((self.draft, self.draft_heads, self.block_size))
        for geometry, heads, width in parts:
            rows = self.max_batch * width * (heads // geometry.num_kv_heads)
            tiles = -(-rows // _QUERY_TILE) + self.max_batch
            units = max(tiles, _BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors // geometry.num_kv_heads)
            need = max(need, heads * units * _QUERY_TILE * (geometry.head_dim + 1) * 4 + (1 << 20))
        return need

    @property
    def _logits_bytes(self) -> int:
        return self.max_batch * self.width * self.vocab_size * self.target.element_bytes

    @property
    def _step_bytes(self) -> int:
        """Activations at the widest point of a step: residual, norm and products of one layer, taps, draft context."""
        tokens = max(self.chunk_tokens, self.max_batch * max(self.width, self.block_size))
        draft_elements = 0
        if self.draft is not None:
            draft_elements = 3 * self.draft.bytes_per_token // self.draft.element_bytes
        elements = 4 * self.hidden_size
        elements += max(3 * self.intermediate_size, self.expert_elements * self.num_ranks_met)
        elements += 2 * (self.num_ranks_met - 1) * self.hidden_size
        elements += 2 * self.num_taps * self.hidden_size + draft_elements
        return tokens * elements * self.target.element_bytes
