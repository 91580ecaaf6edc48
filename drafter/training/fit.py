"""Training a drafter on the target's answers, on one process or several.

Life of a run: every process reads its own share of the corpus; each step runs the frozen target over a batch for
its features, draws anchors, scores all blocks at once and averages gradients over the processes. The learning rate
warms up and falls along a cosine of the run's progress: steps taken, or time used when a time limit would end the
run sooner.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from drafter.training.blocks import Blocks, cut_blocks, sample_anchors
from drafter.training.corpus import Batch, Corpus
from drafter.training.llama import Llama
from drafter.training.network import DraftNetwork, weighted_cross_entropy
from drafter.training.sequential_loss import PUBLISHED, Mixture, Slots, dspark_loss, mixture

_REPORT_EVERY = 50  # steps
_TALK_EVERY = 20  # steps between agreeing on the time among processes


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. A step takes `positions` target positions and `positions * anchor_share` blocks a process."""

    steps: int
    positions: int
    anchor_share: float
    learning_rate: float
    warmup_steps: int = 200
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    seed: int = 1
    max_seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class Progress:
    """A mean over the steps since the last report."""

    step: int
    steps: int
    loss: float
    seconds: float


def fit(
    network: DraftNetwork, target: Llama, corpus: Corpus, recipe: Recipe, report: Callable[[Progress], None]
) -> int:
    """Train in place; returns the steps taken. The networks must be on one device; bfloat16 where that is a GPU."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = target.embedding_VH.device
    generator = torch.Generator(device).manual_seed(recipe.seed * 1000 + rank)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=recipe.learning_rate,
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        fused=device.type == "cuda",
    )
    began = time.monotonic()
    clock, step = 0.0, 0
    losses: list[Tensor] = []
    for step, batch in enumerate(
        _to_device(corpus.batches(recipe.positions, recipe.seed * 1000 + rank), device), 1
    ):
        if (step - 1) % _TALK_EVERY == 0:
            clock = _slowest((time.monotonic() - began) / recipe.max_seconds, device)
        progress = max((step - 1) / recipe.steps, clock)
        if progress >= 1.0:
            step -= 1
            break
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _rate(step, progress, recipe.warmup_steps)
        loss = batch_loss(network, target, batch, recipe.anchor_share, generator, mixture(progress))
        loss.backward()
        if world > 1:
            _average_gradients(network, world)
        torch.nn.utils.clip_grad_norm_(
            network.parameters(), recipe.clip, foreach=device.type == "cuda" or None
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if len(losses) == _REPORT_EVERY or step == recipe.steps:
            report(Progress(step, recipe.steps, float(torch.stack(losses).mean()), time.monotonic() - began))
            losses = []
    return step


def batch_loss(
    network: DraftNetwork,
    target: Llama,
    batch: Batch,
    anchor_share: float,
    generator: torch.Generator | None,
    mix: Mixture = PUBLISHED,
) -> Tensor:
    """The weighted loss of random blocks of one batch; `mix` matters to DSpark alone."""
    tokens, config = batch.tokens_BS, network.config
    count = max(1, round(tokens.shape[1] * anchor_share))
    anchors = sample_anchors(batch.prompt_lengths_B, batch.lengths_B, count, generator)
    blocks = cut_blocks(tokens, batch.lengths_B, anchors, config.block_size, first_slot=config.first_slot)
    if config.family == "dspark":
        taps, final = target.taps_and_final(tokens, config.tap_layer_ids)
    else:
        taps, final = target.taps(tokens, config.tap_layer_ids), None
    embedding = target.embedding_VH.detach()
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=tokens.device.type == "cuda"):
        hidden = network(
            taps, anchors, tokens.gather(1, anchors), torch.zeros_like(batch.lengths_B), embedding
        )
        if final is not None:
            return _sequential_loss(network, hidden, final, blocks, embedding, mix)
        drafting = slice(config.first_slot, None)
        scored = hidden[:, :, drafting].reshape(-1, hidden.shape[-1]).to(embedding.dtype)
        labels, weights = (
            blocks.labels_BAK[..., drafting].flatten(),
            blocks.weights_BAK[..., drafting].flatten(),
        )
        return weighted_cross_entropy(scored, embedding, labels, weights)


def _sequential_loss(
    network: DraftNetwork,
    hidden_BAKH: Tensor,
    final_BSH: Tensor,
    blocks: Blocks,
    embedding: Tensor,
    mix: Mixture,
) -> Tensor:
    markov, confidence = network.markov_head, network.confidence_head
    latents = markov.latents(blocks.previous_BAK, hidden_BAKH) if markov is not None else None
    embedded = markov.markov_w1(blocks.previous_BAK) if markov is not None else None
    confidences = confidence(hidden_BAKH, embedded) if confidence is not None else None
    # The target predicts a slot's token from the position before it.
    slots = torch.arange(blocks.labels_BAK.shape[-1], device=final_BSH.device)
    before = (blocks.anchors_BA[..., None] + slots - network.config.first_slot).clamp(
        0, final_BSH.shape[1] - 1
    )
    rows = before.flatten(1)[..., None].expand(-1, -1, final_BSH.shape[-1])
    scored = Slots(
        hidden_MH=hidden_BAKH.flatten(0, 2),
        latents_MR=latents.flatten(0, 2) if latents is not None else None,
        confidence_M=confidences.flatten() if confidences is not None else None,
        target_hidden_MH=final_BSH.gather(1, rows).flatten(0, 1),
        labels_M=blocks.labels_BAK.flatten(),
        weights_M=blocks.weights_BAK.flatten(),
    )
    return dspark_loss(scored, embedding, markov.markov_w2.weight if markov is not None else None, mix)


def _rate(step: int, progress: float, warmup_steps: int) -> float:
    return min(1.0, step / warmup_steps) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _to_device(batches: Iterable[Batch], device: torch.device) -> Iterable[Batch]:
    for batch in batches:
        parts = (batch.tokens_BS, batch.prompt_lengths_B, batch.lengths_B)
        if device.type == "cuda":
            tokens, prompt_lengths, lengths = (
                part.pin_memory().to(device, non_blocking=True) for part in parts
            )
            parts = (tokens, prompt_lengths, lengths)
        yield Batch(*parts)


def _slowest(share: float, device: torch.device) -> float:
    """The largest share of its time that a process has used: the same on every process, so that all end at one step.

    A share and not seconds, since limits that processes counted from their own starts differ by milliseconds.
    """
    if not dist.is_initialized():
        return share
    shared = torch.tensor(share, dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return float(shared)


def _average_gradients(network: DraftNetwork, world: int) -> None:
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world
    for gradient, averaged in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(averaged.view_as(gradient))
