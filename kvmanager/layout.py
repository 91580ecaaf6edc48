"""How one model's KV lies in memory: what a page holds, and how many pages a run of tokens needs.

A page is `page_size` token positions of all layers, contiguous in memory, in the order

    [layer, K|V, kv_head, position in page, head_dim]        ("layer-interleaved, HND")

and a pool is [num_pages, *page]. One page is therefore one descriptor of a transfer, and adjacent pages are
one run.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvmanager.errors import InvalidCount


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Sizes of one model's KV on one rank.

    `num_kv_heads` counts this rank's heads; `element_bytes` is the dtype's size.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    element_bytes: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size", "element_bytes"):
            if getattr(self, name) < 1:
                raise InvalidCount(name, getattr(self, name), 1)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token position over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        return self.bytes_per_token * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold positions 0 .. num_tokens - 1; none for no tokens."""
        if num_tokens < 0:
            raise InvalidCount("num_tokens", num_tokens, 0)
        return -(-num_tokens // self.page_size)

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        """[num_pages, num_layers, 2, num_kv_heads, page_size, head_dim]"""
        return (num_pages, self.num_layers, 2, self.num_kv_heads, self.page_size, self.head_dim)
