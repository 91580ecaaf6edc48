"""Anchors, labels and weights of draft blocks: which positions a block may see and what it has to predict.

A block stands at an anchor a: slot 0 holds the anchor's token, slots 1 .. K-1 hold mask tokens. Slot j predicts the
token at a+j, and slot 0 nothing (DFlash); or slot j predicts the token at a+j+1 (DSpark). A block sees the target's
features of positions strictly before a (at serving time the anchor is the token just emitted, which the target has
not run yet) and all slots of its own block.

Legend: B sequences, A anchors of each, K block size, S positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SLOT_DECAY = (
    4.0  # the token at anchor + d weighs exp(-(d-1)/4): DFlash's figure for blocks of 8, and DSpark's
)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one batch."""

    anchors_BA: Tensor  # int64
    previous_BAK: Tensor  # int64, the true token before the one that a slot predicts
    labels_BAK: Tensor  # int64, what a slot predicts; slots that predict nothing hold 0 and weigh nothing
    weights_BAK: Tensor  # float32


def sample_anchors(
    prompt_lengths_B: Tensor, lengths_B: Tensor, count: int, generator: torch.Generator | None
) -> Tensor:
    """Random anchors [B, count] from the answers: prompt_length <= anchor <= length - 2.

    The first answer token is an anchor too: prefill emits it before the first block. Every answer must have 2 tokens or
    more (`Corpus.of` keeps no other); looking for a shorter one here would make the CPU wait for the GPU at every step.
    """
    choices = (lengths_B - 1 - prompt_lengths_B)[:, None]
    drawn = torch.rand((len(choices), count), generator=generator, device=choices.device)
    return prompt_lengths_B[:, None] + (drawn * choices).long().minimum(choices - 1)


def cut_blocks(
    tokens_BS: Tensor, lengths_B: Tensor, anchors_BA: Tensor, block_size: int, *, first_slot: int = 1
) -> Blocks:
    """Labels and weights of the blocks at the anchors; `first_slot` predicts the token behind the anchor."""
    slots = torch.arange(block_size, device=tokens_BS.device)
    distances = slots + 1 - first_slot
    positions = anchors_BA[..., None] + distances
    scored = (positions < lengths_B[:, None, None]) & (distances > 0)

    def tokens_at(wanted: Tensor) -> Tensor:
        safe = wanted.clamp(max=tokens_BS.shape[1] - 1)
        return tokens_BS.gather(1, safe.flatten(1)).view(wanted.shape)

    weights = torch.exp(-(distances - 1) / SLOT_DECAY) * scored
    return Blocks(anchors_BA, tokens_at((positions - 1).clamp(min=0)), tokens_at(positions) * scored, weights)


def context_mask(anchors_BA: Tensor, first_visible_B: Tensor, num_positions: int) -> Tensor:
    """True where a block may look at a context position: [B, A, S], first_visible <= position < anchor."""
    positions = torch.arange(num_positions, device=anchors_BA.device)
    return (positions < anchors_BA[..., None]) & (positions >= first_visible_B[:, None, None])
