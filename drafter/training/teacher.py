"""The target as its own teacher: thousands of prompts answered in lockstep.

All rows start at position 0 and step together, so one position counter serves the whole batch: while a row is
inside its prompt the next token is forced, afterwards it is chosen. That wastes the steps on which short prompts
wait for nothing, and buys a decode step without any ragged bookkeeping, captured once per cache span as a CUDA
graph and replayed. Rows are best grouped by prompt length. On a CPU the same step runs without a graph.

Legend: B rows, L token capacity, V vocabulary, G key/value heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.training.llama import Llama, rotary_tables

_SPAN = 64  # cache positions an attention call covers, rounded up to this; one captured graph for each span


@dataclass(frozen=True, slots=True)
class Sampling:
    """How rows choose tokens. The first `num_sampled` rows of a batch are sampled, the others are greedy."""

    num_sampled: int = 0
    temperature: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One row: prompt and answer tokens, the end token included when it came."""

    token_ids: list[int]
    prompt_length: int


class Teacher:
    """Answers batches of at most `max_rows` prompts, at most `capacity` tokens long with their answers."""

    def __init__(
        self, model: Llama, *, max_rows: int, capacity: int, stop_ids: Sequence[int], seed: int
    ) -> None:
        self.model = model
        weight = model.embedding_VH
        self.device, self.dtype = weight.device, weight.dtype
        self.capacity = -(-capacity // _SPAN) * _SPAN
        self.max_rows = max_rows
        shape = model.shape
        cache = (shape.num_layers, 2, max_rows, shape.num_kv_heads, self.capacity, shape.head_dim)
        self._cache = torch.zeros(cache, device=self.device, dtype=self.dtype)
        self._tokens = torch.zeros((max_rows, self.capacity + 1), device=self.device, dtype=torch.long)
        self._prompt_lengths = torch.zeros(max_rows, device=self.device, dtype=torch.long)
        self._finished = torch.zeros(max_rows, device=self.device, dtype=torch.bool)
        self._position = torch.zeros(1, device=self.device, dtype=torch.long)
        self._stop_ids = torch.tensor(list(stop_ids), device=self.device)
        cos, sin = rotary_tables(
            torch.arange(self.capacity, device=self.device), shape.head_dim, shape.rope_theta
        )
        self._cos, self._sin = cos.to(self.dtype), sin.to(self.dtype)
        self._graphs: dict[tuple[int, Sampling], torch.cuda.CUDAGraph] = {}
        self._graph_pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        torch.manual_seed(seed)

    @torch.no_grad()
    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling | None = None,
        finish_share: float = 1.0,
    ) -> list[Answer]:
        """Answer all prompts; a row ends at a stop token or after `max_new_tokens`.

        Stepping ends once `finish_share` of the rows have ended; the answers of the others are cut there.
        Raises ValueError for too many rows or a prompt that leaves no room.
        """
        sampling = sampling or Sampling()
        self._load(prompts)
        lengths = [len(prompt) for prompt in prompts]
        last = min(self.capacity, max(lengths) + max_new_tokens) - 1
        limit = self._prompt_lengths + max_new_tokens
        ended_at_rows = finish_share * len(prompts)
        position = 0
        while position < last:
            stop = min(last, (position // _SPAN + 1) * _SPAN)
            step = self._stepper((position // _SPAN + 1) * _SPAN, sampling)
            for _ in range(position, stop):
                step()
            position = stop
            ended = self._finished | (limit <= position)
            if int(ended[: len(prompts)].sum()) >= ended_at_rows:
                break
        rows = self._tokens[: len(prompts), : position + 1].cpu().numpy()
        columns = np.arange(rows.shape[1])
        starts = np.array(lengths)
        ends = np.minimum(rows.shape[1], starts + max_new_tokens)
        stops = np.isin(rows, self._stop_ids.cpu().numpy()) & (columns >= starts[:, None])
        ends = np.where(stops.any(1), np.minimum(ends, stops.argmax(1) + 1), ends)
        answers = [Answer(row[:end].tolist(), n) for row, end, n in zip(rows, ends, lengths, strict=True)]
        return answers

    def _load(self, prompts: Sequence[Sequence[int]]) -> None:
        if len(prompts) > self.max_rows:
            raise ValueError(f"{len(prompts)} prompts for {self.max_rows} rows")
        longest = max(len(prompt) for prompt in prompts)
        if longest >= self.capacity or min(len(prompt) for prompt in prompts) < 1:
            raise ValueError(f"prompt lengths must lie in 1 .. {self.capacity - 1}, got up to {longest}")
        self._tokens.zero_()
        padded = torch.zeros((len(prompts), longest), dtype=torch.long)
        for i, prompt in enumerate(prompts):
            padded[i, : len(prompt)] = torch.tensor(prompt)
        self._tokens[: len(prompts), :longest] = padded.to(self.device)
        # Rows without a prompt count as one token long and run idle.
        self._prompt_lengths.fill_(1)
        self._prompt_lengths[: len(prompts)] = torch.tensor([len(p) for p in prompts], device=self.device)
        self._finished.zero_()
        self._position.zero_()

    def _stepper(self, span: int, sampling: Sampling) -> Callable[[], None]:
        if self.device.type != "cuda":
            return lambda: self._step(span, sampling)
        key = (span, sampling)
        if key not in self._graphs:
            saved = [t.clone() for t in (self._tokens, self._finished, self._position)]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step(span, sampling)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Replays never overlap and leave nothing in the pool, so all graphs share one.
            with torch.cuda.graph(graph, pool=self._graph_pool):
                self._step(span, sampling)
            for tensor, value in zip((self._tokens, self._finished, self._position), saved, strict=True):
                tensor.copy_(value)
            self._graphs[key] = graph
        return self._graphs[key].replay

    def _step(self, span: int, sampling: Sampling) -> None:
        model, shape = self.model, self.model.shape
        rows, groups = self.max_rows, shape.num_heads // shape.num_kv_heads
        x = model.embed_tokens(self._tokens.index_select(1, self._position).squeeze(1))
        cos, sin = self._cos.index_select(0, self._position), self._sin.index_select(0, self._position)
        is_unseen = torch.arange(span, device=self.device) > self._position
        unseen = torch.zeros(span, device=self.device, dtype=self.dtype).masked_fill(is_unseen, float("-inf"))
        for index, layer in enumerate(model.blocks()):
            q, k, v = layer.project(x, cos, sin)
            keys, values = self._cache[index, 0], self._cache[index, 1]
            keys.index_copy_(2, self._position, k.unsqueeze(2))
            values.index_copy_(2, self._position, v.unsqueeze(2))
            # The query heads of one key/value head stand in the place of query positions, so no head is repeated. Two
            # plain products beat the attention kernels here, whose tiles would stay nearly empty.
            q = q.view(rows, shape.num_kv_heads, groups, shape.head_dim)
            scores = q @ keys[:, :, :span].transpose(-1, -2) * shape.head_dim**-0.5 + unseen
            attended = scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ values[:, :, :span]
            x = layer.finish(x, attended.reshape(rows, -1))
        logits = F.linear(model.norm(x), model.embedding_VH)
        chosen = torch.cat(
            (
                _sample(logits[: sampling.num_sampled], sampling),
                logits[sampling.num_sampled :].argmax(-1),
            )
        )
        following = self._position + 1
        forced = self._tokens.index_select(1, following).squeeze(1)
        in_prompt = self._prompt_lengths > following
        chosen = torch.where(in_prompt, forced, torch.where(self._finished, self._stop_ids[0], chosen))
        self._tokens.index_copy_(1, following, chosen.unsqueeze(1))
        self._finished |= ~in_prompt & torch.isin(chosen, self._stop_ids)
        self._position.add_(1)


def _sample(logits: Tensor, sampling: Sampling) -> Tensor:
    """argmax(logits/T + Gumbel) among tokens of at least min_p times the best one's probability."""
    if not logits.shape[0]:
        return logits.new_zeros(0, dtype=torch.long)
    wide = logits.float() / sampling.temperature
    noise = -torch.empty_like(wide).exponential_().log()
    if sampling.min_p > 0.0:
        floor = wide.amax(-1, keepdim=True) + math.log(sampling.min_p)
        noise = noise.masked_fill(wide < floor, float("-inf"))
    return (wide + noise).argmax(-1)
