"""How a token is chosen from logits, for target and draft alike: filter, add keyed noise, argmax.

Adding independent Gumbel noise to log-probabilities and taking the argmax draws from the distribution (the
Gumbel-max trick). The noise of a token is a pure function of (seed, position, token id), where position is
the one that the chosen token will occupy: whoever chooses for that position, the target's decode step, its
verification of a block, another worker after a replay, or the draft model, sees the same noise. So the
target's choice never depends on how it was reached, and a draft whose distribution is close to the target's
mostly makes the same choice.

Noise is a counter-based hash in 32-bit integer arithmetic, which is exact on every device and needs no more
than the tokens in question: a request with top-k hashes k tokens, not the vocabulary.

Shapes: N rows, V vocabulary, C candidates.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_LOOKS = (512, 8192)  # how many best candidates a filter looks at before it sorts the whole vocabulary
_ELEMENTS_AT_ONCE = 1 << 16  # noise computed at a time: its temporaries fit a core's cache
_MASK_64 = (1 << 64) - 1


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
        else:
            keys = [noise_key(rules[row].seed, positions[row]) for row in rows]
            keys_N2 = torch.tensor(keys, dtype=torch.int32, device=logits_NV.device)
            chosen_N[rows] = _noisy_argmax(*filtered(picked, temperature, top_k, top_p), keys_N2)
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
    top_k = top_k if 0 < top_k < vocab else 0
    if not top_k and top_p >= 1.0:
        return scores, _all_token_ids(vocab, scores.device)
    for look in (*_LOOKS, vocab):
        width = min(max(look, top_k + 1), vocab)
        best, token_ids = torch.topk(scores, width, dim=-1)
        keep = _kept(scores, best, top_k, top_p)
        if width == vocab or not bool(
            keep[:, -1].any()
        ):  # otherwise more may have to stay than were looked at
            break
    count = int(keep.sum(dim=-1).max())
    return best.masked_fill(~keep, -torch.inf)[:, :count], token_ids[:, :count]


def _kept(scores_NV: Tensor, best_NC: Tensor, top_k: int, top_p: float) -> Tensor:
    """Which of the best candidates, in descending order, pass both filters. The first always does."""
    floor_N1 = best_NC[:, top_k - 1 : top_k] if top_k else best_NC[:, -1:]
    if top_p < 1.0:
        inside = best_NC.double().masked_fill(best_NC < floor_N1, -torch.inf)
        total_N1 = (inside if top_k else scores_NV).logsumexp(dim=-1, keepdim=True)
        probs = (inside - total_N1).exp()
        before = probs.cumsum(dim=-1) - probs
        nucleus = ((before < top_p) & (inside > -torch.inf)).sum(dim=-1, keepdim=True).clamp(min=1)
        floor_N1 = best_NC.gather(-1, nucleus - 1)
    return best_NC >= floor_N1


def _noisy_argmax(scores_NC: Tensor, token_ids: Tensor, keys_N2: Tensor) -> Tensor:
    """Token ids [N] with the highest score + noise; a few rows at a time, so that temporaries stay in the cache."""
    num_rows, num_candidates = scores_NC.shape
    stride = max(_ELEMENTS_AT_ONCE // num_candidates, 1)
    chosen = []
    for start in range(0, num_rows, stride):
        rows = slice(start, start + stride)
        ids = token_ids[rows] if token_ids.shape[0] > 1 else token_ids
        noisy = gumbel(keys_N2[rows], ids, scores_NC.dtype).add_(scores_NC[rows])
        best_N1 = noisy.argmax(dim=-1, keepdim=True)
        chosen.append(ids.expand(noisy.shape[0], -1).gather(-1, best_N1)[:, 0])
    return torch.cat(chosen)


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """The two 32-bit halves of a splitmix64 hash of (seed, position), as signed integers."""
    mixed = _splitmix(_splitmix(seed & _MASK_64) + position)
    return _signed_32(mixed & 0xFFFFFFFF), _signed_32(mixed >> 32)


def gumbel(keys_N2: Tensor, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise [N, C], in float32 or float64, of the tokens [N, C] or [1, C] under each row's key.

    Two invertible 32-bit mixers (constants: C. Wellons, "Prospecting for Hash Functions"), one half of the key
    before each, so that no two keys give shifted copies of one stream. 31 bits make the uniform variate; what
    decides an argmax is the small end of the exponential, where -log1p(-u) keeps full relative precision.
    """
    bits = token_ids.to(torch.int32) * _signed_32(0x9E3779B9) + keys_N2[:, :1]
    scratch = torch.empty_like(bits)
    _xor_shift_(bits, scratch, 16).mul_(0x7FEB352D)
    _xor_shift_(bits, scratch, 15).mul_(_signed_32(0x846CA68B))
    _xor_shift_(bits, scratch, 16).bitwise_xor_(keys_N2[:, 1:])
    _xor_shift_(bits, scratch, 15).mul_(_signed_32(0xD168AAAD))
    _xor_shift_(bits, scratch, 15).mul_(_signed_32(0xAF723597))
    _xor_shift_(bits, scratch, 15)
    minus_u = bits.bitwise_and_(0x7FFFFFFF).to(dtype).add_(0.5).mul_(-(2.0**-31))
    return minus_u.log1p_().neg_().log_().neg_()


def _xor_shift_(bits: Tensor, scratch: Tensor, count: int) -> Tensor:
    """bits ^= bits >> count, in place and logical: torch's own shift repeats the sign."""
    torch.bitwise_right_shift(bits, count, out=scratch)
    return bits.bitwise_xor_(scratch.bitwise_and_((1 << (32 - count)) - 1))


@functools.cache
def _all_token_ids(vocab: int, device: torch.device) -> Tensor:
    return torch.arange(vocab, device=device)[None]


def _splitmix(value: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def _signed_32(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value
