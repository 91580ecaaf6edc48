"""The transceiver's own memory beside the pools: incoming tags, and the staging buffer for what goes out.

Life cycle: made with the endpoint and registered with its transport; filled before each write that needs it
(`prepare`); read when a transfer has landed (`inspect`). What is where in it the book decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmanager.ids import TransferId
from transceiver.content import (
    TAG,
    Bytes,
    PageBatch,
    Tags,
    first_mismatch,
    make_tags,
    memory,
    slots,
    tags_per_page,
)
from transceiver.errors import TransceiverError
from transceiver.formats import Gather, Part, Route
from transceiver.wire import Fingerprint, Pools, Region

DEFAULT_STAGING_BYTES = 16 << 20
_ALIGNMENT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Stage:
    """Fill staged pages of `route.shipped`, from the offset on, out of the pool at `source_address`."""

    offset: int
    route: Route
    source_address: int
    num_pages: int
    gathers: tuple[Gather, ...]


@dataclass(frozen=True, slots=True)
class Stamp:
    """Put the tags of these pages at the offset; the pages lie where they are written from."""

    offset: int
    batch: PageBatch


@dataclass(frozen=True, slots=True)
class Prepare:
    """What must lie in the staging buffer before the write that follows."""

    stages: tuple[Stage, ...]
    stamps: tuple[Stamp, ...]


@dataclass(frozen=True, slots=True)
class Inspect:
    """A transfer's pages have all been written, its writer says; are they what it wrote?"""

    transfer: TransferId
    batches: tuple[PageBatch, ...]


class Annex:
    """`staging` and `tags` are to be registered; `tags` is None unless content is checked."""

    def __init__(
        self, pools: Pools, fingerprint: Fingerprint, staging_bytes: int = DEFAULT_STAGING_BYTES
    ) -> None:
        """Raises TransceiverError for a checksum over memory that this process cannot read."""
        verify = fingerprint.verify
        if verify == "checksum" and pools.target.device is not None:
            raise TransceiverError("verify = checksum needs pools in host memory; use tag")
        self._checksum = verify == "checksum"
        self._pools = pools
        self._staging = _aligned(staging_bytes)
        self.staging = Region(self._staging.ctypes.data, staging_bytes, staging_bytes, 1)
        num_tags = 0
        if verify != "off":
            num_tags = pools.target.num_pages + (0 if pools.draft is None else pools.draft.num_pages)
            num_tags *= tags_per_page(fingerprint)
        self._tag_bytes = _aligned(num_tags * TAG.itemsize)
        self._tags: Tags = self._tag_bytes.view(TAG)
        self.tags: Region | None = None
        if num_tags:
            self.tags = Region(self._tag_bytes.ctypes.data, self._tag_bytes.nbytes, TAG.itemsize, num_tags)

    @property
    def staged_tags(self) -> Region:
        """The staging buffer as places of tags."""
        count = self.staging.size_bytes // TAG.itemsize
        return Region(self.staging.address, self.staging.size_bytes, TAG.itemsize, count)

    def prepare(self, action: Prepare) -> None:
        for stage in action.stages:
            self._gather(stage)
        for stamp in action.stamps:
            tags = make_tags(stamp.batch, self._checksum)
            end = stamp.offset + tags.nbytes
            self._staging[stamp.offset : end] = tags.view(np.uint8)

    def inspect(self, action: Inspect) -> str:
        """Why the content is wrong; empty when it is right."""
        for batch in action.batches:
            found = self._tags[slots(batch, self._pools)]
            mismatch = first_mismatch(found, batch, self._checksum)
            if mismatch:
                return mismatch
        return ""

    def _gather(self, stage: Stage) -> None:
        source, shipped = stage.route.source, stage.route.shipped
        size = shipped.page_bytes
        staged = self._staging[stage.offset : stage.offset + stage.num_pages * size].reshape(-1, size)
        for number in {gather.staged_page for gather in stage.gathers}:
            filled = sum(gather.num_positions for gather in stage.gathers if gather.staged_page == number)
            if filled < shipped.page_size:
                staged[number] = 0  # around the prompt's KV; nobody else's travels along
        views = [_positions(staged_page, shipped.parts) for staged_page in staged]
        for gather in stage.gathers:
            address = stage.source_address + gather.source_page * source.page_bytes
            page = _positions(memory(address, source.page_bytes), source.parts)
            here = slice(gather.source_position, gather.source_position + gather.num_positions)
            there = slice(gather.staged_position, gather.staged_position + gather.num_positions)
            for ours, into, from_part, part in zip(
                page, views[gather.staged_page], source.parts, shipped.parts, strict=True
            ):
                skip = part.first_head - from_part.first_head
                heads = slice(skip, skip + part.geometry.num_kv_heads)
                into[:, :, there] = ours[:, heads, here]


def _positions(page: Bytes, parts: tuple[Part, ...]) -> list[Bytes]:
    """One page's parts as bytes [layer * (K|V), head, position, head_dim in bytes]."""
    views: list[Bytes] = []
    offset = 0
    for part in parts:
        geometry = part.geometry
        shape = (
            2 * geometry.num_layers,
            geometry.num_kv_heads,
            geometry.page_size,
            geometry.head_dim * geometry.element_bytes,
        )
        views.append(page[offset : offset + geometry.page_bytes].reshape(shape))
        offset += geometry.page_bytes
    return views


def _aligned(size_bytes: int) -> npt.NDArray[np.uint8]:
    raw = np.zeros(size_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
    skip = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[skip : skip + size_bytes]
