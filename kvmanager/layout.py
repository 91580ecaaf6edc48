"""How one model's KV lies in memory: what a page holds, and how many pages a run of tokens needs.

A page is `page_size` token positions of all layers, contiguous in memory, in the order

    [layer, K|V, kv_head, position in page, head_dim]        ("layer-interleaved, HND")

and a pool is [num_pages, *page]. One page is therefore one descriptor of a transfer, and adjacent pages are
one run. A drafter's KV has a pool of its own (`mirrored`) or lies behind the target's in every page (`unified`):

    [target: layer, K|V, kv_head, position, head_dim][draft: layer, K|V, kv_head, position, head_dim]

Attention reads one layer at a time through a buffer whose dim 0 a page table points into. Two such views of a
layer are in use. They differ in what one step of dim 0 is, and so in how a page id becomes a table entry:

    strided   pool[:, layer]: dim 0 counts pages                            entry = page id
    dense     the pool as one run of layers, from this one on: dim 0        entry = page id * layers per page
              counts every layer of every page
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvmanager.errors import InvalidCount, LayoutRefused

DraftKv = Literal["mirrored", "unified"]
PoolLayout = Literal["strided", "dense"]


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

    @property
    def page_elements(self) -> int:
        return self.page_bytes // self.element_bytes

    @property
    def layer_elements(self) -> int:
        """Elements of K and V of one layer of a page."""
        return self.page_elements // self.num_layers


def require_unifiable(target: KvGeometry, draft: KvGeometry) -> None:
    """Raise LayoutRefused unless both models' KV can share pages."""
    for name, word in (("page_size", "page size"), ("element_bytes", "element size")):
        ours, theirs = getattr(target, name), getattr(draft, name)
        if ours != theirs:
            raise LayoutRefused(
                f"unified pages need one {word}: the target's is {ours}, the drafter's {theirs}; "
                "use draft_kv = mirrored"
            )


def entries_per_page(stride: int, *, page_elements: int, layer_elements: int) -> int:
    """The factor from page id to table entry, from the `stride(0)` of a layer's buffer, in elements.

    `page_elements` lie between two pages of the pool, `layer_elements` hold one layer of one page. Raises
    LayoutRefused for a stride that is neither, or when layers do not tile the page: with a guessed factor a
    drafter reads other tokens' context, and nothing but its acceptance shows it.
    """
    if stride == page_elements:
        return 1
    if stride == layer_elements and page_elements % layer_elements == 0:
        return page_elements // layer_elements
    raise LayoutRefused(
        f"a layer's buffer has stride(0) {stride}; pages are {page_elements} elements apart and one layer of a "
        f"page has {layer_elements}: table entries can count pages, or layers when they tile a page exactly"
    )
