"""DSpark's heads in the form that is trained; what they compute is written down in `drafter.dspark`.

Parameters carry the checkpoints' tensor names. A Markov head gives latents, not biases: the product with W2, a row for
every token of the vocabulary, is left to the loss, which never holds it for all slots at once.

Legend: ... any leading dimensions, K slots of a block, H hidden size, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.config import ConfidenceShape, DrafterConfig, MarkovShape

_INIT_STD = 0.02


class MarkovHead(nn.Module):
    """Vanilla, gated or rnn; bias of a slot = markov_w2 · latent."""

    def __init__(self, shape: MarkovShape, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.shape = shape
        rank = shape.rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=_INIT_STD * 5)
        if shape.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif shape.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def start(self, hidden: Tensor) -> Tensor:
        """State in front of the first slot, for hidden states [..., H]."""
        return hidden.new_zeros((*hidden.shape[:-1], self.shape.rank))

    def step(self, state: Tensor, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Latent [..., R] of one slot whose hidden state is [..., H], and the state behind it."""
        embedded = self.markov_w1(previous).to(hidden.dtype)
        match self.shape.kind:
            case "vanilla":
                return embedded, state
            case "gated":
                gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), dim=-1)))
                return gate.to(hidden.dtype) * embedded, state
            case "rnn":
                joint = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1)).to(hidden.dtype)
                gate, candidate, output = joint.chunk(3, dim=-1)
                keep = torch.sigmoid(gate)
                return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)

    def latents(self, previous_K: Tensor, hidden_KH: Tensor) -> Tensor:
        """Latents [..., K, R] of whole blocks whose true tokens are known: previous_K stands before each slot."""
        if self.shape.kind != "rnn":
            return self.step(self.start(hidden_KH), previous_K, hidden_KH)[0]
        state, latents = self.start(hidden_KH[..., 0, :]), []
        for slot in range(previous_K.shape[-1]):
            latent, state = self.step(state, previous_K[..., slot], hidden_KH[..., slot, :])
            latents.append(latent)
        return torch.stack(latents, dim=-2)


class ConfidenceHead(nn.Module):
    """A logit for each slot: how likely its draft is accepted."""

    def __init__(self, shape: ConfidenceShape, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.shape = shape
        self.proj = nn.Linear(hidden_size + (rank if shape.with_markov else 0), 1)

    def forward(self, hidden_KH: Tensor, embedded_KR: Tensor | None) -> Tensor:
        """Logits [..., K]. `embedded_KR`: rows of W1 of the tokens before, unread by a head without them."""
        features = hidden_KH
        if self.shape.with_markov:
            assert embedded_KR is not None
            features = torch.cat((hidden_KH, embedded_KR.to(hidden_KH.dtype)), dim=-1)
        logits: Tensor = self.proj(features)[..., 0]
        return logits


def build_heads(config: DrafterConfig) -> tuple[MarkovHead | None, ConfidenceHead | None]:
    """The heads that a drafter's config asks for. The trained form knows the whole vocabulary only."""
    rank = config.markov.rank if config.markov is not None else 0
    markov = MarkovHead(config.markov, config.hidden_size, config.vocab_size) if config.markov else None
    confidence = ConfidenceHead(config.confidence, config.hidden_size, rank) if config.confidence else None
    return markov, confidence
