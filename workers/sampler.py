"""The target's choice of tokens, and their log-probabilities.

How a token is chosen lives in `drafter.choice`, because the draft model must choose by the same rule and
noise; this module ties it to requests: `SamplingParams` in, token ids and `TokenLogprob` out.
Log-probabilities come from the target's unfiltered distribution at temperature 1, whatever the sampling
settings.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter.adjustment import AdjustedChoice, Adjustment, adjusted
from drafter.choice import ChoiceRule, choose
from drafter.proposal import DraftChoice, KeyedChoice
from workers.request import SamplingParams, TokenLogprob


class Sampler:
    """Chooses tokens for target and draft logits alike. Stateless: the same inputs give the same tokens."""

    def rule(self, params: SamplingParams) -> ChoiceRule:
        """A request's sampling settings as `drafter.choice` takes them."""
        return ChoiceRule(params.temperature, params.top_k, params.top_p, params.seed)

    def choose(
        self, logits_NV: Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int]
    ) -> Tensor:
        """Token ids, int64 [N]. positions[n] is the position that row n's token will occupy."""
        adjusted_NV = self.adjusted(logits_NV, sampling)
        return choose(adjusted_NV, [self.rule(params) for params in sampling], positions)

    def adjusted(self, logits_NV: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
        """Logits with each row's biases and min-p applied; the very tensor given when nobody asks for either."""
        if not _asks(sampling):
            return logits_NV
        return adjusted(logits_NV, [_adjustment(params) for params in sampling])

    def adjusting(self, choice: DraftChoice, sampling: Sequence[SamplingParams]) -> DraftChoice:
        """`choice` from logits adjusted as the target's are; `sampling` of its requests."""
        return (
            AdjustedChoice(choice, [_adjustment(params) for params in sampling])
            if _asks(sampling)
            else choice
        )

    def draft_choice(self, sampling: Sequence[SamplingParams], first_positions: Sequence[int]) -> DraftChoice:
        """What the drafter asks for its tokens; first_positions[b] is where request b's first draft goes."""
        choice = KeyedChoice([self.rule(params) for params in sampling], first_positions)
        return self.adjusting(choice, sampling)

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor, num_top: Sequence[int]) -> list[TokenLogprob]:
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


def _asks(sampling: Sequence[SamplingParams]) -> bool:
    return any(params.min_p > 0 or params.logit_bias for params in sampling)


def _adjustment(params: SamplingParams) -> Adjustment:
    return Adjustment(params.logit_bias, params.min_p, params.temperature)
