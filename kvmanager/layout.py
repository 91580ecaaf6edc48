"""How one model's KV lies in memory: what a page holds, and how many pages a run of tokens needs.

A page is `page_size` token positions of all layers, contiguous in memory, in the order

    [layer, K|V, kv_head, position in page, head_dim]        ("layer-interleaved, HND")

and a pool is [num_pages, *page]. One page is therefore one descriptor of a transfer, and adjacent pages are
one run. A drafter's KV has a pool of its own (`mirrored`) or lies behind the target's in every page (`unified`):

    [target: layer, K|V, kv_head, position, head_dim][draft: layer, K|V, kv_head, position, head_dim]

KV with a window keeps the last positions of a request only: of a context of `length` tokens, those from
length - window on. A request then holds the pages of these and of its look-ahead, however long it is:

    positions   0 ....... 15 | 16 ...... 31 | 32 ...... 47 | 48 ...... 63 | 64 ...        page_size 16, window 20
    length 40                | from 20 on: page 1 .. | ... look-ahead
    length 52                               | from 32 on: page 2 .. | ... look-ahead       page 1 has been freed

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

    `num_kv_heads` counts this rank's heads; `element_bytes` is the dtype's size. `window`: how many positions before
    the next token are read, and kept; None: all.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    element_bytes: int
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size", "element_bytes", "window"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
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

    def first_position(self, length: int) -> int:
        """The first position that is still read when the context is `length` tokens long; 0 without a window."""
        return 0 if self.window is None else max(length - self.window, 0)

    def first_page(self, length: int) -> int:
        """The page of `first_position`: those before it are nobody's."""
        return self.first_position(length) // self.page_size

    def most_pages(self, num_positions: int, lookahead: int) -> int:
        """Pages that a request of `num_positions`, of them `lookahead` behind its context, holds at once, at most."""
        pages = self.pages_for(num_positions)
        if self.window is None:
            return pages
        # The window begins anywhere in its first page, at worst in its last position.
        return min(pages, self.pages_for(self.window + lookahead + self.page_size - 1))

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


def kv_head_range(num_kv_heads: int, rank: int, num_ranks: int) -> range:
    """The KV heads of one of several tensor-parallel ranks; with fewer heads than ranks, neighbours hold the same one.

    Raises LayoutRefused for heads that cannot be divided.
    """
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise LayoutRefused(f"{num_kv_heads} KV heads cannot be divided among {num_ranks} ranks")
    first = rank * num_kv_heads // num_ranks
    return range(first, first + max(num_kv_heads // num_ranks, 1))


def require_unifiable(target: KvGeometry, draft: KvGeometry) -> None:
    """Raise LayoutRefused unless both models' KV can share pages."""
    if draft.window is not None:
        raise LayoutRefused(
            f"a drafter that keeps a window of {draft.window} positions cannot share pages with a target that keeps "
            "all: use draft_kv = mirrored"
        )
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
