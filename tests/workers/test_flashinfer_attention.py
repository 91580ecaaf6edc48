"""flashinfer against torch over the same pages: both layouts of a pool, both forms of the drafter's KV, all steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from drafter.attention import PagedAttention
from kvmanager.layout import KvGeometry, PoolLayout
from workers.attention.torch import TorchPagedAttention
from workers.storage import KvStorage, KvView

pytestmark = pytest.mark.gpu

LAYERS, KV_HEADS, PAGE = 3, 2, 16
TOLERANCE = 0.02  # bfloat16 keeps eight bits
STEPS = [
    pytest.param([1], [1], id="first token"),
    pytest.param([1, 1, 1], [7, 16, 17], id="decode at page edges"),
    pytest.param([8, 8, 8, 8], [8, 30, 200, 1000], id="block, with and without context"),
    pytest.param([16, 16], [48, 33], id="block that crosses a page"),
    pytest.param([300], [300], id="whole prompt"),
    pytest.param([100], [260], id="later chunk"),
    pytest.param([1, 5, 64, 4], [9, 5, 64, 500], id="ragged"),
]


class Pages:
    """The same random keys and values in a bfloat16 pool for flashinfer and in a float32 one for torch."""

    def __init__(
        self, kv_lens: Sequence[int], head_dim: int, shared: int, layout: PoolLayout, *, unified: bool
    ) -> None:
        from workers.attention.flashinfer import FlashInferPagedAttention, Workspace

        self.generator = torch.Generator("cuda").manual_seed(5)
        self.kv_lens = list(kv_lens)
        self.shape = (KV_HEADS, head_dim)
        self.num_heads = KV_HEADS * shared
        pages_each = -(-max(kv_lens) // PAGE) + 1
        order = torch.randperm(len(kv_lens) * pages_each, generator=torch.Generator().manual_seed(1)) + 1
        self.rows = order.view(len(kv_lens), pages_each).to(torch.int32)
        num_pages = 1 + len(kv_lens) * pages_each
        exact = KvStorage(self._geometry(head_dim, 4), num_pages, torch.float32, "cuda")
        here = self._pool(num_pages, head_dim, unified=unified)
        here.pool.fill_(float("nan"))  # what was never written must never be read
        here.pool[0] = 0  # but the dummy page's, by padding
        self.workspace = Workspace(128 << 20, torch.device("cuda"))
        self.flashinfer = FlashInferPagedAttention(here, layout, self.workspace)
        self.torch = TorchPagedAttention(exact)
        self._fill()

    def _geometry(self, head_dim: int, element_bytes: int) -> KvGeometry:
        return KvGeometry(
            num_layers=LAYERS,
            num_kv_heads=KV_HEADS,
            head_dim=head_dim,
            page_size=PAGE,
            element_bytes=element_bytes,
        )

    def _pool(self, num_pages: int, head_dim: int, *, unified: bool) -> KvStorage | KvView:
        geometry = self._geometry(head_dim, 2)
        if not unified:
            return KvStorage(geometry, num_pages, torch.bfloat16, "cuda")
        storage = KvStorage(geometry, num_pages, torch.bfloat16, "cuda", appended=geometry)
        assert storage.appended is not None
        return storage.appended

    def random(self, num_tokens: int, num_heads: int) -> Tensor:
        shape = (num_tokens, num_heads, self.shape[1])
        return torch.randn(shape, generator=self.generator, device="cuda").to(torch.bfloat16)

    def _fill(self) -> None:
        for attention, plan in self._plans(self.kv_lens, self.kv_lens, causal=True):
            self.generator.manual_seed(6)
            for layer in range(LAYERS):
                k, v = self.random(sum(self.kv_lens), KV_HEADS), self.random(sum(self.kv_lens), KV_HEADS)
                dtype = torch.bfloat16 if attention is self.flashinfer else torch.float32
                attention.write(layer, k.to(dtype), v.to(dtype), plan)

    def _plans(
        self, q_lens: Sequence[int], kv_lens: Sequence[int], causal: bool
    ) -> list[tuple[PagedAttention, Any]]:
        attentions: tuple[PagedAttention, ...] = (self.flashinfer, self.torch)
        return [(a, a.plan(self.rows, q_lens, kv_lens, causal)) for a in attentions]

    def attend(self, q_lens: Sequence[int], causal: bool) -> tuple[list[Tensor], list[Tensor]]:
        """What flashinfer and torch find in every layer, the step's own keys and values written by both."""
        (ours, our_plan), (exact, exact_plan) = self._plans(q_lens, self.kv_lens, causal)
        found, expected = [], []
        for layer in range(LAYERS):
            k, v = (self.random(sum(q_lens), KV_HEADS) for _ in range(2))
            q = self.random(sum(q_lens), self.num_heads)
            ours.write(layer, k, v, our_plan)
            exact.write(layer, k.float(), v.float(), exact_plan)
            found.append(ours.attend(layer, q, our_plan).float())
            expected.append(exact.attend(layer, q.float(), exact_plan))
        return found, expected


@pytest.mark.parametrize("causal", [True, False], ids=["target", "drafter"])
@pytest.mark.parametrize(
    ("layout", "unified"), [("strided", False), ("dense", False), ("strided", True), ("dense", True)]
)
@pytest.mark.parametrize(("head_dim", "shared"), [(64, 3), (128, 4)])
@pytest.mark.parametrize(("q_lens", "kv_lens"), STEPS)
def test_flashinfer_attends_as_torch_does(
    q_lens: list[int],
    kv_lens: list[int],
    head_dim: int,
    shared: int,
    layout: PoolLayout,
    unified: bool,
    causal: bool,
) -> None:
    pages = Pages(kv_lens, head_dim, shared, layout, unified=unified)
    found, expected = pages.attend(q_lens, causal)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("causal", [True, False], ids=["target", "drafter"])
@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize(("head_dim", "shared"), [(64, 3), (128, 4), (128, 8)])
@pytest.mark.parametrize("width", [1, 8, 16])
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_captured_plan_with_padding_attends_as_a_plan_of_its_live_requests(
    batch: int, width: int, head_dim: int, shared: int, unified: bool, causal: bool
) -> None:
    """Lengths and pages change between replays; long contexts are cut in parts, short ones are not."""
    from workers.step_rows import StepRows

    kv_lens = [900, 33, 17]
    pages = Pages(kv_lens, head_dim, shared, "strided", unified=unified)
    with torch.inference_mode():
        rows = StepRows(batch, pages.rows.shape[1], 0, torch.device("cuda"))
        shape = {"num_requests": batch, "width": width, "num_heads": pages.num_heads, "causal": causal}
        plan = pages.flashinfer.fixed(rows.target(batch), **shape)
        queries = pages.random(batch * width, pages.num_heads)
        keys, values = (pages.random(batch * width, KV_HEADS) for _ in range(2))

        def body() -> Tensor:
            plan.prepare()
            pages.flashinfer.write(1, keys, values, plan)
            return pages.flashinfer.attend(1, queries, plan)

        rows.park(batch)
        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = body()
        for live in range(min(batch, 3), 0, -1):
            starts = [kv_len - width for kv_len in kv_lens[:live]]
            rows.fill(batch, [0] * live, starts, pages.rows.numpy()[:live])
            captured.fill_(float("nan"))
            graph.replay()
            count = live * width
            exact = pages.torch.plan(pages.rows[:live], [width] * live, kv_lens[:live], causal)
            pages.torch.write(1, keys[:count].float(), values[:count].float(), exact)
            expected = pages.torch.attend(1, queries[:count].float(), exact)
            torch.testing.assert_close(captured[:count].float(), expected, rtol=TOLERANCE, atol=TOLERANCE)
            assert torch.isfinite(captured).all(), "padding computes on the dummy page"


@pytest.mark.parametrize("causal", [True, False], ids=["target", "drafter"])
@pytest.mark.parametrize("shared", [3, 8])
@pytest.mark.parametrize("units_per_head", [3, 6, 40])
def test_parts_of_contexts_are_joined_alike_in_every_replay(
    units_per_head: int, shared: int, causal: bool
) -> None:
    """One program takes a part, or two share it, and whichever is done last joins them."""
    from workers.attention.copied import CopiedPlan
    from workers.kernels import serves
    from workers.step_rows import StepRows

    if not serves(torch.device("cuda"), torch.bfloat16):
        pytest.skip("no Hopper GPU")
    width, kv_lens = 16, [900, 2000, 33, 1400]
    pages = Pages(kv_lens, 128, shared, "strided", unified=False)
    batch, num_heads = len(kv_lens), pages.num_heads
    with torch.inference_mode():
        rows = StepRows(batch, pages.rows.shape[1], 0, torch.device("cuda"))
        rows.fill(batch, [0] * batch, [kv_len - width for kv_len in kv_lens], pages.rows.numpy())
        plan = CopiedPlan(
            rows.target(batch),
            pages.flashinfer._pool[:, 0],
            num_requests=batch,
            width=width,
            num_heads=num_heads,
            causal=causal,
            scratch=pages.workspace.partials.view(torch.float32),
            units_per_head=units_per_head,
        )
        queries = pages.random(batch * width, num_heads)
        found = torch.empty_like(queries)

        def body() -> None:
            plan.prepare()
            plan.attend(queries, pages.flashinfer._pool[:, 1], found)

        body()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        first = found.clone()
        exact = pages.torch.plan(pages.rows, [width] * batch, kv_lens, causal)
        expected = pages.torch.attend(1, queries.float(), exact)
        torch.testing.assert_close(first.float(), expected, rtol=TOLERANCE, atol=TOLERANCE)
        for _ in range(50):
            found.fill_(float("nan"))
            graph.replay()
            assert torch.equal(found, first)


@pytest.mark.parametrize("causal", [True, False], ids=["target", "drafter"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("head_dim", "shared"), [(64, 3), (128, 8)])
@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_projections_enter_the_pages_of_a_plan_as_torchs_do(
    batch: int, width: int, head_dim: int, shared: int, normed: bool, causal: bool
) -> None:
    """The queries are right, and keys and values are there for later steps."""
    from drafter.layers import Projection, RopeParameters, RotaryTable, Rotation
    from workers.attention.blocks import BlockPlan
    from workers.step_rows import StepRows

    kv_lens = [900, 33, 64 + width, 17][:batch]
    pages = Pages(kv_lens, head_dim, shared, "strided", unified=False)
    num_heads = pages.num_heads
    with torch.inference_mode():
        rows = StepRows(batch, pages.rows.shape[1], 0, torch.device("cuda"))
        starts = [kv_len - width for kv_len in kv_lens]
        rows.fill(batch, [0] * batch, starts, pages.rows.numpy()[:batch])
        shape = {"num_requests": batch, "width": width, "num_heads": num_heads, "causal": causal}
        plan = pages.flashinfer.fixed(rows.target(batch), **shape)
        fused = pages.random(batch * width, num_heads + 2 * KV_HEADS)
        norms = (pages.random(1, 1).flatten(), pages.random(1, 1).flatten()) if normed else None
        positions = torch.tensor([start + i for start in starts for i in range(width)], device="cuda")
        rotation = RotaryTable(RopeParameters(1e6), head_dim, torch.bfloat16, "cuda").at(positions)
        plan.prepare()
        queries = pages.flashinfer.enter(
            1, fused, Projection(num_heads, KV_HEADS, norms, 1e-6), rotation, plan
        )
        found = pages.flashinfer.attend(1, queries, plan).float()

        exact = pages.torch.plan(pages.rows[:batch], [width] * batch, kv_lens, causal)
        exact_norms = None if norms is None else (norms[0].float(), norms[1].float())
        exact_projection = Projection(num_heads, KV_HEADS, exact_norms, 1e-6)
        exact_rotation = Rotation(*(each.float() for each in rotation))
        exact_queries = pages.torch.enter(1, fused.float(), exact_projection, exact_rotation, exact)
        expected = pages.torch.attend(1, exact_queries, exact)
        torch.testing.assert_close(found, expected, rtol=2 * TOLERANCE, atol=2 * TOLERANCE)

        later = BlockPlan(
            rows.target(batch),
            pages.flashinfer._pool[:, 0],
            **shape,
            scratch=pages.workspace.partials.view(torch.float32),
        )
        later.prepare()
        found = torch.empty_like(queries, memory_format=torch.contiguous_format)
        later.attend(exact_queries.to(torch.bfloat16), pages.flashinfer._pool[:, 1], found)
        torch.testing.assert_close(found.float(), expected, rtol=2 * TOLERANCE, atol=2 * TOLERANCE)


def test_the_fused_steps_equal_torchs() -> None:
    from drafter.layers import TORCH_OPS
    from workers.fused import FusedOps

    generator = torch.Generator("cuda").manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)

    def close(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found.float(), expected.float(), rtol=0.02, atol=0.04)

    fused = FusedOps()
    for hidden in (576, 4096):
        x, residual, weight = random(33, hidden), random(33, hidden), random(hidden)
        close(fused.rms_norm(x, weight, 1e-6), TORCH_OPS.rms_norm(x, weight, 1e-6))
        apart = random(33, 4, hidden)[:, 1], random(33, 3, hidden)[:, 2]  # some rows of more
        close(fused.rms_norm(apart[0], weight, 1e-6), TORCH_OPS.rms_norm(apart[0], weight, 1e-6))
        for terms in ((x, residual), apart):
            sums = (ops.add_rms_norm(*terms, weight, 1e-6) for ops in (fused, TORCH_OPS))
            for ours, exact in zip(*sums, strict=True):
                close(ours, exact)
        gate_up = random(33, 3 * hidden)
        close(fused.swiglu(gate_up), TORCH_OPS.swiglu(gate_up))


@pytest.mark.parametrize("num_rows", [1, 15, 128, 1500])
@pytest.mark.parametrize("vocab", [7, 2048, 49152, 151936])
def test_the_likeliest_is_the_first_of_the_largest(num_rows: int, vocab: int) -> None:
    from workers.fused import likeliest

    generator = torch.Generator("cuda").manual_seed(4)
    wide = torch.randn((num_rows, vocab + 9), generator=generator, device="cuda").to(torch.bfloat16)
    logits = wide[:, :vocab]  # bfloat16 has many equals
    assert torch.equal(likeliest(logits), logits.argmax(dim=-1))
    logits[0] = -torch.inf
    assert int(likeliest(logits)[0]) == 0
    logits[0, vocab // 2] = torch.nan
    assert int(likeliest(logits)[0]) == vocab // 2


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("scale", [1.0, 1.25])
def test_rotations_are_torchs_far_into_a_context(head_dim: int, scale: float) -> None:
    from drafter.layers import RopeParameters, RotaryTable
    from workers.fused import FusedOps

    rope = (
        RopeParameters(1e6, "yarn", 4.0, 32768, attention_factor=scale)
        if scale != 1.0
        else RopeParameters(1e4)
    )
    table = RotaryTable(rope, head_dim, torch.bfloat16, "cuda")
    exact_table = RotaryTable(rope, head_dim, torch.float64, "cuda")
    positions = torch.cat((torch.arange(600), torch.randint(600, 131_072, (600,)))).cuda()
    for found, near, exact in zip(
        FusedOps().rotation(table, positions), table.at(positions), exact_table.at(positions), strict=True
    ):
        assert found.shape == near.shape
        # No further from the exact value than torch's own float32 angles are, but for rounding.
        assert (found.double() - exact).abs().max() <= (near.double() - exact).abs().max() + 2**-8


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_a_projection_enters_as_torchs_heads_do(head_dim: int, normed: bool) -> None:
    from drafter.layers import Projection, RopeParameters, RotaryTable, split_heads
    from workers.fused import enter_heads, store_kv

    generator = torch.Generator("cuda").manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)

    num_tokens, page_size = 33, 16
    norms = (random(head_dim), random(head_dim)) if normed else None
    projection = Projection(9, 3, norms, 1e-6)
    rotation = RotaryTable(RopeParameters(1e6), head_dim, torch.bfloat16, "cuda").at(
        torch.arange(7, 7 + num_tokens, device="cuda")
    )
    fused = random(num_tokens, 15 + 2, head_dim)[:, :15]  # tokens apart
    layers = torch.zeros((2, 4, 2, 2, 3, page_size, head_dim), device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(4 * page_size, generator=generator, device="cuda")[:num_tokens]
    ours, exact = (pool[:, 1] for pool in layers)
    offsets = slots // page_size * ours.stride(0) + slots % page_size * head_dim
    q = enter_heads(fused, projection, rotation, ours, offsets)
    heads = split_heads(fused, projection, rotation)
    store_kv(heads.k_THD, heads.v_THD, exact, offsets)
    torch.testing.assert_close(q.float(), heads.q_THD.float(), rtol=0.02, atol=0.04)
    torch.testing.assert_close(layers[0].float(), layers[1].float(), rtol=0.02, atol=0.04)
    assert torch.equal(ours[:, 1], exact[:, 1])  # values as they came
    assert layers[0].count_nonzero() >= 0.99 * 2 * num_tokens * 3 * head_dim
    assert not layers[0][:, 0].any()  # another layer's
