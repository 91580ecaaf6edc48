"""DSpark's loss: cross-entropy, distance to the target's distribution, and how well confidences foretell it.

For slots with weights w (falling with the distance from the anchor), p the draft's and q the target's distribution:

    sum w · (ce · CE(p, label) + l1 · |p - q|₁ + confidence · BCE(c, 1 - |p - q|₁ / 2)) / sum w

|p - q|₁ is twice the chance that a draft is rejected. Where p and q hardly overlap, as at the start of a run, it has
hardly a gradient; so a run begins with cross-entropy alone and then moves to the published mixture (DeepSpec: 0.1,
0.9, 1.0).

Legend: M slots, H hidden size, R rank of the Markov head, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_ALONE_UNTIL, _PUBLISHED_FROM = 0.15, 0.4  # of a run's progress


@dataclass(frozen=True, slots=True)
class Mixture:
    """Weights of the loss's parts."""

    ce: float
    l1: float
    confidence: float


PUBLISHED = Mixture(ce=0.1, l1=0.9, confidence=1.0)


def mixture(progress: float) -> Mixture:
    """The weights when `progress` (0 .. 1) of a run is behind it."""
    share = (progress - _ALONE_UNTIL) / (_PUBLISHED_FROM - _ALONE_UNTIL)
    share = min(max(share, 0.0), 1.0)
    return Mixture(
        ce=1.0 + share * (PUBLISHED.ce - 1.0), l1=share * PUBLISHED.l1, confidence=PUBLISHED.confidence
    )


@dataclass(frozen=True, slots=True)
class Slots:
    """What is scored: final hidden states and Markov latents of slots, and the target's hidden states and tokens."""

    hidden_MH: Tensor
    latents_MR: Tensor | None
    confidence_M: Tensor | None  # logits
    target_hidden_MH: Tensor
    labels_M: Tensor
    weights_M: Tensor


def dspark_loss(
    slots: Slots, embedding_VH: Tensor, w2_VR: Tensor | None, mix: Mixture, chunk: int = 4096
) -> Tensor:
    """The loss over all slots, never holding the logits of more than `chunk` of them."""
    device, dtype = embedding_VH.device, embedding_VH.dtype
    padding = -len(slots.hidden_MH) % chunk if device.type == "cuda" else 0
    latents_MR, w2_VR = _or_nothing(slots.latents_MR, len(slots.hidden_MH), w2_VR, embedding_VH)

    def padded(rows: Tensor) -> Tensor:
        return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, padding))

    weights_M = slots.weights_M / slots.weights_M.sum()
    total, accepted_M = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        padded(slots.hidden_MH.to(dtype)),
        padded(latents_MR.to(dtype)),
        w2_VR,
        embedding_VH,
        padded(slots.target_hidden_MH.to(dtype)),
        padded(slots.labels_M),
        padded(weights_M),
        torch.tensor((mix.ce, mix.l1), device=device),
        chunk,
    )
    loss: Tensor = total
    if slots.confidence_M is not None:
        loss = loss + mix.confidence * F.binary_cross_entropy_with_logits(
            slots.confidence_M.float(), accepted_M[: len(weights_M)], weight=weights_M, reduction="sum"
        )
    return loss


def _or_nothing(
    latents_MR: Tensor | None, count: int, w2_VR: Tensor | None, embedding_VH: Tensor
) -> tuple[Tensor, Tensor]:
    """Latents of rank 0 for a drafter without a Markov head: their product is a bias of zeros."""
    if latents_MR is None or w2_VR is None:
        return embedding_VH.new_zeros((count, 0)), embedding_VH.new_zeros((embedding_VH.shape[0], 0))
    return latents_MR, w2_VR


def _loss_and_error(
    drafted_MV: Tensor, wanted_MV: Tensor, labels_M: Tensor, weights_M: Tensor, mix_2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss without the confidences' part, its gradient with respect to the draft's logits, and 1 - |p - q|₁ / 2."""
    log_p = torch.log_softmax(drafted_MV.float(), dim=-1)
    p = log_p.exp()
    difference = p - torch.softmax(wanted_MV.float(), dim=-1)
    distance_M = difference.abs().sum(dim=-1)
    sign = difference.sign()
    is_label = torch.arange(p.shape[1], device=p.device) == labels_M[:, None]
    error = mix_2[0] * (p - is_label.float()) + mix_2[1] * p * (sign - (p * sign).sum(dim=-1, keepdim=True))
    each_M = mix_2[1] * distance_M - mix_2[0] * log_p.gather(1, labels_M[:, None])[:, 0]
    return (
        (weights_M * each_M).sum(),
        (error * weights_M[:, None]).to(drafted_MV.dtype),
        1 - distance_M / 2,
    )


_compiled = torch.compile(_loss_and_error, dynamic=False)  # every chunk has the same shape


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden_MH: Tensor,
        latents_MR: Tensor,
        w2_VR: Tensor,
        embedding_VH: Tensor,
        target_hidden_MH: Tensor,
        labels_M: Tensor,
        weights_M: Tensor,
        mix_2: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        fused = _compiled if hidden_MH.is_cuda else _loss_and_error
        narrow_w2 = w2_VR.to(hidden_MH.dtype)
        total = hidden_MH.new_zeros((), dtype=torch.float32)
        accepted = torch.empty_like(weights_M)
        g_hidden, g_latents = torch.empty_like(hidden_MH), torch.empty_like(latents_MR)
        g_w2 = torch.zeros_like(w2_VR, dtype=torch.float32)
        for start in range(0, len(hidden_MH), chunk):
            part = slice(start, start + chunk)
            drafted = hidden_MH[part] @ embedding_VH.T + latents_MR[part] @ narrow_w2.T
            wanted = target_hidden_MH[part] @ embedding_VH.T
            loss, error, accepted[part] = fused(drafted, wanted, labels_M[part], weights_M[part], mix_2)
            total += loss
            g_hidden[part] = error @ embedding_VH
            g_latents[part] = error @ narrow_w2
            g_w2 += error.T @ latents_MR[part]
        ctx.save_for_backward(g_hidden, g_latents, g_w2.to(w2_VR.dtype))
        ctx.mark_non_differentiable(accepted)
        return total, accepted

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_total: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        g_hidden, g_latents, g_w2 = ctx.saved_tensors  # type: ignore[attr-defined]
        grads = (g * grad_total.to(g.dtype) for g in (g_hidden, g_latents, g_w2))
        return (*grads, None, None, None, None, None, None)
