from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from drafter.linear import Linear, rows_compiled_for

ROWS = [0, 1, 2, 7, 64]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_product_with_the_weight_plus_bias(rows: int, dtype: torch.dtype, bias: bool) -> None:
    weight = torch.randn(37, 1100, dtype=dtype)
    added = torch.randn(37, dtype=dtype) if bias else None
    x = torch.randn(rows, 1100, dtype=dtype)
    expected = F.linear(x, weight, added)
    tolerance = {torch.float32: 1e-3, torch.float64: 1e-12, torch.bfloat16: 1.0}[dtype]
    found = Linear(weight, added)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def test_products_of_many_numbers_of_rows_are_compiled_for_few_and_say_the_same_bit_for_bit() -> None:
    numbers = {rows_compiled_for(rows) for rows in range(1, 257)}
    assert len(numbers) == 64
    assert all(rows <= rows_compiled_for(rows) <= 1.13 * rows for rows in range(1, 257))
    x, linear = torch.randn(300, 64), Linear(torch.randn(48, 64))
    whole = linear(x)
    for rows in (33, 37, 65, 90, 131, 255, 257):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows


def test_a_view_with_gaps_between_its_rows_is_multiplied_as_it_reads() -> None:
    weight, wide = torch.randn(5, 8), torch.randn(6, 20)
    torch.testing.assert_close(Linear(weight)(wide[:, 4:12]), wide[:, 4:12] @ weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_weight_reads_back_unchanged(dtype: torch.dtype) -> None:
    weight = torch.randn(33, 70, dtype=dtype)
    linear = Linear(weight)
    assert torch.equal(linear.dense_weight(), weight)
    assert (linear.out_features, linear.in_features) == (33, 70)


def test_gradients_reach_the_input() -> None:
    weight = torch.randn(5, 8)
    x = torch.randn(3, 8, requires_grad=True)
    Linear(weight)(x).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1))
