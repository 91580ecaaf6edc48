"""Token choice against the distribution it promises, with chi-squared tests over fixed seeds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from drafter.choice import (
    ChoiceRule,
    choose,
    choose_rows,
    filtered,
    gumbel,
    noise_key,
    noise_keys,
    rule_rows,
)

DRAWS = 20_000
# Noise of token ids 0, 1, 49151 at (seed, position) = (0, 0), (7, 1), (2**63, 4096), (-1, 5).
PINNED = torch.tensor(
    [
        [-0.047876573033716285, 0.15464947139703147, 2.3114779867001367],
        [0.10954282748162089, -0.40397306515868825, 2.9810145642293424],
        [-0.7178781432064161, -0.11225890241081116, -0.24567187922703287],
        [2.7938554936612583, -1.3217072300996724, 1.907825829776007],
    ],
    dtype=torch.float64,
)


def chi_squared_p(counts: Tensor, expected: Tensor) -> float:
    """P-value of Pearson's test, cells expected under 5 pooled; an outcome of zero probability fails outright."""
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    thin = expected < 5
    observed = torch.cat((counts[~thin], counts[thin].sum()[None])).double()
    wanted = torch.cat((expected[~thin], expected[thin].sum()[None])).double()
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    half_freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_freedom, statistic / 2))


def plain_distribution(logits_V: Tensor, rule: ChoiceRule) -> Tensor:
    """What the rule promises, computed the obvious way in float64: temperature, then top-k, then top-p."""
    probs = (logits_V.double() / rule.temperature).softmax(-1)
    order = probs.argsort(descending=True)
    if rule.top_k:
        probs[order[rule.top_k :]] = 0
        probs /= probs.sum()
    reached = 0.0
    for token in order.tolist():
        if reached >= rule.top_p:
            probs[token] = 0
        reached += float(probs[token])
    return probs / probs.sum()


def random_logits(rows: int, vocab: int, seed: int, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


RULES = [
    ChoiceRule(temperature=1.0),
    ChoiceRule(temperature=0.6),
    ChoiceRule(temperature=1.7),
    ChoiceRule(temperature=1.0, top_k=4),
    ChoiceRule(temperature=1.0, top_p=0.8),
    ChoiceRule(temperature=0.9, top_k=12, top_p=0.7),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_choices_follow_the_distribution_over_seeds_and_over_positions(rule: ChoiceRule) -> None:
    logits = random_logits(1, 40, seed=1)
    wanted = plain_distribution(logits[0], rule) * DRAWS
    rows = logits.expand(DRAWS, -1)
    seeded = [ChoiceRule(rule.temperature, rule.top_k, rule.top_p, seed) for seed in range(DRAWS)]
    over_seeds = choose(rows, seeded, [17] * DRAWS)
    over_positions = choose(rows, [rule] * DRAWS, range(DRAWS))
    for drawn in (over_seeds, over_positions):
        assert chi_squared_p(drawn.bincount(minlength=40), wanted) > 0.01


def test_neighbouring_positions_and_seeds_draw_independently() -> None:
    logits = random_logits(1, 6, seed=2).expand(DRAWS, -1)
    probs = logits[0].double().softmax(-1)
    joint = (probs[:, None] * probs[None, :]).flatten() * DRAWS
    rules = [ChoiceRule(temperature=1.0, seed=seed) for seed in range(DRAWS)]
    here, there = choose(logits, rules, [5] * DRAWS), choose(logits, rules, [6] * DRAWS)
    assert chi_squared_p((here * 6 + there).bincount(minlength=36), joint) > 0.01
    assert chi_squared_p((here[::2] * 6 + here[1::2]).bincount(minlength=36), joint / 2) > 0.01


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    vocab = 40_000
    logits = torch.zeros(1, vocab)
    logits[0, 0] = math.log(vocab - 1)  # half the mass; the rest is spread over 39,999 tokens
    drawn = choose(
        logits.expand(400, -1), [ChoiceRule(temperature=1.0, seed=s) for s in range(400)], [3] * 400
    )
    assert 160 < int((drawn == 0).sum()) < 240
    assert len(drawn.unique()) > 150


def test_noise_is_pinned_so_that_a_replay_on_another_release_repeats_its_tokens() -> None:
    pairs = ((0, 0), (7, 1), (2**63, 4096), (-1, 5))
    token_ids = torch.tensor([0, 1, 49151])
    keys = torch.tensor([noise_key(*pair) for pair in pairs], dtype=torch.int32)
    noise = gumbel(keys, token_ids[None], torch.float64)
    torch.testing.assert_close(noise, PINNED, rtol=1e-12, atol=0)
    single = gumbel(keys, token_ids[None], torch.float32)
    torch.testing.assert_close(single.double(), noise, rtol=1e-5, atol=1e-6)


def test_noise_of_a_token_is_the_same_to_the_bit_among_any_other_tokens() -> None:
    key = torch.tensor([[5, -9]], dtype=torch.int32)
    whole = gumbel(key, torch.arange(2000)[None], torch.float32)[0]
    for count in (1, 3, 8, 17, 64, 513):
        some = torch.randperm(2000, generator=torch.Generator().manual_seed(count))[:count]
        assert torch.equal(gumbel(key, some[None], torch.float32)[0], whole[some])


def test_filtering_keeps_what_the_plain_definition_keeps() -> None:
    logits = random_logits(8, 3000, seed=3, spread=0.7)  # flat: top-p has to look past its first candidates
    for rule in (
        ChoiceRule(1.0, 0, 0.9),
        ChoiceRule(0.3, 0, 0.5),
        ChoiceRule(1.0, 50),
        ChoiceRule(1.0, 50, 0.5),
    ):
        scores, token_ids = filtered(logits, rule.temperature, rule.top_k, rule.top_p)
        for row in range(8):
            kept = set(token_ids[row][scores[row] > -torch.inf].tolist())
            assert kept == set(plain_distribution(logits[row], rule).nonzero()[:, 0].tolist())


def test_candidates_tied_with_the_last_one_kept_all_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    scores, token_ids = filtered(logits, 1.0, 2, 1.0)
    assert set(token_ids[0].tolist()) == {0, 1, 2, 3}
    assert bool((scores > -torch.inf).all())


def test_a_nucleus_smaller_than_the_best_token_is_that_token() -> None:
    scores, token_ids = filtered(torch.tensor([[0.0, 5.0, 1.0]]), 1.0, 0, 0.01)
    assert token_ids.tolist() == [[1]]
    assert scores.shape == (1, 1)


def test_a_row_is_chosen_the_same_in_every_company() -> None:
    logits = random_logits(6, 1000, seed=4)
    rules = [
        ChoiceRule(),
        ChoiceRule(1.0, seed=5),
        ChoiceRule(0.8, 20, 0.9, 6),
        ChoiceRule(1.0, seed=9),
        ChoiceRule(1.3, 0, 0.95, 7),
        ChoiceRule(),
    ]
    positions = [4, 8, 15, 16, 23, 42]
    together = choose(logits, rules, positions).tolist()
    alone = [int(choose(logits[n : n + 1], [rules[n]], [positions[n]])) for n in range(6)]
    backwards = choose(logits.flip(0), rules[::-1], positions[::-1]).tolist()[::-1]
    assert together == alone == backwards
    assert together[0] == int(logits[0].argmax())


def test_the_filter_changes_no_choice_it_does_not_forbid() -> None:
    """Noise belongs to the token id, not to its place among the candidates."""
    logits = random_logits(500, 200, seed=5)
    free = choose(logits, [ChoiceRule(1.0, seed=1)] * 500, range(500))
    cut = choose(logits, [ChoiceRule(1.0, top_k=150, seed=1)] * 500, range(500))
    kept = logits.gather(1, free[:, None])[:, 0] >= logits.topk(150).values[:, -1]
    assert int(kept.sum()) > 400
    assert torch.equal(free[kept], cut[kept])


def test_lengths_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits, 1 rules"):
        choose(torch.zeros(2, 3), [ChoiceRule()], [0, 1])


RULES = [
    ChoiceRule(),
    ChoiceRule(temperature=1.0, seed=5),
    ChoiceRule(temperature=0.7, top_k=40, seed=6),
    ChoiceRule(temperature=0.7, top_p=0.9, seed=7),
    ChoiceRule(temperature=0.5, top_k=50, top_p=0.8, seed=2**63 + 9),
    ChoiceRule(temperature=2.0, top_p=0.999, seed=3),
]


@pytest.mark.parametrize("vocab", [264, 5000])
@pytest.mark.parametrize("rules", [RULES, RULES[:1], RULES[:2], RULES[2:4]], ids=len)
def test_rows_chosen_without_asking_the_device_are_chosen_alike(vocab: int, rules: list[ChoiceRule]) -> None:
    rules = rules * 4
    logits = torch.randn(len(rules), vocab, generator=torch.Generator().manual_seed(1)) * 4
    positions = list(range(100, 100 + len(rules)))
    rows = rule_rows(rules, positions, torch.device("cpu"))
    found, left_open = choose_rows(logits, rows)
    final = torch.ones(len(rules), dtype=torch.bool) if left_open is None else left_open
    expected = choose(logits, rules, positions)
    assert torch.equal(found[final], expected[final])
    wide = torch.tensor([rule.top_p == 0.999 and vocab > 512 for rule in rules])
    assert torch.equal(final, ~wide), "only a filter that keeps more than is looked at is left open"


def test_keys_of_many_rows_are_the_keys_of_each() -> None:
    seeds, positions = [0, 1, 2**63 + 9, 7], [0, 5, 2**31, 99]
    keys = noise_keys(seeds, positions).tolist()
    assert [tuple(key) for key in keys] == [noise_key(*pair) for pair in zip(seeds, positions, strict=True)]
