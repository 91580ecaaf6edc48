"""Checks that what has landed is what was sent, for this transfer, into these positions.

    off        nothing is checked
    tag        every page comes with a tag that names (writer's epoch, transfer, pool, position), written with it
               by the same write; the receiver compares it with what it expects in that page
    checksum   the tag also carries a hash of the page's bytes, which the receiver computes again

A tag lies in a region of its own, so a later writer of the page leaves its own there. A page has as many places for
tags as KV heads: of ranks that write some heads of it each, every one has its own. A tag finds pages never written,
written by somebody else, or by another position's copy. The checksum also finds torn and stale bytes. The hash is XXH3
of 64 bits: 30 GB/s here, where a copy makes 8 and CRC-32 makes 4.

Tags lie in host memory, pools on a device included. Looking at them then costs the receiver no wait for its device, and
the few dozen bytes of a page take nothing of the link between devices. Nothing is lost by that: tags are looked at
after the writer has said Done, and it does so when the writes of both, pages and tags, have completed. A checksum reads
the pages themselves, so it needs them in host memory.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from transceiver.wire import TARGET, Fingerprint, Pools

TAG = np.dtype([("owner", "<u8", 2), ("checksum", "<u8"), ("position", "<u4"), ("pool", "<u4")])

Tags = npt.NDArray[np.void]
Slots = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PageBatch:
    """Pages of one transfer in one pool: where each lies here, its number in the receiver's pool, its first position.

    Here it is the `numbers`-th of those that lie from the address `base` on. Positions count from the first that the
    transfer ships. `tag_place`: among the tags of each page.
    """

    owner: bytes
    pool: int
    base: int
    numbers: tuple[int, ...]
    page_bytes: int
    pages: tuple[PageId, ...]
    positions: tuple[int, ...]
    tag_place: int = 0

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(self.base + number * self.page_bytes for number in self.numbers)


def owner_of(epoch: WorkerEpoch, transfer: TransferId) -> bytes:
    """16 bytes that no other transfer, and no other writer of this one, has."""
    return hashlib.blake2b(f"{epoch}/{transfer}".encode(), digest_size=16).digest()


def make_tags(batch: PageBatch, checksum: bool) -> Tags:
    tags: Tags = np.zeros(len(batch.pages), dtype=TAG)
    tags["owner"] = np.frombuffer(batch.owner, dtype="<u8")
    tags["position"] = batch.positions
    tags["pool"] = batch.pool
    if checksum:
        tags["checksum"] = [
            xxhash.xxh3_64_intdigest(memory(address, batch.page_bytes).data) for address in batch.addresses
        ]
    return tags


def first_mismatch(found: Tags, batch: PageBatch, checksum: bool) -> str:
    """Why these pages are not what their transfer put there; empty when they are."""
    wanted = make_tags(batch, checksum)
    if found.tobytes() == wanted.tobytes():
        return ""
    foreign = (found["owner"] != wanted["owner"]).any(axis=1)
    misplaced = (found["position"] != wanted["position"]) | (found["pool"] != wanted["pool"])
    altered = found["checksum"] != wanted["checksum"]
    wrong = np.flatnonzero(foreign | misplaced | altered)
    if not wrong.size:
        return ""
    first = int(wrong[0])
    if foreign[first]:
        why = "its tag is not this transfer's"
    elif misplaced[first]:
        why = f"its tag is of position {found['position'][first]}"
    else:
        why = f"its bytes have checksum {wanted['checksum'][first]:016x}, not {found['checksum'][first]:016x}"
    name = "target" if batch.pool == TARGET else "draft"
    return (
        f"content of {name} page {batch.pages[first]} at position {batch.positions[first]}: {why} "
        f"({wrong.size} of {len(batch.pages)} pages are wrong)"
    )


def memory(address: int, size_bytes: int) -> Bytes:
    """Host memory that somebody else owns, as bytes."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def tags_per_page(fingerprint: Fingerprint) -> int:
    """As many as there can be writers of one page: each ships a head at least."""
    draft = fingerprint.draft
    return max(fingerprint.target.num_kv_heads, draft.num_kv_heads if draft is not None else 0)


def slots(batch: PageBatch, receiver: Pools) -> Slots:
    """Where the tags of these pages lie in the receiver's region of tags: place by place, in each page by page."""
    num_target_pages = receiver.target.num_pages
    num_pages = num_target_pages + (0 if receiver.draft is None else receiver.draft.num_pages)
    first = batch.tag_place * num_pages + (0 if batch.pool == TARGET else num_target_pages)
    return np.array(batch.pages, dtype=np.int32) + np.int32(first)
