"""The target's choice of tokens, and their log-probabilities.

How a token is chosen lives in `drafter.choice`, because the draft model must choose by the same rule and
noise; this module ties it to requests: `SamplingParams` in, token ids and `TokenLogprob` out.
Log-probabilities come from the target's own distribution at temperature 1, whatever the sampling settings: biases
and penalties are not in them.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from drafter.adjustment import AdjustedChoice, Adjustment, adjusted
from drafter.choice import ChoiceRule, choose
from drafter.penalties import BlockRows, Penalties
from drafter.proposal import DraftChoice, KeyedChoice
from workers.request import SamplingParams, TokenLogprob
from workers.sequence import Sequence


class Sampler:
    """Chooses tokens for target and draft logits alike. Stateless: the same inputs give the same tokens."""

    def rule(self, params: SamplingParams) -> ChoiceRule:
        """A request's sampling settings as `drafter.choice` takes them."""
        return ChoiceRule(params.temperature, params.top_k, params.top_p, params.seed)

    def choose(self, logits_NV: Tensor, sampling: Items[SamplingParams], positions: Items[int]) -> Tensor:
        """Token ids, int64 [N], from adjusted logits. positions[n] is the position that row n's token will occupy."""
        return choose(logits_NV, [self.rule(params) for params in sampling], positions)

    def adjusted(self, logits_NV: Tensor, sequences: Items[Sequence], rows: BlockRows) -> Tensor:
        """Logits as their requests want them adjusted; the very tensor given when nobody asks for anything."""
        if not any(_asks(sequence) for sequence in sequences):
            return logits_NV
        return adjusted(logits_NV, [_adjustment(sequence) for sequence in sequences], rows)

    def adjusting(self, choice: DraftChoice, sequences: Items[Sequence]) -> DraftChoice:
        """`choice` for one block, from logits adjusted as the target's are."""
        if not any(_asks(sequence) for sequence in sequences):
            return choice
        return AdjustedChoice(choice, [_adjustment(sequence) for sequence in sequences])

    def draft_choice(self, sequences: Items[Sequence], first_positions: Items[int]) -> DraftChoice:
        """What the drafter asks for its tokens; first_positions[b] is where request b's first draft goes."""
        choice = KeyedChoice([self.rule(sequence.sampling) for sequence in sequences], first_positions)
        return self.adjusting(choice, sequences)

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor, num_top: Items[int]) -> list[TokenLogprob]:
        """The chosen tokens' log-probabilities, each with the num_top[n] likeliest of its row, best first.

        Raises ValueError when the three lengths differ.
        """
        if not logits_NV.shape[0] == tokens_N.shape[0] == len(num_top):
            raise ValueError(
                f"{logits_NV.shape[0]} rows of logits, {tokens_N.shape[0]} tokens, {len(num_top)} counts"
            )
        if not num_top:
            return []
        wide = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
        logprobs_NV = torch.log_softmax(wide, dim=-1)
        chosen = logprobs_NV.gather(-1, tokens_N[:, None].to(logits_NV.device))[:, 0].tolist()
        top = torch.topk(logprobs_NV, min(max(num_top), logits_NV.shape[-1]), dim=-1)
        rows = zip(tokens_N.tolist(), chosen, num_top, top.indices.tolist(), top.values.tolist(), strict=True)
        return [
            TokenLogprob(token, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, count, ids, values in rows
        ]


def _asks(sequence: Sequence) -> bool:
    """Whether the request's logits are adjusted at the coming step."""
    params = sequence.sampling
    return bool(
        params.min_p > 0 or params.logit_bias or sequence.counts is not None or sequence.num_tokens_to_min
    )


def _adjustment(sequence: Sequence) -> Adjustment:
    params, penalties = sequence.sampling, None
    if sequence.counts is not None:
        penalties = Penalties(
            params.frequency_penalty, params.presence_penalty, params.repetition_penalty, sequence.counts
        )
    return Adjustment(
        bias=params.logit_bias,
        min_p=params.min_p,
        temperature=params.temperature,
        penalties=penalties,
        banned=sequence.stop_token_ids,
        num_banned=sequence.num_tokens_to_min,
    )
