from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from drafter.checkpoint import TargetFacts, load_drafter
from drafter.head import ExactHead, ScreenedHead, make_head


def near_ties(rows: int, vocab: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and head weights where bfloat16 alone often picks another best token."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(vocab, hidden, generator=generator)
    best = torch.randperm(vocab // 2, generator=generator)[:rows] * 2 + 1
    weight[best - 1] = weight[best] * 0.9995  # the runner-up's logit is barely lower
    return weight[best] + 0.1 * torch.randn(rows, hidden, generator=generator), weight


def test_a_screened_head_picks_the_exact_heads_token_where_bfloat16_alone_does_not() -> None:
    hidden, weight = near_ties(rows=200, vocab=2000, hidden=64)
    exact = ExactHead(weight).logits(hidden)
    coarse = (hidden.bfloat16() @ weight.bfloat16().T).float()
    assert int((coarse.argmax(-1) != exact.argmax(-1)).sum()) > 10
    screened = ScreenedHead(weight).logits(hidden)
    assert torch.equal(screened.argmax(-1), exact.argmax(-1))
    best = exact.topk(4).indices
    torch.testing.assert_close(screened.gather(1, best), exact.gather(1, best))
    torch.testing.assert_close(screened, exact, rtol=0.02, atol=0.5)


def test_weights_of_two_bytes_are_never_screened() -> None:
    assert isinstance(make_head("screened", torch.zeros(4, 2, dtype=torch.bfloat16)), ExactHead)
    assert isinstance(make_head("screened", torch.zeros(4, 2)), ScreenedHead)
    assert isinstance(make_head("exact", torch.zeros(4, 2)), ExactHead)


def test_a_drafter_is_exact_unless_told_otherwise(saved: Path, facts: Callable[..., TargetFacts]) -> None:
    assert isinstance(load_drafter(saved, facts())._head, ExactHead)
    assert isinstance(load_drafter(saved, facts(), head="screened")._head, ScreenedHead)
