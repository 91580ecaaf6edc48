from __future__ import annotations

import math

import pytest
import torch

from workers.request import SamplingParams
from workers.sampler import Sampler


def random_logits(rows: int, vocab: int = 100) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * 3


def test_temperature_zero_takes_the_best_token_whatever_else_is_asked() -> None:
    logits = random_logits(4)
    greedy = SamplingParams(max_tokens=1, top_k=1, top_p=0.1, seed=9)
    assert Sampler().choose(logits, [greedy] * 4, [0, 1, 2, 3]).tolist() == logits.argmax(-1).tolist()


def test_a_seed_repeats_its_tokens_and_another_seed_does_not() -> None:
    logits = random_logits(1).expand(200, -1)
    first, second = (SamplingParams(max_tokens=1, temperature=1.0, seed=seed) for seed in (1, 2))
    sampler, positions = Sampler(), list(range(200))
    tokens = sampler.choose(logits, [first] * 200, positions)
    assert torch.equal(tokens, sampler.choose(logits, [first] * 200, positions))
    assert not torch.equal(tokens, sampler.choose(logits, [second] * 200, positions))


def test_top_k_and_top_p_bound_what_can_be_drawn() -> None:
    logits = random_logits(1).expand(500, -1)
    best = set(logits[0].topk(3).indices.tolist())
    narrow = SamplingParams(max_tokens=1, temperature=2.0, top_k=3)
    assert set(Sampler().choose(logits, [narrow] * 500, list(range(500))).tolist()) == best
    narrower = SamplingParams(max_tokens=1, temperature=2.0, top_p=1e-6)
    assert set(Sampler().choose(logits, [narrower] * 500, list(range(500))).tolist()) == {
        int(logits[0].argmax())
    }


def test_logprobs_are_of_the_unfiltered_distribution_with_as_many_alternatives_as_asked() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 5.0]])
    first, second = Sampler().logprobs(logits, torch.tensor([1, 2]), [0, 2])
    total = math.log(sum(math.exp(x) for x in (2.0, 1.0, 0.0)))
    assert first.token_id == 1
    assert first.logprob == pytest.approx(1.0 - total, abs=1e-6)
    assert first.top == ()
    assert second.top[0][0] == 2
    assert second.top[0][1] == second.logprob
    assert len(second.top) == 2


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    (only,) = Sampler().logprobs(torch.zeros(1, 3), torch.tensor([0]), [10])
    assert sorted(token for token, _ in only.top) == [0, 1, 2]


def test_no_rows_have_no_logprobs_and_lengths_must_agree() -> None:
    assert Sampler().logprobs(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), []) == []
    with pytest.raises(ValueError, match="1 rows of logits, 2 tokens, 1 counts"):
        Sampler().logprobs(torch.zeros(1, 3), torch.tensor([0, 1]), [0])
