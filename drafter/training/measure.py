"""Acceptance length of a drafter, measured without the serving engine.

With greedy decoding the text does not depend on the drafter, so it is generated once by the target; then the
drafter proposes at every position of every answer, and the decode loop is replayed over those proposals. A fault of
the context path is modelled by what the drafter may look at.

Acceptance length here as everywhere: tokens emitted by decode steps over target decode steps, summed over requests;
the first token comes from prefill and counts in neither.

Legend: B sequences, S positions, A anchors, K block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.training.corpus import Batch, Corpus
from drafter.training.llama import Llama
from drafter.training.network import DraftNetwork

_EARLY_STEPS = 8
_ANCHORS_AT_ONCE = 64


class Context(Enum):
    """What the drafter sees of the prompt."""

    WHOLE = "normal"
    NO_PROMPT = "no prompt context"
    ANOTHER_REQUEST = "another request's context"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over requests."""

    tokens: int = 0
    steps: int = 0
    early_tokens: int = 0
    early_steps: int = 0

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.early_tokens + other.early_tokens,
            self.early_steps + other.early_steps,
        )

    @property
    def length(self) -> float:
        """Tokens a step over whole answers."""
        return self.tokens / max(1, self.steps)

    @property
    def early_length(self) -> float:
        """Tokens a step over each request's first 8 steps, where a missing context shows most."""
        return self.early_tokens / max(1, self.early_steps)


def replay(answer: Sequence[int], proposals: Sequence[Sequence[int]]) -> Acceptance:
    """The decode loop over one answer; proposals[i] is the block drafted when answer[i] is the anchor."""
    at, steps, early_tokens = 0, 0, 0
    while at < len(answer) - 1:
        accepted = 0
        for drafted, wanted in zip(proposals[at], answer[at + 1 :], strict=False):
            if drafted != wanted:
                break
            accepted += 1
        emitted = min(accepted + 1, len(answer) - 1 - at)
        at += emitted
        steps += 1
        if steps <= _EARLY_STEPS:
            early_tokens += emitted
    return Acceptance(len(answer) - 1 if answer else 0, steps, early_tokens, min(steps, _EARLY_STEPS))


@torch.no_grad()
def measure(
    network: DraftNetwork, target: Llama, corpus: Corpus, context: Context, *, rows: int = 16
) -> list[Acceptance]:
    """Acceptance of each greedy answer of the target, in order, `rows` of them at a time."""
    found: list[Acceptance] = []
    order = np.arange(len(corpus))
    for begin in range(0, len(corpus), rows):
        batch = corpus.batch(order[begin : begin + rows], pad_to=8)
        device = target.embedding_VH.device
        batch = Batch(
            *(part.to(device) for part in (batch.tokens_BS, batch.prompt_lengths_B, batch.lengths_B))
        )
        drafted = _proposals(network, target, batch, context).cpu().tolist()
        tokens = batch.tokens_BS.cpu().tolist()
        spans = zip(batch.prompt_lengths_B.tolist(), batch.lengths_B.tolist(), strict=True)
        for row, (prompt_length, length) in enumerate(spans):
            found.append(replay(tokens[row][prompt_length:length], drafted[row]))
    return found


def _proposals(network: DraftNetwork, target: Llama, batch: Batch, context: Context) -> Tensor:
    """Greedy drafts at every anchor: [B, A, drafts], anchor i being the answer's i-th token."""
    tokens, prompt_lengths = batch.tokens_BS, batch.prompt_lengths_B
    taps = target.taps(tokens, network.config.tap_layer_ids)
    if context is Context.ANOTHER_REQUEST:
        taps = _swap_prompts(taps, prompt_lengths)
    hidden_before = prompt_lengths if context is Context.NO_PROMPT else torch.zeros_like(prompt_lengths)
    longest = int((batch.lengths_B - prompt_lengths).max())
    embedding = target.embedding_VH
    drafts = []
    for begin in range(0, longest, _ANCHORS_AT_ONCE):
        offsets = torch.arange(begin, min(begin + _ANCHORS_AT_ONCE, longest), device=tokens.device)
        anchors = (prompt_lengths[:, None] + offsets).clamp(max=tokens.shape[1] - 1)
        anchor_ids = tokens.gather(1, anchors)
        hidden = network(taps, anchors, anchor_ids, hidden_before, embedding)
        drafts.append(network.draft(hidden, anchor_ids, embedding))
    return torch.cat(drafts, dim=1)


@torch.no_grad()
def confidence_records(
    network: DraftNetwork, target: Llama, corpus: Corpus, *, rows: int = 16, anchors_each: int = 32
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """What the confidence head said of greedy drafts, logits [N, K], and how many of each block were right, [N].

    Blocks stand at up to `anchors_each` places of every answer that is long enough for all their drafts.
    """
    logits, accepted = [], []
    for begin in range(0, len(corpus), rows):
        batch = corpus.batch(np.arange(begin, min(begin + rows, len(corpus))), pad_to=8)
        device = target.embedding_VH.device
        tokens, prompt_lengths, lengths = (
            part.to(device) for part in (batch.tokens_BS, batch.prompt_lengths_B, batch.lengths_B)
        )
        taps = target.taps(tokens, network.config.tap_layer_ids)
        num_draft = network.config.max_draft_tokens
        room = lengths - num_draft - prompt_lengths  # anchors that have so many tokens behind them
        steps = torch.arange(anchors_each, device=device) / anchors_each
        anchors = prompt_lengths[:, None] + (steps * room.clamp(min=0)[:, None]).long()
        anchor_ids = tokens.gather(1, anchors.clamp(max=tokens.shape[1] - 1))
        hidden = network(taps, anchors, anchor_ids, torch.zeros_like(lengths), target.embedding_VH)
        drafts = network.draft(hidden, anchor_ids, target.embedding_VH)
        said = network.confidence_logits(hidden, anchor_ids, drafts)
        if said is None:
            raise ValueError("this drafter has no confidence head")
        places = anchors[..., None] + 1 + torch.arange(num_draft, device=device)
        truth = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1).flatten(1)).view(places.shape)
        right = (drafts == truth).long().cumprod(dim=-1).sum(dim=-1)
        long_enough = (room > 0)[:, None].expand_as(right)
        logits.append(said[long_enough].double().cpu().numpy())
        accepted.append(right[long_enough].cpu().numpy())
    return np.concatenate(logits), np.concatenate(accepted)


def _swap_prompts(taps_BSX: Tensor, prompt_lengths_B: Tensor) -> Tensor:
    """Each prompt's features replaced by the next request's, as if all requests shared one slot."""
    positions = torch.arange(taps_BSX.shape[1], device=taps_BSX.device)
    in_prompt = positions < prompt_lengths_B[:, None]
    return torch.where(in_prompt[..., None], taps_BSX.roll(-1, dims=0), taps_BSX)


def table(rows: Sequence[tuple[str, int, dict[Context, Acceptance]]]) -> str:
    """A Markdown table: all steps / first 8 steps."""
    lines = ["| prompts | n | " + " | ".join(f"{c.value}: all / first 8" for c in Context) + " |"]
    lines.append("|---|---|" + "---|" * len(Context))
    for name, count, by_context in rows:
        cells = [f"{by_context[c].length:.2f} / {by_context[c].early_length:.2f}" for c in Context]
        lines.append(f"| {name} | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
