"""A worker reduced to its pools and its transfer port, so that transfers can be watched byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmanager.ids import PageId, TransferId, WorkerEpoch
from kvmanager.layout import KvGeometry
from transceiver.endpoint import Endpoint, Identity
from transceiver.loopback import LoopbackHub, LoopbackTransport
from transceiver.port import Pages, ReceiveSpec, SendSpec, TransferEvent
from transceiver.records import Timing
from transceiver.wire import ONLY_RANK, Fingerprint, Handoff, Place, Pools, Region

PAGE_SIZE = 4
TARGET = KvGeometry(num_layers=2, num_kv_heads=1, head_dim=2, page_size=PAGE_SIZE, element_bytes=2)
DRAFT = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=2, page_size=PAGE_SIZE, element_bytes=2)
FINGERPRINT = Fingerprint(
    target_model="target-a",
    target_dtype="bfloat16",
    target=TARGET,
    draft_model="draft-a",
    draft_dtype="bfloat16",
    draft=DRAFT,
    draft_mode="mirrored",
)


def pages(*ids: int) -> Pages:
    """The same page ids in both pools."""
    return Pages(tuple(map(PageId, ids)), tuple(map(PageId, ids)))


def handoff(num_tokens: int, first_token: int = 7) -> Handoff:
    return Handoff(num_tokens=num_tokens, first_token=first_token, prompt_tokens_computed=num_tokens)


def region(memory: npt.NDArray[np.uint8]) -> Region:
    return Region(memory.ctypes.data, memory.nbytes, memory.shape[1], memory.shape[0])


class Memory:
    """Target and draft pools of one worker. Bytes of `fill` differ from worker to worker and page to page."""

    def __init__(self, num_pages: int, fill_seed: int | None, fingerprint: Fingerprint = FINGERPRINT) -> None:
        draft_bytes = 1 if fingerprint.draft is None else fingerprint.draft.page_bytes
        unified = fingerprint.draft_mode == "unified"
        target_bytes = fingerprint.target.page_bytes + (draft_bytes if unified else 0)
        self.target = np.zeros((num_pages, target_bytes), dtype=np.uint8)
        self.draft = np.zeros((num_pages, draft_bytes), dtype=np.uint8)
        if fill_seed is not None:
            random = np.random.default_rng(fill_seed)
            self.target[:] = random.integers(0, 256, self.target.shape)
            self.draft[:] = random.integers(0, 256, self.draft.shape)
        has_pool = fingerprint.draft is not None and not unified
        self.pools = Pools(region(self.target), region(self.draft) if has_pool else None)

    def holds(self, ours: Sequence[int], other: Memory, theirs: Sequence[int], draft: bool = True) -> bool:
        """Whether our pages hold the bytes of the other memory's pages."""
        same = bool((self.target[list(ours)] == other.target[list(theirs)]).all())
        return same and (not draft or bool((self.draft[list(ours)] == other.draft[list(theirs)]).all()))


@dataclass
class SmallWorker:
    """Pools and an endpoint over a loopback hub."""

    epoch: WorkerEpoch
    memory: Memory
    endpoint: Endpoint

    @classmethod
    def on(
        cls,
        hub: LoopbackHub,
        name: str,
        *,
        num_pages: int = 32,
        fill_seed: int | None = None,
        timing: Timing | None = None,
        fingerprint: Fingerprint = FINGERPRINT,
        staging_bytes: int = 1 << 16,
        place: Place = ONLY_RANK,
    ) -> SmallWorker:
        epoch = WorkerEpoch(name)
        memory = Memory(num_pages, fill_seed, fingerprint)
        transport = LoopbackTransport(hub, epoch, memory.pools)
        endpoint = Endpoint(
            Identity(epoch, "any", fingerprint, place),
            memory.pools,
            transport,
            timing,
            staging_bytes=staging_bytes,
        )
        return cls(epoch, memory, endpoint)

    def expect(self, transfer: str, num_tokens: int, destination: Pages, ttl_s: float = 5.0) -> None:
        self.endpoint.expect(
            ReceiveSpec(
                transfer=TransferId(transfer), num_tokens=num_tokens, destination=destination, ttl_s=ttl_s
            )
        )

    def open(
        self,
        transfer: str,
        to: SmallWorker,
        num_tokens: int,
        source: Pages,
        destination: Pages,
        ttl_s: float = 5.0,
        ship_draft: bool = True,
    ) -> None:
        self.endpoint.open(
            SendSpec(
                transfer=TransferId(transfer),
                peer=to.epoch,
                num_tokens=num_tokens,
                source=source,
                destination=destination,
                ttl_s=ttl_s,
                ship_draft=ship_draft,
            )
        )

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """Of all its ranks."""
        return (self.endpoint,)

    def mark(self, pages: Pages, value: int) -> None:
        """Fill pages with one value, as a new owner may."""
        self.memory.target[list(pages.target)] = value
        self.memory.draft[list(pages.draft)] = value

    def is_marked(self, pool: str, page: PageId, value: int) -> bool:
        return bool((getattr(self.memory, pool)[page] == value).all())


class Clock:
    """Polls workers in turn, a step of time apart, and collects what they report."""

    def __init__(self, *workers: SmallWorker, step_s: float = 0.005) -> None:
        self.workers = list(workers)
        self.now_s = 100.0
        self.step_s = step_s

    def run(self, seconds: float) -> dict[WorkerEpoch, list[TransferEvent]]:
        seen: dict[WorkerEpoch, list[TransferEvent]] = {worker.epoch: [] for worker in self.workers}
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += self.step_s
            for worker in self.workers:
                seen[worker.epoch] += worker.endpoint.poll(self.now_s)
                worker.endpoint.check()
        return seen
