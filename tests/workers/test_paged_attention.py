from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvmanager.layout import KvGeometry
from tests.device import DEVICE
from workers.attention.torch import TorchPagedAttention
from workers.storage import KvStorage

LAYERS, KV_HEADS, SHARED, HEAD_DIM = 2, 2, 3, 8


class Pool:
    """Attention over a pool whose unused positions are NaN, beside dense keys and values [B, positions, N, D]."""

    def __init__(self, kv_lens: list[int], page_size: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(11)
        geometry = KvGeometry(
            num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=page_size,
            element_bytes=dtype.itemsize,
        )  # fmt: skip
        pages_each = geometry.pages_for(max(kv_lens)) + 1
        storage = KvStorage(geometry, len(kv_lens) * pages_each, dtype, DEVICE)
        storage.pool.fill_(float("nan"))
        self.storage = storage
        self.attention = TorchPagedAttention(storage)
        self.kv_lens = kv_lens
        order = torch.randperm(len(kv_lens) * pages_each, generator=generator)
        self.page_rows = order.view(len(kv_lens), pages_each).to(torch.int32)
        shape = (LAYERS, len(kv_lens), max(kv_lens), KV_HEADS, HEAD_DIM)
        self.keys = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        self.values = torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        self.queries = torch.randn(
            (len(kv_lens), max(kv_lens), KV_HEADS * SHARED, HEAD_DIM),
            generator=generator,
            dtype=torch.float64,
        ).to(DEVICE, dtype)

    def write(self, upto: list[int]) -> None:
        """Write positions 0 .. upto[b] - 1 of every request that has any."""
        some = [request for request, length in enumerate(upto) if length]
        if not some:
            return
        lens = [upto[request] for request in some]
        plan = self.attention.plan(self.page_rows[some], lens, lens, causal=True)
        for layer in range(LAYERS):
            k = torch.cat([self.keys[layer, request, : upto[request]] for request in some])
            v = torch.cat([self.values[layer, request, : upto[request]] for request in some])
            self.attention.write(layer, k, v, plan)

    def attend(self, q_lens: list[int], causal: bool, layer: int = 1) -> Tensor:
        """The step that ends at kv_lens."""
        self.write([kv_len - q_len for q_len, kv_len in zip(q_lens, self.kv_lens, strict=True)])
        plan = self.attention.plan(self.page_rows, q_lens, self.kv_lens, causal)
        assert plan.num_tokens == sum(q_lens)
        for index in range(LAYERS):
            k, v = (self._last(dense[index], q_lens) for dense in (self.keys, self.values))
            self.attention.write(index, k, v, plan)
            result = self.attention.attend(index, self._last(self.queries, q_lens), plan)
            if index == layer:
                wanted = result
        return wanted

    def expected(self, q_lens: list[int], causal: bool, layer: int = 1) -> Tensor:
        """The same from the definition, one query and head at a time."""
        rows = []
        for request, (q_len, kv_len) in enumerate(zip(q_lens, self.kv_lens, strict=True)):
            for position in range(kv_len - q_len, kv_len):
                seen = position + 1 if causal else kv_len
                for head in range(KV_HEADS * SHARED):
                    k = self.keys[layer, request, :seen, head // SHARED].double()
                    v = self.values[layer, request, :seen, head // SHARED].double()
                    scores = k @ self.queries[request, position, head].double() / HEAD_DIM**0.5
                    rows.append(scores.softmax(0) @ v)
        return torch.stack(rows).view(-1, KV_HEADS * SHARED, HEAD_DIM)

    def _last(self, dense: Tensor, q_lens: list[int]) -> Tensor:
        return torch.cat(
            [dense[b, kv - q : kv] for b, (q, kv) in enumerate(zip(q_lens, self.kv_lens, strict=True))]
        )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [
        pytest.param([1], [1], id="first token"),
        pytest.param([1], [4], id="page exactly full"),
        pytest.param([1], [5], id="first position of a page"),
        pytest.param([9], [9], id="whole prompt"),
        pytest.param([5], [12], id="later chunk"),
        pytest.param([1, 1, 1], [7, 3, 21], id="decode"),
        pytest.param([4, 4], [9, 30], id="verify"),
        pytest.param([4, 4], [4, 30], id="block without context beside one with it"),
        pytest.param([6, 6], [6, 6], id="two whole prompts"),
        pytest.param([1, 5, 1, 4, 5], [8, 5, 200, 11, 17], id="mixed"),
    ],
)
def test_attention_equals_its_definition(
    q_lens: list[int], kv_lens: list[int], page_size: int, causal: bool
) -> None:
    pool = Pool(kv_lens, page_size)
    found = pool.attend(q_lens, causal)
    torch.testing.assert_close(found, pool.expected(q_lens, causal), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kv_len", [191, 192, 193, 250, 383, 384, 385])
def test_sums_over_many_positions_leave_none_out(kv_len: int) -> None:
    pool = Pool([kv_len], page_size=16)
    torch.testing.assert_close(pool.attend([2], True), pool.expected([2], True), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06), (torch.float16, 0.01)]
)
def test_every_dtype_attends(dtype: torch.dtype, tolerance: float) -> None:
    pool = Pool([9, 40], page_size=4, dtype=dtype)
    found = pool.attend([3, 3], True)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), pool.expected([3, 3], True), rtol=0, atol=tolerance)


def test_keys_and_values_land_where_the_page_layout_says() -> None:
    pool = Pool([6], page_size=4)
    pool.write([6])
    for layer in range(LAYERS):
        for position in range(6):
            page, offset = int(pool.page_rows[0, position // 4]), position % 4
            stored = pool.storage.pool[page, layer, :, :, offset]  # [K|V, N, D]
            assert torch.equal(stored[0], pool.keys[layer, 0, position])
            assert torch.equal(stored[1], pool.values[layer, 0, position])
    assert int(pool.storage.pool.isnan().logical_not().sum()) == 6 * LAYERS * 2 * KV_HEADS * HEAD_DIM


def test_scratch_positions_past_the_committed_length_are_overwritten() -> None:
    """A draft block is written beyond the context, then its place is taken by what was accepted."""
    pool = Pool([12], page_size=4)
    pool.write([8])
    block = pool.attention.plan(pool.page_rows, [4], [12], causal=False)
    for layer in range(LAYERS):
        rubbish = torch.full((4, KV_HEADS, HEAD_DIM), 1e6, dtype=torch.float64, device=DEVICE)
        pool.attention.write(layer, rubbish, rubbish, block)
    pool.kv_lens = [10]
    torch.testing.assert_close(pool.attend([2], True), pool.expected([2], True), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "problem"),
    [
        ([], [], "at least one"),
        ([1], [1, 2], "equally many"),
        ([0], [3], "q_len 0"),
        ([4], [3], "q_len 4 and kv_len 3"),
        ([1], [9], "<= 8"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(q_lens: list[int], kv_lens: list[int], problem: str) -> None:
    pool = Pool([4], page_size=4)
    with pytest.raises(ValueError, match=problem):
        pool.attention.plan(pool.page_rows[: len(q_lens)], q_lens, kv_lens, causal=True)
