"""What the rank that schedules tells the others of a step: everything they need, as msgpack, once.

The others keep no ledger and no requests. A step brings its requests' tokens, lengths and page table rows. Page ids
mean the same on every rank, because all pools have equally many pages and each holds its heads' share of every page;
where every rank has requests of its own, they are pages of the request's rank.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import msgspec
import numpy as np

from kvmanager.ids import DUMMY_PAGE, RequestId
from kvmanager.slots import PageTable
from workers.request import SamplingParams


class Row(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One request of a step. `target_pages`, `draft_pages`: its rows as int32 bytes, up to its last page.

    `length`: positions with KV, in front of the step; `draft_begin`: the first that `draft_pages` hold. `counts`:
    (token, times said) of all tokens so far, where penalties look at them; `banned`: what the next `num_banned` tokens
    must not be. `rank`: which one has the request, where each has its own.
    """

    request_id: RequestId
    length: int
    sampling: SamplingParams
    drafting: bool
    draft_origin: int
    target_pages: bytes
    draft_pages: bytes
    counts: tuple[tuple[int, int], ...] | None = None
    banned: tuple[int, ...] = ()
    num_banned: int = 0
    rank: int = 0
    draft_begin: int = 0


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Positions behind `row.length` of a prompt of so many tokens; behind the last of them, logits are wanted."""

    row: Row
    token_ids: tuple[int, ...]
    num_prompt_tokens: int

    @property
    def last(self) -> bool:
        return self.row.length + len(self.token_ids) == self.num_prompt_tokens


class Prefill(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute chunks of different prompts; no more than one of each rank where every rank has requests of its own."""

    chunks: tuple[Chunk, ...]


class Decode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Draft `num_draft` tokens for every request behind its newest, `anchors[b]`, and verify them."""

    rows: tuple[Row, ...]
    anchors: tuple[int, ...]
    num_draft: int


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing to do; the group lives."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The group ends as it should."""


Step = Prefill | Decode | Beat | Stop

_PAGE_BYTES = 4

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Step] = msgspec.msgpack.Decoder(Step)


def encode(step: Step) -> bytes:
    return _encoder.encode(step)


def decode(data: bytes) -> Step:
    """Raises msgspec.DecodeError or ValidationError, which is one."""
    return _decoder.decode(data)


def pack_rows(rows: PageTable) -> list[bytes]:
    """Of each page table row [B, P] what `Row` carries: its pages up to the last that is not the dummy page."""
    own = rows != DUMMY_PAGE
    lengths = np.where(own.any(axis=1), rows.shape[1] - own[:, ::-1].argmax(axis=1), 0)
    return [
        row[:length].tobytes()
        for row, length in zip(rows.astype("<i4", copy=False), lengths.tolist(), strict=True)
    ]


def unpack_rows(rows: Items[bytes], max_pages: int, pool_pages: int) -> PageTable:
    """Int32 [B, max_pages], the dummy page behind what was sent. Raises ValueError for pages outside of the pool, and
    for more of them than a row has.
    """
    table = np.full((len(rows), max_pages), DUMMY_PAGE, dtype=np.int32)
    lengths = np.array([len(row) for row in rows], dtype=np.int64) // _PAGE_BYTES
    if (lengths > max_pages).any():
        raise ValueError(f"a step names {lengths.max()} pages of a request, and a row has {max_pages}")
    table[np.arange(max_pages) < lengths[:, None]] = np.frombuffer(b"".join(rows), dtype="<i4")
    if table.size and not 0 <= table.min() <= table.max() < pool_pages:
        raise ValueError(f"a step names pages outside of the pool of {pool_pages}")
    return table
