"""How a token is chosen from logits, for target and draft alike: filter, add keyed noise, argmax.

Adding independent Gumbel noise to log-probabilities and taking the argmax draws from the distribution (the
Gumbel-max trick). The noise of a token is a pure function of (seed, position, token id), where position is
the one that the chosen token will occupy: whoever chooses for that position, the target's decode step, its
verification of a block, another worker after a replay, or the draft model, sees the same noise. So the
target's choice never depends on how it was reached, and a draft whose distribution is close to the target's
mostly makes the same choice.

Noise is a counter-based hash (the finaliser of splitmix64) in integer arithmetic, exact on every device,
turned into an exponential variate in float64.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# Candidates looked at before top-p falls back to sorting the whole vocabulary.
_TOP_P_FIRST_LOOK = 512


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """Sampling settings of one request. Temperature 0 is greedy; top_k 0 and top_p 1 filter nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def choose(logits_NV: Tensor, rules: Sequence[ChoiceRule], positions: Sequence[int]) -> Tensor:
    """Token ids, int64 [N]: row n is chosen under rules[n] for the token at positions[n].

    A row's choice depends on nothing but its own logits, rule and position.
    """
    if len(rules) != logits_NV.shape[0] or len(positions) != logits_NV.shape[0]:
        raise ValueError(
            f"{logits_NV.shape[0]} rows of logits, {len(rules)} rules, {len(positions)} positions"
        )
    if all(rule.greedy for rule in rules):
        return logits_NV.argmax(dim=-1)
    chosen_N = torch.empty(len(rules), dtype=torch.int64, device=logits_NV.device)
    groups: dict[tuple[float, int, float], list[int]] = {}
    for row, rule in enumerate(rules):
        groups.setdefault((rule.temperature, rule.top_k, rule.top_p), []).append(row)
    for (temperature, top_k, top_p), rows in groups.items():
        picked = logits_NV[rows] if len(groups) > 1 else logits_NV
        if temperature == 0.0:
            chosen_N[rows] = picked.argmax(dim=-1)
            continue
        scores, token_ids = filtered(picked, temperature, top_k, top_p)
        keys = torch.tensor(
            [noise_key(rules[row].seed, positions[row]) for row in rows],
            dtype=torch.int64,
            device=logits_NV.device,
        )
        best = (scores + gumbel(keys[:, None], token_ids).to(scores.dtype)).argmax(dim=-1, keepdim=True)
        chosen_N[rows] = token_ids.expand(len(rows), -1).gather(-1, best)[:, 0]
    return chosen_N


def filtered(logits_NV: Tensor, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Candidates of each row: scores [N, C] = logits / temperature (-inf: filtered out), and their token ids.

    Token ids are [N, C], or [1, V] when the whole vocabulary stays. Top-k first, then top-p over what it
    left, as Hugging Face and vLLM do. Ties with the last candidate kept stay in, so that no sorting order can
    matter.
    """
    scores = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    scores = scores / temperature
    vocab = scores.shape[-1]
    limit = top_k if 0 < top_k < vocab else vocab
    if limit == vocab and top_p >= 1.0:
        return scores, _all_token_ids(vocab, scores.device)
    if limit == vocab:
        return _top_p_of_all(scores, top_p)
    sorted_scores = torch.topk(scores, limit, dim=-1).values
    floor = sorted_scores[:, -1:]
    if top_p < 1.0:
        floor = torch.maximum(
            floor, _nucleus_floor(sorted_scores, sorted_scores.logsumexp(-1, keepdim=True), top_p)[0]
        )
    return _at_least(scores, floor)


def _top_p_of_all(scores: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Top-p over the whole vocabulary. The nucleus is mostly small: look at the best before sorting all."""
    total = scores.logsumexp(-1, keepdim=True)
    vocab = scores.shape[-1]
    sorted_scores = torch.topk(scores, min(_TOP_P_FIRST_LOOK, vocab), dim=-1).values
    floor, complete = _nucleus_floor(sorted_scores, total, top_p)
    if not bool(complete.all()) and sorted_scores.shape[-1] < vocab:
        full_floor, _ = _nucleus_floor(scores.sort(dim=-1, descending=True).values, total, top_p)
        floor = torch.where(complete, floor, full_floor)
    return _at_least(scores, floor)


def _nucleus_floor(sorted_scores: Tensor, total: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Lowest score [N, 1] of each row's nucleus, and whether the candidates at hand reach top_p at all.

    The nucleus is the smallest set of best candidates whose probability reaches top_p; it is never empty.
    """
    probs = (sorted_scores - total).double().exp()
    cumulative = probs.cumsum(dim=-1)
    kept = (cumulative - probs < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    return sorted_scores.gather(-1, kept - 1), cumulative[:, -1:] >= top_p


def _at_least(scores: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates at or above `floor` [N, 1], cut to the widest row's count; the rest of a row is -inf."""
    keep = scores >= floor
    width = int(keep.sum(dim=-1).max())
    best, token_ids = torch.topk(scores, width, dim=-1)
    return best.masked_fill(best < floor, -torch.inf), token_ids


def noise_key(seed: int, position: int) -> int:
    """The hash stream of (seed, position), as a signed 64-bit integer."""
    return _signed(_mix(_mix(seed) + position * _GOLDEN))


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise in float64 for int64 `keys` and `token_ids`, broadcast against each other."""
    bits = keys + (token_ids + 1) * _signed(_GOLDEN)  # int64 arithmetic wraps, as the hash wants
    bits = (bits ^ _shift(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shift(bits, 27)) * _signed(_MIX_2)
    bits = bits ^ _shift(bits, 31)
    # 53 bits, centred so that neither 0 nor 1 occurs. What decides an argmax is the small end of the
    # exponential, and -log1p(-u) keeps full relative precision there.
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


@functools.cache
def _all_token_ids(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, device=device)[None]


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK_64
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK_64
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK_64
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value
