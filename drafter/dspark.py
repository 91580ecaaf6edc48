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

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.config import DrafterConfig
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

    @property
    def has_confidences(self) -> bool:
        return self.confidence is not None

    def choose(self, block: DraftBlock, anchor_ids_B: Tensor, choice: DraftChoice) -> Proposal:
        """Tokens and, with a confidence head, confidences of all slots of the block."""
        tokens_BK = self._tokens(block, anchor_ids_B, choice)
        if self.confidence is None:
            return Proposal(tokens_BK)
        previous_BK = torch.cat((anchor_ids_B[:, None], tokens_BK[:, :-1]), dim=1)
        return Proposal(tokens_BK, partial(self.confidence, block.hidden_BKH, previous_BK))

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


def head_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of the heads that a config asks for, and their shapes."""
    hidden, markov = config.hidden_size, config.markov
    shapes: dict[str, tuple[int, ...]] = {}
    if markov is not None:
        rank = markov.rank
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
        if markov.kind == "gated":
            shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
            shapes["markov_head.gate_proj.bias"] = (rank,)
        elif markov.kind == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
            shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.confidence is not None:
        inputs = hidden + (markov.rank if markov is not None and config.confidence.with_markov else 0)
        shapes["confidence_head.proj.weight"] = (1, inputs)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def sequential_head(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> DSparkHead | None:
    """The head of a loaded checkpoint; None when its config asks for no part of it."""
    markov = _markov(config, tensors) if config.markov is not None else None
    confidence = None
    if config.confidence is not None:
        weight_F = tensors["confidence_head.proj.weight"][0]
        temperatures = config.confidence.temperatures
        confidence = ConfidenceHead(
            weight_F=weight_F,
            bias=tensors["confidence_head.proj.bias"][0],
            w1_VR=markov.w1_VR if markov is not None and config.confidence.with_markov else None,
            temperatures_K=weight_F.new_tensor(temperatures) if temperatures else None,
        )
    if markov is None and confidence is None:
        return None
    return DSparkHead(markov, confidence)


def _markov(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> Markov:
    def linear(name: str) -> Linear:
        return Linear(tensors[f"markov_head.{name}.weight"], tensors[f"markov_head.{name}.bias"])

    w1_VR = tensors["markov_head.markov_w1.weight"]
    w2 = Linear(tensors["markov_head.markov_w2.weight"])
    assert config.markov is not None
    match config.markov.kind:
        case "vanilla":
            return VanillaMarkov(w1_VR, w2)
        case "gated":
            return GatedMarkov(w1_VR, w2, linear("gate_proj"))
        case "rnn":
            return RnnMarkov(w1_VR, w2, linear("joint_proj"))
