"""The names of things: requests, transfers, pages, slots, worker incarnations, and who may own a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", str)
PageId = NewType("PageId", int)
SlotId = NewType("SlotId", int)
WorkerEpoch = NewType("WorkerEpoch", str)
"""One uuid per worker process incarnation."""
PageKey = NewType("PageKey", bytes)
"""What a full page of a prompt holds, and everything before it: see `kvmanager.prefix`."""

DUMMY_PAGE = PageId(0)
"""The page of every pool that padding rows write to and read from. No request ever owns it."""


@dataclass(frozen=True, slots=True)
class RequestOwner:
    """A request holds the page: from its reservation until it finishes, fails or is cancelled."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class TransferOwner:
    """A transfer holds the page: from its lease until its terminal state."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class CacheOwner:
    """The prefix cache holds the page: from its insertion until its eviction."""

    key: PageKey


Owner = RequestOwner | TransferOwner | CacheOwner
"""Distinct types, so that a request and a transfer of the same name are two owners."""
