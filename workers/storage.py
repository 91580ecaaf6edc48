"""The memory that holds keys and values of one manager (the target's or the draft's): one pool of pages.

A page is contiguous: [layer, K|V, kv_head, position, head_dim], and in unified form the drafter's layers follow
in the same order. The storage is the only owner of the memory; attention reads views of it and the transceiver
registers its address. The base is aligned to 4 KiB, because host copies whose two ends sit a few bytes apart
modulo 4,096 run an order of magnitude slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvmanager.layout import KvGeometry, PoolLayout

_ALIGNMENT_BYTES = 4096


class KvPool(Protocol):
    """One model's part of a pool, as attention needs it."""

    @property
    def geometry(self) -> KvGeometry: ...

    @property
    def pool(self) -> Tensor:
        """[pages, layers, 2, kv_heads, page_size, head_dim]; pages lie `stride(0)` elements apart."""
        ...


@dataclass(frozen=True)
class KvView:
    """A `KvPool` in memory that a storage owns."""

    geometry: KvGeometry
    pool: Tensor


def layer_buffer(pool: Tensor, layer: int, layout: PoolLayout) -> Tensor:
    """One layer's K and V as [entries, 2, kv_heads, page_size, head_dim], for a page table to point into.

    strided: an entry is a page. dense: entries lie one layer apart, so that dim 0 counts every layer of every
    page, from page 0 of this layer on (see `kvmanager.layout.entries_per_page`).
    """
    one_layer = pool[:, layer]
    if layout == "strided":
        return one_layer
    layer_elements = pool.stride(1)
    num_entries = (pool.shape[0] - 1) * pool.stride(0) // layer_elements + 1
    shape = (num_entries, *one_layer.shape[1:])
    return one_layer.as_strided(shape, (layer_elements, *one_layer.stride()[1:]))


class KvStorage:
    """A zero-filled pool of `num_pages` pages. It lives as long as the worker; pages are never moved."""

    def __init__(
        self,
        geometry: KvGeometry,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        appended: KvGeometry | None = None,
    ) -> None:
        """`appended`: KV of a drafter whose layers follow in every page; `appended` is then its view.

        Raises ValueError when `dtype` does not have the element size the geometries were planned with.
        """
        parts = [geometry] if appended is None else [geometry, appended]
        for part in parts:
            if dtype.itemsize != part.element_bytes:
                raise ValueError(
                    f"KV dtype {dtype} has {dtype.itemsize} bytes per element, "
                    f"but the geometry was made for {part.element_bytes}"
                )
        self.geometry = geometry
        self.num_pages = num_pages
        self.dtype = dtype
        self.page_bytes = sum(part.page_bytes for part in parts)
        self.size_bytes = num_pages * self.page_bytes
        with torch.inference_mode(False):  # so that pages may be written inside and outside of it
            raw = torch.zeros(self.size_bytes + _ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
            skip = -raw.data_ptr() % _ALIGNMENT_BYTES
            pages = raw[skip : skip + self.size_bytes].view(dtype).view(num_pages, -1)
            self.pool = pages[:, : geometry.page_elements].view(geometry.pool_shape(num_pages))
            self.appended: KvView | None = None
            if appended is not None:
                behind = pages[:, geometry.page_elements :]
                self.appended = KvView(appended, behind.view(appended.pool_shape(num_pages)))

    @property
    def address(self) -> int:
        """Address of the first page, a multiple of 4,096."""
        return self.pool.data_ptr()

    @property
    def device(self) -> torch.device:
        return self.pool.device
