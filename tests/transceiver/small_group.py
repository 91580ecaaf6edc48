"""Some ranks of one worker, each with pools and an endpoint, behind one port; their KV can be checked head by head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from kvmanager.ids import PageId, WorkerEpoch
from kvmanager.layout import KvGeometry, kv_head_range
from tests.transceiver.small_worker import DRAFT, FINGERPRINT, PAGE_SIZE, TARGET, SmallWorker
from transceiver.endpoint import Endpoint
from transceiver.group import GroupPort
from transceiver.loopback import LoopbackHub
from transceiver.port import Pages
from transceiver.records import Timing
from transceiver.wire import Fingerprint, HeadRange, Place

NUM_PAGES = 32
Kv = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Heads:
    """KV heads over all ranks."""

    target: int = 2
    draft: int = 4


def rank_fingerprint(heads: Heads, rank: int, size: int, **more: object) -> Fingerprint:
    """Of one of `size` ranks, with its share of the heads."""

    def share(geometry: KvGeometry, total: int) -> tuple[KvGeometry, HeadRange]:
        held = kv_head_range(total, rank, size)
        return replace(geometry, num_kv_heads=len(held)), HeadRange(held.start, total)

    target, target_heads = share(TARGET, heads.target)
    draft, draft_heads = share(DRAFT, heads.draft)
    found = msgspec.structs.replace(FINGERPRINT, target=target, draft=draft, **{"verify": "tag", **more})
    if size == 1:
        return found
    return msgspec.structs.replace(found, target_heads=target_heads, draft_heads=draft_heads)


@dataclass
class SmallGroup(SmallWorker):
    """As a `SmallWorker`; `memory` is the first rank's."""

    ranks: tuple[SmallWorker, ...] = ()
    heads: Heads = Heads()

    @classmethod
    def of(
        cls,
        hub: LoopbackHub,
        name: str,
        size: int,
        heads: Heads,
        *,
        timing: Timing | None = None,
        **more: object,
    ) -> SmallGroup:
        """The first rank's epoch is `name`, the group's; `more` changes fields of the fingerprint."""
        epoch = WorkerEpoch(name)
        ranks = tuple(
            SmallWorker.on(
                hub,
                name if rank == 0 else f"{name}-{rank}",
                timing=timing,
                fingerprint=rank_fingerprint(heads, rank, size, **more),
                place=Place(rank, size, epoch if size > 1 else None),
            )
            for rank in range(size)
        )
        port = GroupPort([rank.endpoint for rank in ranks], ranks[0].endpoint)
        return cls(epoch, ranks[0].memory, port, ranks, heads)  # type: ignore[arg-type]

    @property
    def port(self) -> GroupPort:
        return self.endpoint  # type: ignore[return-value]

    def fill(self, seed: int) -> None:
        """What every rank of every group holds after the same call is the same, head by head."""
        for rank, pools in enumerate(self.shares()):
            for view, whole in zip(pools, wholes(seed, self.heads), strict=True):
                held = kv_head_range(whole.shape[2], rank, len(self.ranks))
                view[:] = whole[:, :, held.start : held.stop]

    def shares(self) -> list[tuple[Kv, Kv]]:
        """Views [page, layer and K|V, head, bytes] of each rank's pools."""
        found = []
        for rank in self.ranks:
            print_ = rank.endpoint._book.ours.fingerprint
            assert print_.draft is not None
            target, draft = rank.memory.target, rank.memory.draft
            if print_.draft_mode == "unified":
                target, draft = np.split(target, [print_.target.page_bytes], axis=1)
            found.append((_view(target, print_.target), _view(draft, print_.draft)))
        return found

    def holds(self, ours: Pages, seed: int, theirs: Pages, num_tokens: int) -> bool:
        """Whether our pages hold, on every rank, the tokens of a group's pages that is filled with `seed`."""
        listed = ((ours.target, theirs.target), (ours.draft, theirs.draft))
        for rank, views in enumerate(self.shares()):
            for view, whole, (here, there) in zip(views, wholes(seed, self.heads), listed, strict=True):
                held = kv_head_range(whole.shape[2], rank, len(self.ranks))
                wanted = _tokens(whole[list(there)][:, :, held.start : held.stop], num_tokens)
                if not (_tokens(view[list(here)], num_tokens) == wanted).all():
                    return False
        return True

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        return [rank.endpoint for rank in self.ranks]

    def mark(self, pages: Pages, value: int) -> None:
        for rank in self.ranks:
            rank.mark(pages, value)  # the draft pool is nobody's, in unified form

    def is_marked(self, pool: str, page: PageId, value: int) -> bool:
        return all(rank.is_marked(pool, page, value) for rank in self.ranks)


def wholes(seed: int, heads: Heads) -> tuple[Kv, Kv]:
    """What all heads hold, target and draft: [page, layer and K|V, head, bytes]."""
    random = np.random.default_rng(seed)

    def of(geometry: KvGeometry, total: int) -> Kv:
        head_bytes = geometry.page_size * geometry.head_dim * geometry.element_bytes
        shape = (NUM_PAGES, 2 * geometry.num_layers, total, head_bytes)
        return random.integers(0, 256, shape, dtype=np.uint8)

    return of(TARGET, heads.target), of(DRAFT, heads.draft)


def _tokens(pages: Kv, num_tokens: int) -> Kv:
    """[token, layer and K|V, head, bytes] of consecutive pages."""
    count, planes, heads, size = pages.shape
    positions = pages.reshape(count, planes, heads, PAGE_SIZE, size // PAGE_SIZE)
    return positions.transpose(0, 3, 1, 2, 4).reshape(count * PAGE_SIZE, planes, heads, -1)[:num_tokens]


def _view(pool: Kv, geometry: KvGeometry) -> Kv:
    return pool.reshape(len(pool), 2 * geometry.num_layers, geometry.num_kv_heads, -1)
