"""DSpark's heads: a low-rank Markov bias that makes a block sequential, and a confidence for each draft.

The network in front of them is DFlash's with its slots shifted by one. Drafting goes from left to right, from the
anchor on; with x the token drafted before slot k (the anchor for slot 0), h_k the slot's final hidden state and U_k
the output head's logits (DeepSpec, `markov_head.py`; DSpark paper, arXiv 2607.05147):

    vanilla  logits_k = U_k + W2 · W1[x]
    gated    logits_k = U_k + W2 · (σ(G · [h_k; W1[x]] + g) ⊙ W1[x])
    rnn      [a; c; o] = J · [s; W1[x]; h_k] + j,  logits_k = U_k + W2 · tanh(o),  s ← σ(a) ⊙ s + (1 - σ(a)) ⊙ tanh(c)

    confidence_k = σ((w · [h_k; W1[x]] + b) / t_k), or of h_k alone; t_k is 1 unless the head was calibrated

No product mixes requests, so what a request drafts does not depend on its batch.

Shapes: B requests, K drafts of each, H draft hidden size, R rank, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.linear import Linear
from drafter.proposal import DraftBlock, DraftChoice, Proposal


@dataclass(frozen=True, slots=True)
class VanillaMarkov:
    """A bias that depends on the token before alone."""

    w1_VR: Tensor
    w2: Linear  # R to V

    def start(self, num_requests: int) -> Tensor:
        """State in front of the first draft."""
        return self.w1_VR.new_zeros((num_requests, self.w1_VR.shape[1]))

    def step(self, state_BR: Tensor, previous_B: Tensor, hidden_BH: Tensor) -> tuple[Tensor, Tensor]:
        """The bias of one slot, [B, V], and the state behind it."""
        return self.w2(F.embedding(previous_B, self.w1_VR)), state_BR


@dataclass(frozen=True, slots=True)
class GatedMarkov:
    """The token before counts as far as the slot's hidden state lets it."""

    w1_VR: Tensor
    w2: Linear
    gate: Linear  # H + R to R

    def start(self, num_requests: int) -> Tensor:
        return self.w1_VR.new_zeros((num_requests, self.w1_VR.shape[1]))

    def step(self, state_BR: Tensor, previous_B: Tensor, hidden_BH: Tensor) -> tuple[Tensor, Tensor]:
        embedded_BR = F.embedding(previous_B, self.w1_VR)
        gate_BR = torch.sigmoid(self.gate(torch.cat((hidden_BH, embedded_BR), dim=-1)))
        return self.w2(gate_BR * embedded_BR), state_BR


@dataclass(frozen=True, slots=True)
class RnnMarkov:
    """A state carries on what earlier slots drafted."""

    w1_VR: Tensor
    w2: Linear
    joint: Linear  # 2·R + H to 3·R

    def start(self, num_requests: int) -> Tensor:
        return self.w1_VR.new_zeros((num_requests, self.w1_VR.shape[1]))

    def step(self, state_BR: Tensor, previous_B: Tensor, hidden_BH: Tensor) -> tuple[Tensor, Tensor]:
        embedded_BR = F.embedding(previous_B, self.w1_VR)
        joint = self.joint(torch.cat((state_BR, embedded_BR, hidden_BH), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return self.w2(torch.tanh(output)), keep * state_BR + (1 - keep) * torch.tanh(candidate)


Markov = VanillaMarkov | GatedMarkov | RnnMarkov


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """How likely the target is to choose a draft too. `w1_VR` is None for a head over hidden states alone.

    `temperatures_K`: of all drafts that a block can make; None for an uncalibrated head.
    """

    weight_F: Tensor  # H, or H + R
    bias: Tensor  # scalar
    w1_VR: Tensor | None
    temperatures_K: Tensor | None = None

    def __call__(self, hidden_BKH: Tensor, previous_BK: Tensor) -> Tensor:
        """Probabilities, float32 or float64 [B, K]."""
        features = hidden_BKH
        if self.w1_VR is not None:
            features = torch.cat((hidden_BKH, F.embedding(previous_BK, self.w1_VR)), dim=-1)
        # A sum over products, not a matrix product: its order does not depend on the number of rows.
        scores_BK = (features * self.weight_F).sum(dim=-1) + self.bias
        if self.temperatures_K is not None:
            scores_BK = scores_BK / self.temperatures_K[: scores_BK.shape[1]]
        return torch.sigmoid(scores_BK if scores_BK.dtype == torch.float64 else scores_BK.float())


@dataclass(frozen=True, slots=True)
class DSparkHead:
    """Chooses a block's tokens from left to right and says how sure it is of each. Either part may be missing."""

    markov: Markov | None
    confidence: ConfidenceHead | None

    def choose(self, block: DraftBlock, anchor_ids_B: Tensor, choice: DraftChoice) -> Proposal:
        """Tokens and, with a confidence head, confidences of all slots of the block."""
        tokens_BK = self._tokens(block, anchor_ids_B, choice)
        if self.confidence is None:
            return Proposal(tokens_BK)
        previous_BK = torch.cat((anchor_ids_B[:, None], tokens_BK[:, :-1]), dim=1)
        return Proposal(tokens_BK, self.confidence(block.hidden_BKH, previous_BK))

    def _tokens(self, block: DraftBlock, anchor_ids_B: Tensor, choice: DraftChoice) -> Tensor:
        if self.markov is None:
            return choice.all(block.logits_BKV)
        previous_B, tokens = anchor_ids_B, []
        state_BR = self.markov.start(anchor_ids_B.shape[0])
        for draft in range(block.logits_BKV.shape[1]):
            bias_BV, state_BR = self.markov.step(state_BR, previous_B, block.hidden_BKH[:, draft])
            previous_B = choice.one(block.logits_BKV[:, draft] + bias_BV, draft)
            tokens.append(previous_B)
        return torch.stack(tokens, dim=1)
