"""Answers of the target, kept flat on disk, and the batches that training draws from them.

A batch holds sequences of similar length padded to a multiple of 32, about the same number of positions each time,
so a step costs the same whether its answers are short or long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drafter.training.teacher import Answer

_PAD_TO = 32
_POOL = 4096  # sequences sorted by length together: large enough to pad little, small enough to keep batches mixed


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded sequences."""

    tokens_BS: Tensor  # int64
    prompt_lengths_B: Tensor
    lengths_B: Tensor


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sequences end to end; sequence i is token_ids[starts[i] : starts[i + 1]]."""

    token_ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    prompt_lengths: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def num_tokens(self) -> int:
        """Prompt and answer tokens."""
        return len(self.token_ids)

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> Corpus:
        """Pack answers; those of fewer than 2 tokens have nothing to learn from and are left out."""
        kept = [answer for answer in answers if len(answer.token_ids) >= answer.prompt_length + 2]
        lengths = [len(answer.token_ids) for answer in kept]
        starts = np.zeros(len(kept) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        token_ids = np.fromiter(
            (i for answer in kept for i in answer.token_ids), dtype=np.int32, count=int(starts[-1])
        )
        return cls(token_ids, starts, np.array([answer.prompt_length for answer in kept], dtype=np.int32))

    @classmethod
    def joined(cls, parts: Sequence[Corpus]) -> Corpus:
        """All sequences of all parts."""
        offsets = np.cumsum([0, *(part.num_tokens for part in parts)])
        starts = [part.starts[:-1] + offset for part, offset in zip(parts, offsets[:-1], strict=True)]
        return cls(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([*starts, offsets[-1:]]),
            np.concatenate([part.prompt_lengths for part in parts]),
        )

    def sample(self, count: int, seed: int) -> Corpus:
        """Up to `count` sequences, drawn at random."""
        drawn = np.random.default_rng(seed).permutation(len(self))[:count]
        parts = [self.token_ids[self.starts[i] : self.starts[i + 1]] for i in drawn]
        starts = np.cumsum([0, *(len(part) for part in parts)])
        return Corpus(np.concatenate(parts), starts.astype(np.int64), self.prompt_lengths[drawn])

    def save(self, path: Path) -> None:
        """Write an uncompressed .npz."""
        np.savez(path, token_ids=self.token_ids, starts=self.starts, prompt_lengths=self.prompt_lengths)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return cls(arrays["token_ids"], arrays["starts"], arrays["prompt_lengths"])

    def batch(self, rows: NDArray[np.int64], *, pad_to: int = _PAD_TO) -> Batch:
        """The named sequences, padded."""
        lengths = self.starts[rows + 1] - self.starts[rows]
        width = -(-int(lengths.max()) // pad_to) * pad_to
        columns = np.arange(width)
        real = columns < lengths[:, None]
        index = np.minimum(self.starts[rows][:, None] + columns, self.num_tokens - 1)
        tokens = np.where(real, self.token_ids[index], 0).astype(np.int64)
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(self.prompt_lengths[rows].astype(np.int64)),
            torch.from_numpy(lengths.astype(np.int64)),
        )

    def batches(self, positions: int, seed: int) -> Iterator[Batch]:
        """Batches of about `positions` padded positions, for ever; every pass is shuffled anew."""
        rng = np.random.default_rng(seed)
        lengths = np.diff(self.starts)
        while True:
            order = rng.permutation(len(self))
            groups: list[NDArray[np.int64]] = []
            for begin in range(0, len(order), _POOL):
                pool = order[begin : begin + _POOL]
                pool = pool[np.argsort(lengths[pool], kind="stable")]
                groups.extend(_cut(pool, lengths, positions))
            for group in rng.permutation(len(groups)):
                yield self.batch(groups[group])


def _cut(pool: NDArray[np.int64], lengths: NDArray[np.int64], positions: int) -> Iterator[NDArray[np.int64]]:
    """Cut sequences sorted by length into runs whose padded size is at most `positions` (but one sequence at least)."""
    begin = 0
    for end in range(1, len(pool) + 1):
        if end < len(pool):
            width = -(-int(lengths[pool[end]]) // _PAD_TO) * _PAD_TO
            if width * (end + 1 - begin) <= positions:
                continue
        yield pool[begin:end]
        begin = end
