"""What DFlash 2 adds to DFlash: convolutions along the block, and a selector that walks through candidates.

Both make a block's slots depend on the ones before; the context path is DFlash's. (PyPI `dflash` 0.1.0,
`GroupedDynamicCausalConv` and `CandidateSelector`.)

Convolutions stand around each attention and each MLP. With x the input of the sub-layer f, of slot t, and zeros in
front of the block:

    conv(k, x)_t = Σ_j (base_j + k_tj) ⊙ x_{t-j}        k_tj holds one value for each group of channels
    f'(x) = conv(k_out, f(conv(k_in, x)))               k_in, k_out = projection · x

The selector takes, of every slot, the candidates with the highest logits and goes from left to right; with x the token
drafted before slot k (the anchor at first), h_k the slot's final hidden state and U_k its logits:

    score_k(c) = U_k(c) + ⟨P[x] ⊙ W·h_k, S[c]⟩

A token is chosen from the scores as the target's is from its logits, tokens that are no candidate having no
probability. The reference samples candidates with the temperature alone; nothing but acceptance depends on that.

Shapes: B requests, S block_size, T = B·S rows, H draft hidden size, J slots that a convolution looks at, G groups,
E = H / G channels of each; K drafts, C candidates, R rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.config import DFlash2Shape, DrafterConfig
from drafter.linear import Linear
from drafter.proposal import DraftBlock, DraftChoice, Proposal


@dataclass(frozen=True, slots=True)
class DynamicConvolution:
    """The two convolutions of one sub-layer: in front of it and behind it."""

    base_2JGE: Tensor
    projection: Linear  # H to 2·J·G

    def around(self, sublayer: Callable[[Tensor], Tensor], x_TH: Tensor, num_requests: int) -> Tensor:
        """The sub-layer between its convolutions, [T, H]. `x_TH`: the first rows of each block, as many of all."""
        _, reach, groups, _ = self.base_2JGE.shape
        dynamic = self.projection(x_TH).view(num_requests, -1, 2, reach, groups, 1)
        before_BSJH, after_BSJH = (dynamic + self.base_2JGE).flatten(-2).unbind(2)
        x_TH = _convolved(x_TH, before_BSJH)
        return _convolved(sublayer(x_TH), after_BSJH)


def _convolved(x_TH: Tensor, kernels_BSJH: Tensor) -> Tensor:
    x_BSH = x_TH.view(kernels_BSJH.shape[0], kernels_BSJH.shape[1], -1)
    out_BSH = kernels_BSJH[:, :, 0] * x_BSH
    for back in range(1, kernels_BSJH.shape[2]):
        out_BSH[:, back:] += kernels_BSJH[:, back:, back] * x_BSH[:, :-back]
    return out_BSH.view(x_TH.shape)


@dataclass(frozen=True, slots=True)
class CandidateSelector:
    """Chooses a block's tokens from left to right among the best candidates of each slot."""

    predecessors_VR: Tensor
    successors_VR: Tensor
    projection: Linear  # H to R
    num_candidates: int

    @property
    def has_confidences(self) -> bool:
        return False

    def choose(self, block: DraftBlock, anchor_ids_B: Tensor, choice: DraftChoice) -> Proposal:
        """Tokens of all slots of the block."""
        unary_BKC, candidates_BKC = block.logits_BKV.topk(self.num_candidates, dim=-1)
        num_requests, num_draft = block.hidden_BKH.shape[:2]
        gates_BKR = self.projection(block.hidden_BKH.flatten(0, 1)).view(num_requests, num_draft, -1)
        nothing_BV = torch.full_like(block.logits_BKV[:, 0], -torch.inf)
        previous_B, tokens = anchor_ids_B, []
        for draft in range(num_draft):
            candidates_BC = candidates_BKC[:, draft]
            query_BR = F.embedding(previous_B, self.predecessors_VR) * gates_BKR[:, draft]
            # A sum over products, not a matrix product: its order does not depend on the number of requests.
            edges_BC = (query_BR[:, None] * F.embedding(candidates_BC, self.successors_VR)).sum(dim=-1)
            scores_BV = nothing_BV.scatter(-1, candidates_BC, unary_BKC[:, draft] + edges_BC)
            previous_B = choice.one(scores_BV, draft)
            tokens.append(previous_B)
        return Proposal(torch.stack(tokens, dim=1))


_CONVOLVED = ("attention_conv", "mlp_conv")
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
# The published files name the codebooks without the suffix that the reference's modules give them.
RENAMED_TENSORS = {f"{name}.weight": name for name in _CODEBOOKS}


def added_shapes(config: DrafterConfig, shape: DFlash2Shape) -> dict[str, tuple[int, ...]]:
    """Tensors that a DFlash 2 checkpoint has beside DFlash's, and their shapes."""
    hidden, reach = config.hidden_size, shape.kernel_size
    kernels = 2 * reach * (hidden // shape.group_size)
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(_CODEBOOKS, (config.vocab_size, shape.rank)),
        "candidate_selector.hidden_projection.weight": (shape.rank, hidden),
    }
    for layer in range(config.num_layers):
        for name in _CONVOLVED:
            shapes[f"layers.{layer}.{name}.base_kernel"] = (2, reach, hidden)
            shapes[f"layers.{layer}.{name}.kernel_projection.weight"] = (kernels, hidden)
    return shapes


def convolutions(
    shape: DFlash2Shape, tensors: Mapping[str, Tensor], layer: int
) -> tuple[DynamicConvolution, DynamicConvolution]:
    """Those of a layer's attention and of its MLP."""

    def convolution(name: str) -> DynamicConvolution:
        at = f"layers.{layer}.{name}."
        base_2JH = tensors[at + "base_kernel"]
        return DynamicConvolution(
            base_2JH.view(2, shape.kernel_size, -1, shape.group_size),
            Linear(tensors[at + "kernel_projection.weight"]),
        )

    attention, mlp = map(convolution, _CONVOLVED)
    return attention, mlp


def selector(shape: DFlash2Shape, tensors: Mapping[str, Tensor]) -> CandidateSelector:
    """The head of a loaded checkpoint."""
    predecessors, successors = (tensors[name] for name in _CODEBOOKS)
    projection = Linear(tensors["candidate_selector.hidden_projection.weight"])
    return CandidateSelector(predecessors, successors, projection, shape.top_k)
