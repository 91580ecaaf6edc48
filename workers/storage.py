"""The memory that holds keys and values of one manager (the target's or the draft's): one pool of pages.

A page is contiguous: [layer, K|V, kv_head, position, head_dim]; the pool is [pages, *page]. The storage is
the only owner of the memory; attention reads views of it and the transceiver registers its address. The base
is aligned to 4 KiB, because host copies whose two ends sit a few bytes apart modulo 4,096 run an order of
magnitude slower.
"""

from __future__ import annotations

import torch

from kvmanager.layout import KvGeometry

_ALIGNMENT_BYTES = 4096


class KvStorage:
    """A zero-filled pool of `num_pages` pages. It lives as long as the worker; pages are never moved."""

    def __init__(
        self, geometry: KvGeometry, num_pages: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """Raises ValueError when `dtype` does not have the element size the geometry was planned with."""
        if dtype.itemsize != geometry.element_bytes:
            raise ValueError(
                f"KV dtype {dtype} has {dtype.itemsize} bytes per element, "
                f"but the geometry was made for {geometry.element_bytes}"
            )
        self.geometry = geometry
        self.num_pages = num_pages
        self.dtype = dtype
        self.size_bytes = num_pages * geometry.page_bytes
        with torch.inference_mode(False):  # so that pages may be written inside and outside of it
            raw = torch.zeros(self.size_bytes + _ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
        skip = -raw.data_ptr() % _ALIGNMENT_BYTES
        self.pool = raw[skip : skip + self.size_bytes].view(dtype).view(geometry.pool_shape(num_pages))

    @property
    def address(self) -> int:
        """Address of the first page, a multiple of 4,096."""
        return self.pool.data_ptr()

    @property
    def device(self) -> torch.device:
        return self.pool.device
