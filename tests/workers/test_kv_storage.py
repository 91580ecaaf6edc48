from __future__ import annotations

import pytest
import torch

from kvmanager.layout import KvGeometry
from workers.storage import KvStorage

GEOMETRY = KvGeometry(num_layers=3, num_kv_heads=2, head_dim=4, page_size=5, element_bytes=4)


@pytest.mark.parametrize("num_pages", [1, 7, 100])
def test_the_pool_starts_on_a_memory_page_and_holds_zeros(num_pages: int) -> None:
    storage = KvStorage(GEOMETRY, num_pages, torch.float32)
    assert storage.address % 4096 == 0
    assert storage.address == storage.pool.data_ptr()
    assert storage.pool.shape == (num_pages, 3, 2, 2, 5, 4)
    assert storage.pool.is_contiguous()
    assert not storage.pool.any()


def test_its_size_is_that_of_its_pages() -> None:
    storage = KvStorage(GEOMETRY, 7, torch.float32)
    assert storage.size_bytes == 7 * GEOMETRY.page_bytes == storage.pool.nbytes
    assert storage.pool[1].data_ptr() - storage.pool[0].data_ptr() == GEOMETRY.page_bytes


def test_a_dtype_the_geometry_was_not_made_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bfloat16 has 2 bytes per element.*made for 4"):
        KvStorage(GEOMETRY, 1, torch.bfloat16)


def test_a_pool_made_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        storage = KvStorage(GEOMETRY, 1, torch.float32)
    storage.pool.fill_(1.0)
    assert storage.pool.all()
