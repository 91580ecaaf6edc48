"""Products of few rows on a Hopper GPU against torch's in float32, alone and one behind the other in a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("no Hopper GPU", allow_module_level=True)

from workers.skinny import SkinnyProducts, SkinnyWeight  # noqa: E402
from workers.tiling import MOST_ROWS  # noqa: E402

TOLERANCE = 0.005  # of the norm, in bfloat16
SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (4096, 12288),
    (1000 * 16, 512),
    (192, 64),
    (640, 576),
    (151936 // 8, 4096),  # no whole number of tiles
]


@pytest.fixture(scope="module")
def products() -> SkinnyProducts:
    return SkinnyProducts(torch.device("cuda"))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random(*size: int) -> Tensor:
    return torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(0, size[-1] ** -0.5)


def made(products: SkinnyProducts, weight: Tensor) -> SkinnyWeight:
    found = products.of(weight)
    assert found is not None
    return found


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.float() - wanted).norm() <= TOLERANCE * wanted.norm())


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 33, 64, 120, 128])
def test_a_product_is_torchs(products: SkinnyProducts, num_rows: int, outputs: int, inputs: int) -> None:
    weight, x = random(outputs, inputs), torch.randn(num_rows, inputs, device="cuda", dtype=torch.bfloat16)
    wanted = x.float() @ weight.float().t()
    skinny = made(products, weight)
    found = torch.full((num_rows, outputs), torch.nan, device="cuda", dtype=torch.bfloat16)
    assert skinny.product(x, found) is found
    assert close(found, wanted)
    gate, up = wanted.chunk(2, dim=-1)
    assert close(skinny.gated(x), F.silu(gate) * up)


def test_rows_any_stride_apart_are_multiplied(products: SkinnyProducts) -> None:
    weight, wide = random(256, 512), torch.randn(40, 1024, device="cuda", dtype=torch.bfloat16)
    skinny = made(products, weight)
    with products.used():
        assert skinny.takes(wide[:, 512:])
        assert skinny.takes(wide[::2, :512])
        assert not skinny.takes(wide[:, 1:513])  # the copy engine reads 16 bytes at least
        many = torch.cat([wide] * 4)[:, :512]
        assert not skinny.takes(many)
        assert skinny.takes(many[:MOST_ROWS])
    assert not skinny.takes(wide[:, :512])
    assert close(skinny.product(wide[::2, 512:]), wide[::2, 512:].float() @ weight.float().t())


def test_what_it_cannot_multiply_is_left_to_torch(products: SkinnyProducts) -> None:
    assert products.of(random(64, 96)) is None
    assert products.of(random(24, 64)) is None
    assert products.of(random(64, 128).half()) is None
    assert products.of(random(128, 64).t()) is None


@pytest.mark.parametrize("num_rows", [16, 64, 128])
def test_each_waits_for_the_one_before_it(products: SkinnyProducts, num_rows: int) -> None:
    """Each reads what the one before wrote, in a graph that is replayed without a pause, all ways of cutting in it."""
    hidden, inner = 2048, 4096
    down, gate_up, square = random(hidden, inner), random(2 * inner, hidden), random(hidden, hidden)
    ways = [made(products, weight) for weight in (gate_up, down, square)]
    cuts = {products.tiling(num_rows, *shape, False).parts for shape in ((hidden, inner), (hidden, hidden))}
    assert max(cuts) > 1
    x = torch.randn(num_rows, hidden, device="cuda", dtype=torch.bfloat16)

    def body() -> Tensor:
        y = x
        for _ in range(6):
            y = ways[2].product(ways[1].product(ways[0].gated(y)))
            y = y / y.float().std(dim=-1, keepdim=True).to(y.dtype)
        return y

    wanted = body().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = body()
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, wanted)
    x.normal_()
    graph.replay()
    assert torch.equal(found, body())
