"""The target's choice of tokens, and their log-probabilities.

How a token is chosen lives in `drafter.choice`, because the draft model must choose by the same rule and noise; this
module ties it to requests: `SamplingParams` in, token ids and `TokenLogprob` out. Log-probabilities come from the
target's unfiltered distribution at temperature 1, whatever the sampling settings, and are computed for the rows that
ask only.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter.choice import ChoiceRule, choose
from workers.request import SamplingParams, TokenLogprob


def choice_rule(sampling: SamplingParams) -> ChoiceRule:
    """The part of a request's sampling settings that decides its tokens; make it once per request."""
    return ChoiceRule(
        temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=sampling.seed
    )


def sample(logits_NV: Tensor, rules: Sequence[ChoiceRule], positions: Sequence[int]) -> Tensor:
    """Token ids, int64 [N]. positions[n] is the position that row n's token will occupy (not its query's)."""
    return choose(logits_NV, rules, positions)


def token_logprobs(logits_NV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprob]:
    """The chosen tokens' log-probabilities, with the num_top[n] most likely tokens of row n, best first.

    Raises ValueError when the three lengths differ.
    """
    if not logits_NV.shape[0] == len(token_ids) == len(num_top):
        raise ValueError(
            f"{logits_NV.shape[0]} rows of logits, {len(token_ids)} tokens, {len(num_top)} counts"
        )
    if not token_ids:
        return []
    logprobs_NV = torch.log_softmax(
        logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float(), dim=-1
    )
    chosen = logprobs_NV.gather(-1, torch.tensor(token_ids, device=logits_NV.device)[:, None])[:, 0].tolist()
    widest = min(max(num_top), logits_NV.shape[-1])
    top = torch.topk(logprobs_NV, widest, dim=-1) if widest else None
    top_values = top.values.tolist() if top else [[]] * len(token_ids)
    top_ids = top.indices.tolist() if top else [[]] * len(token_ids)
    return [
        TokenLogprob(token_id, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for token_id, logprob, count, ids, values in zip(
            token_ids, chosen, num_top, top_ids, top_values, strict=True
        )
    ]
