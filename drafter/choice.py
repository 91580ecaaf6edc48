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

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from drafter.device import upload

_LOOKS = (512, 8192)  # how many best candidates a filter looks at before it sorts the whole vocabulary
_ELEMENTS_AT_ONCE = 1 << 16  # noise computed at a time: its temporaries fit a core's cache
_ELEMENTS_AT_ONCE_ELSEWHERE = 1 << 25  # on devices, where fewer and larger kernels are better
_NEIGHBOURS = 64  # tokens whose largest logit is found together
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
        return likeliest(logits_NV)
    chosen_N = torch.empty(len(rules), dtype=torch.int64, device=logits_NV.device)
    groups: dict[tuple[float, int, float], list[int]] = {}
    for row, rule in enumerate(rules):
        groups.setdefault((rule.temperature, rule.top_k, rule.top_p), []).append(row)
    for (temperature, top_k, top_p), rows in groups.items():
        picked = logits_NV[rows] if len(groups) > 1 else logits_NV
        if temperature == 0.0:
            chosen_N[rows] = likeliest(picked)
        else:
            keys = [noise_key(rules[row].seed, positions[row]) for row in rows]
            keys_N2 = torch.tensor(keys, dtype=torch.int32, device=logits_NV.device)
            chosen_N[rows] = _noisy_argmax(*filtered(picked, temperature, top_k, top_p), keys_N2)
    return chosen_N


def likeliest(logits_NV: Tensor) -> Tensor:
    """argmax over the last dimension, the first of equals."""
    num_rows, vocab = logits_NV.shape
    if logits_NV.device.type != "cpu" or vocab % _NEIGHBOURS:
        return logits_NV.argmax(dim=-1)
    # On a CPU torch's argmax takes ten times as long as its maximum, so look for the place in two short rows.
    blocks = logits_NV.reshape(num_rows, -1, _NEIGHBOURS)
    block_N = blocks.amax(dim=-1).argmax(dim=-1)
    within_N = blocks[torch.arange(num_rows), block_N].argmax(dim=-1)
    return block_N * _NEIGHBOURS + within_N


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
    on_cpu = scores_NC.device.type == "cpu"
    stride = max((_ELEMENTS_AT_ONCE if on_cpu else _ELEMENTS_AT_ONCE_ELSEWHERE) // num_candidates, 1)
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


@dataclass(frozen=True, slots=True)
class RuleRows:
    """Rules and noise keys of N rows as tensors on a device, for choosing without a word to the host.

    `any_noise`: some row is neither greedy nor filtered. `any_filter`: some row has top-k or top-p.
    """

    temperature_N: Tensor  # float32
    top_k_N: Tensor  # int64, 0 or at least the vocabulary: no filter
    top_p_N: Tensor  # float64
    keys_N2: Tensor  # int32
    any_noise: bool
    any_filter: bool

    def rows(self, index: Tensor) -> RuleRows:
        """The rows that `index`, int64 on the same device, names."""
        return RuleRows(
            self.temperature_N[index],
            self.top_k_N[index],
            self.top_p_N[index],
            self.keys_N2[index],
            self.any_noise,
            self.any_filter,
        )


def rule_rows(rules: Sequence[ChoiceRule], positions: Sequence[int], device: torch.device) -> RuleRows | None:
    """Rules and keys of `choose` on `device`; None when every row is greedy."""
    if all(rule.greedy for rule in rules):
        return None
    keys = noise_keys([rule.seed for rule in rules], positions)
    columns = [
        torch.tensor([rule.temperature for rule in rules], dtype=torch.float32),
        torch.tensor([rule.top_k for rule in rules], dtype=torch.int64),
        torch.tensor([rule.top_p for rule in rules], dtype=torch.float64),
        torch.from_numpy(keys),
    ]
    temperature_N, top_k_N, top_p_N, keys_N2 = (upload(column, device) for column in columns)
    filters = [not rule.greedy and (rule.top_k > 0 or rule.top_p < 1.0) for rule in rules]
    any_noise = any(not rule.greedy and not kept for rule, kept in zip(rules, filters, strict=True))
    return RuleRows(temperature_N, top_k_N, top_p_N, keys_N2, any_noise, any(filters))


def choose_rows(logits_NV: Tensor, rows: RuleRows | None) -> tuple[Tensor, Tensor | None]:
    """As `choose`, without a host synchronisation: token ids int64 [N], and which are final, bool [N] (None: all).

    A filter looks at a fixed number of best candidates here. A row that would have to keep more is not final: its
    token was chosen from those alone, which does for a draft; for the target's choice, call `choose`.
    """
    greedy_N = logits_NV.argmax(dim=-1)
    if rows is None:
        return greedy_N, None
    is_greedy_N = rows.temperature_N == 0
    scores = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    scores = scores / rows.temperature_N.masked_fill(is_greedy_N, 1.0)[:, None].to(scores.dtype)
    chosen_N, final_N = greedy_N, None
    if rows.any_noise:
        chosen_N = _noisy_argmax(scores, _all_token_ids(scores.shape[-1], scores.device), rows.keys_N2)
    if rows.any_filter:
        is_filtered_N = (rows.top_k_N > 0) & (rows.top_k_N < scores.shape[-1]) | (rows.top_p_N < 1.0)
        picked_N, complete_N = _filtered_choice(scores, rows)
        chosen_N = torch.where(is_filtered_N, picked_N, chosen_N)
        final_N = complete_N | ~is_filtered_N | is_greedy_N
    return torch.where(is_greedy_N, greedy_N, chosen_N), final_N


def _filtered_choice(scores_NV: Tensor, rows: RuleRows) -> tuple[Tensor, Tensor]:
    """Each row's choice among its best candidates that pass its filters, and whether those are all that pass."""
    vocab = scores_NV.shape[-1]
    best_NC, ids_NC = torch.topk(scores_NV, min(_LOOKS[0], vocab), dim=-1)
    look = best_NC.shape[-1]
    top_k_N = torch.where((rows.top_k_N > 0) & (rows.top_k_N < vocab), rows.top_k_N, vocab)
    last_N1 = best_NC.gather(-1, (top_k_N.clamp(max=look) - 1)[:, None])
    cut_N1 = (top_k_N < vocab)[:, None]
    floor_N1 = torch.where(cut_N1, last_N1, best_NC[:, -1:])
    inside_NC = best_NC.double().masked_fill(best_NC < floor_N1, -torch.inf)
    total_N1 = torch.where(
        cut_N1,
        inside_NC.logsumexp(dim=-1, keepdim=True),
        scores_NV.logsumexp(dim=-1, keepdim=True).double(),
    )
    probs_NC = (inside_NC - total_N1).exp()
    before_NC = probs_NC.cumsum(dim=-1) - probs_NC
    top_p_N1 = rows.top_p_N[:, None]
    nucleus_NC = ((before_NC < top_p_N1) | (top_p_N1 >= 1.0)) & (inside_NC > -torch.inf)
    nucleus_N1 = nucleus_NC.sum(dim=-1, keepdim=True).clamp(min=1)
    keep_NC = best_NC >= best_NC.gather(-1, nucleus_N1 - 1)
    chosen_N = _noisy_argmax(best_NC.masked_fill(~keep_NC, -torch.inf), ids_NC, rows.keys_N2)
    return chosen_N, ~keep_NC[:, -1] if look < vocab else torch.ones_like(chosen_N, dtype=torch.bool)


def noise_keys(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int32]:
    """`noise_key` of every row, [N, 2]."""
    with np.errstate(over="ignore"):
        seeds_N = np.array([seed & _MASK_64 for seed in seeds], dtype=np.uint64)
        mixed_N = _splitmix_all(_splitmix_all(seeds_N) + np.asarray(positions, dtype=np.uint64))
    return mixed_N.astype("<u8").view("<i4").reshape(-1, 2).astype(np.int32)


def _splitmix_all(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _signed_32(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value
