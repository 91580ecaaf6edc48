"""Penalties: what a request has said, or was told, it is less likely to say again.

    repetition r   a positive logit is divided by r, another multiplied, for every token of prompt and output
    frequency f    logit - f · c, with c how often the output has the token
    presence p     logit - p, for every token that the output has

one after the other, as vLLM does it (the first is transformers' `RepetitionPenaltyLogitsProcessor`, the others are
OpenAI's). A row behind some drafts of a block counts those as output too: it matters only if all of them are accepted,
and then they are. So a token is chosen in a block from the very logits that it would be chosen from alone.

Only logits of tokens that a row has before it are looked at. Nothing here waits for the device.

Shapes: N rows of logits, V vocabulary, B requests, K drafts of each, P requests that penalise, H tokens that those have
before the block, E (row, token) to change for them, D (row, draft before it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafter.counts import Ints, TokenCounts
from drafter.device import upload


@dataclass(frozen=True, slots=True)
class Penalties:
    """One request's. `counts` holds the prompt's tokens only where repetition is penalised."""

    frequency: float
    presence: float
    repetition: float
    counts: TokenCounts


@dataclass(frozen=True, slots=True)
class BlockRows:
    """What rows of logits stand behind: row n behind the first ahead[n] drafts of request requests[n]."""

    requests: Sequence[int]
    ahead: Sequence[int]
    drafts_BK: Tensor | None = None

    @classmethod
    def behind(cls, drafts_BK: Tensor, counts: Sequence[int]) -> BlockRows:
        """Request b has counts[b] + 1 rows: behind none of its drafts, behind one, ..., behind counts[b]."""
        requests = [request for request, count in enumerate(counts) for _ in range(count + 1)]
        return cls(requests, [ahead for count in counts for ahead in range(count + 1)], drafts_BK)

    @classmethod
    def each(cls, num_requests: int, drafted: Sequence[Tensor] = ()) -> BlockRows:
        """Every request has one row, behind all that was drafted for it: a tensor [B] for each draft."""
        drafts_BK = torch.stack(list(drafted), dim=1) if drafted else None
        return cls(range(num_requests), [len(drafted)] * num_requests, drafts_BK)


def penalise(wide_NV: Tensor, penalties: Mapping[int, Penalties], rows: BlockRows) -> None:
    """Change the logits [N, V] of the requests that `penalties` names, in place."""
    slot_of = {request: slot for slot, request in enumerate(penalties)}
    picked = [n for n, request in enumerate(rows.requests) if request in slot_of]
    if not picked:
        return
    device = wide_NV.device
    rows_R = np.array(picked)
    slots_R = np.array([slot_of[rows.requests[n]] for n in picked])
    strengths = [(each.repetition, each.frequency, each.presence) for each in penalties.values()]
    strengths_P3 = upload(torch.tensor(strengths, dtype=wide_NV.dtype), device)
    before = _Before([each.counts for each in penalties.values()], wide_NV)
    slots_E, rows_E, tokens_E, counts_E = before.of_rows(slots_R, rows_R)
    values_E = _penalised(wide_NV[rows_E, tokens_E], counts_E, strengths_P3[slots_E])
    if rows.drafts_BK is None or not any(rows.ahead[n] for n in picked):
        wide_NV[rows_E, tokens_E] = values_E
        return
    entries = [
        (slot, n, rows.requests[n], draft, rows.ahead[n])
        for slot, n in zip(slots_R.tolist(), picked, strict=True)
        for draft in range(rows.ahead[n])
    ]
    slots_D, rows_D, requests_D, drafts_D, ahead_D = upload(torch.tensor(entries), device).unbind(1)
    blocks_DK = rows.drafts_BK[requests_D]
    tokens_D = blocks_DK.gather(1, drafts_D[:, None])[:, 0]
    is_ahead_DK = torch.arange(blocks_DK.shape[1], device=device) < ahead_D[:, None]
    in_block_D = ((blocks_DK == tokens_D[:, None]) & is_ahead_DK).sum(dim=1)
    counts_D = before.said(slots_D, tokens_D) + in_block_D
    values_D = _penalised(wide_NV[rows_D, tokens_D], counts_D, strengths_P3[slots_D])
    wide_NV[rows_E, tokens_E] = values_E
    wide_NV[rows_D, tokens_D] = (
        values_D  # a token comes twice with the same value, and over what stood before
    )


def _penalised(logits_E: Tensor, counts_E: Tensor, strengths_E3: Tensor) -> Tensor:
    repetition_E, frequency_E, presence_E = strengths_E3.unbind(1)
    logits_E = torch.where(logits_E > 0, logits_E / repetition_E, logits_E * repetition_E)
    return logits_E - frequency_E * counts_E - presence_E * (counts_E > 0)


class _Before:
    """What P requests have before the block, on the device of `like`."""

    def __init__(self, counts: Sequence[TokenCounts], like: Tensor) -> None:
        self._device = like.device
        arrays = [each.arrays() for each in counts]
        self._sizes_P = np.array([len(token_ids) for token_ids, _ in arrays])
        self._starts_P = np.cumsum(self._sizes_P) - self._sizes_P
        both_2H = torch.from_numpy(np.concatenate([np.stack(both) for both in arrays], axis=1))
        self._tokens_H, self._counts_H = upload(both_2H, self._device)
        self._num_requests, self._vocab_size = len(arrays), like.shape[1]

    def of_rows(self, slots_R: Ints, rows_R: Ints) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slot, row, token and count of everything before each of the rows."""
        sizes_R = self._sizes_P[slots_R]
        shifts_R = self._starts_P[slots_R] - (np.cumsum(sizes_R) - sizes_R)
        columns = upload(torch.from_numpy(np.stack([slots_R, rows_R, shifts_R, sizes_R])), self._device)
        total = int(sizes_R.sum())
        slots_E, rows_E, shifts_E = columns[:3].repeat_interleave(columns[3], dim=1, output_size=total)
        at_E = torch.arange(total, device=self._device) + shifts_E
        return slots_E, rows_E, self._tokens_H[at_E], self._counts_H[at_E]

    def said(self, slots_D: Tensor, tokens_D: Tensor) -> Tensor:
        """How often the output in front of the block has these tokens."""
        said_PV = self._counts_H.new_zeros((self._num_requests, self._vocab_size), dtype=torch.int32)
        sizes_P = upload(torch.from_numpy(self._sizes_P), self._device)
        slots_P = torch.arange(self._num_requests, device=self._device)
        slots_H = slots_P.repeat_interleave(sizes_P, output_size=len(self._tokens_H))
        said_PV[slots_H, self._tokens_H] = self._counts_H.int()
        found_D: Tensor = said_PV[slots_D, tokens_D].long()
        return found_D
