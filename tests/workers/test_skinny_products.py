"""Products that a device computes in its own way: models leave all that steps take to it, and say the same."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.linear import Linear
from tests.workers.split_pair import run_aggregated
from workers.assembly import Models
from workers.request import SamplingParams

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


class Plain:
    """Torch's products, counted."""

    def __init__(self, linear: Linear, most_rows: int, calls: Counter[str]) -> None:
        self._weight, self._most_rows, self._calls = linear.dense_weight(), most_rows, calls

    def takes(self, x_TI: Tensor, gated: bool = False) -> bool:
        return x_TI.shape[0] <= self._most_rows

    def product(self, x_TI: Tensor, out_TO: Tensor | None = None) -> Tensor:
        self._calls["product"] += 1
        found = F.linear(x_TI, self._weight)
        return found if out_TO is None else out_TO.copy_(found)

    def gated(self, x_TI: Tensor) -> Tensor:
        self._calls["gated"] += 1
        gate, up = F.linear(x_TI, self._weight).chunk(2, dim=-1)
        return F.silu(gate) * up


@pytest.mark.parametrize("most_rows", [1 << 20, 8])
def test_every_product_of_a_step_is_left_to_the_device(
    models: Models, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    assert models.drafter is not None
    golden = run_aggregated(models, prompts[:3], GREEDY)
    target, draft = list(models.decoder.linears), list(models.drafter.linears)
    assert len(target) == 4 * models.decoder.config.num_layers + 1
    assert len(draft) == 4 * models.drafter.num_layers + 1 + 2
    calls = {id(linear): Counter[str]() for linear in (*target, *draft)}
    for linear in (*target, *draft):
        assert not linear.has_bias
        monkeypatch.setattr(linear, "skinny", Plain(linear, most_rows, calls[id(linear)]))
    found = run_aggregated(models, prompts[:3], GREEDY)
    assert [one.tokens for one in found] == [one.tokens for one in golden]
    assert [one.stats for one in found] == [one.stats for one in golden]
    gates = [*(target[place] for place in range(2, len(target) - 1, 4)), *draft[2:-3:4]]
    for linear in (*target, *draft):
        asked = calls[id(linear)]
        assert asked["gated" if linear in gates else "product"] > 0
        assert asked["product" if linear in gates else "gated"] == 0


def test_a_layer_says_what_its_device_does_for_rows_that_it_takes() -> None:
    linear, calls = Linear(torch.randn(12, 8)), Counter[str]()
    linear.skinny = Plain(linear, 4, calls)
    few, many = torch.randn(4, 8), torch.randn(5, 8)
    weight = linear.dense_weight()

    def swiglu(gate_up: Tensor) -> Tensor:
        calls["swiglu"] += 1
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    for x in (few, many):
        gate, up = (x @ weight.t()).chunk(2, dim=-1)
        torch.testing.assert_close(linear(x), x @ weight.t())
        torch.testing.assert_close(linear(x, torch.empty(len(x), 12)), x @ weight.t())
        torch.testing.assert_close(linear.gated(x, swiglu), F.silu(gate) * up)
    assert calls == {"product": 2, "gated": 1, "swiglu": 1}
