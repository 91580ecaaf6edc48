"""The prefix cache: full pages of prompts that ended, kept for prompts that begin alike.

A page is named by a hash chain, so that a name stands for the page's tokens and for all tokens before it, under
one model pair and, when given, one tenant's salt:

    seed  = H(model pair, salt)        key 0 = H(seed, tokens of page 0)        key i = H(key i-1, tokens of page i)

The drafter's context depends on the target's hidden states alone, and those on the tokens, so a prefix has one
page in every pool (target, and draft where it has a pool of its own), and those pages are cached, hit and
evicted together. A page is only ever cached with valid draft context: whoever inserts vouches for it. The one exception
is a drafter that keeps a window: a hit never reaches into it (`shareable`), so its pool takes no part.

Life of an entry: inserted by a request that wrote it -> in use while a request or a transfer owns its pages,
its inserter included -> idle when the cache alone does -> in use again by a hit, or evicted for its pages,
least recently used first.

An owner of a page owns every page before it in its chain, so an entry in use has all its ancestors in use, and
the idle order below, deepest page of a released chain first, evicts children before their parents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvmanager.errors import LedgerCorrupt
from kvmanager.ids import CacheOwner, Owner, PageId, PageKey
from kvmanager.pool import PagePool

_KEY_BYTES = 16


def page_keys(
    token_ids: Sequence[int],
    page_size: int,
    *,
    model_pair: str,
    salt: str = "",
    known: Sequence[PageKey] = (),
) -> tuple[PageKey, ...]:
    """Keys of all full pages of a prompt, in position order. `model_pair` names weights, dtype and KV form.

    `known`: the keys of its first pages, where they have been worked out before.
    """
    seed = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in (model_pair, salt):  # with lengths, so that no two pairs of texts read alike
        seed.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    keys = list(known)
    key: bytes = keys[-1] if keys else seed.digest()
    packed = np.asarray(token_ids, dtype="<i8").tobytes()
    width = page_size * 8
    for end in range((len(keys) + 1) * width, len(packed) + 1, width):
        key = hashlib.blake2b(key + packed[end - width : end], digest_size=_KEY_BYTES).digest()
        keys.append(PageKey(key))
    return tuple(keys)


def shareable(
    keys: Sequence[PageKey], num_prompt_tokens: int, page_size: int, window: int | None = None
) -> tuple[PageKey, ...]:
    """The pages that a prompt may take from the cache: not the one of its last token.

    That token is always computed, because the logits behind it choose the first new token. A drafter that keeps a
    window has pages of nothing else, so none are cached for it: the last `window` tokens are computed, which brings
    its whole context back, and everything before them may be taken.
    """
    computed = max(window or 1, 1)
    return tuple(keys[: max(num_prompt_tokens - computed, 0) // page_size])


@dataclass(frozen=True, slots=True)
class _Entry:
    """`pages`: one per pool, in the pools' order. `parent` is None for the first page of a prompt."""

    pages: tuple[PageId, ...]
    parent: PageKey | None


class PrefixCache:
    """Cached pages of pools that move together; page i of a prompt has one page in each."""

    def __init__(self, pools: Sequence[PagePool]) -> None:
        self._pools = tuple(pools)
        self._entries: dict[PageKey, _Entry] = {}
        self._key_of: dict[PageId, PageKey] = {}  # by page of the first pool
        self._idle: dict[PageKey, None] = {}  # oldest first, children before their parents

    def __len__(self) -> int:
        """Pages cached, in use or idle."""
        return len(self._entries)

    @property
    def num_idle(self) -> int:
        """Pages that the cache alone holds, in each pool: what `evict` can free."""
        return len(self._idle)

    def match(self, keys: Sequence[PageKey]) -> int:
        """How many leading pages are cached. Changes nothing."""
        for count, key in enumerate(keys):
            if key not in self._entries:
                return count
        return len(keys)

    def num_idle_among(self, keys: Iterable[PageKey]) -> int:
        return sum(key in self._idle for key in keys)

    def share(self, keys: Sequence[PageKey], owner: Owner) -> list[tuple[PageId, ...]]:
        """Make `owner` a co-owner of these cached pages; returns them for each pool, in position order."""
        shared: list[tuple[PageId, ...]] = []
        for index, pool in enumerate(self._pools):
            pages = tuple(self._entries[key].pages[index] for key in keys)
            pool.share(pages, owner)
            shared.append(pages)
        for key in keys:
            self._idle.pop(key, None)
        return shared

    def insert(self, keys: Sequence[PageKey], pages: Sequence[Sequence[PageId]]) -> int:
        """Cache the leading pages of a live request, `pages[pool][i]` under `keys[i]`; returns how many are new.

        Where another request was first with the same tokens its pages stay, and nothing behind them is inserted:
        it would hang on pages that this request does not own.
        """
        added = 0
        parent: PageKey | None = None
        for key, *own in zip(keys, *pages, strict=False):
            entry = self._entries.get(key)
            if entry is None:
                for pool, page in zip(self._pools, own, strict=True):
                    pool.share((page,), CacheOwner(key))
                self._entries[key] = _Entry(tuple(own), parent)
                self._key_of[own[0]] = key
                added += 1
            elif entry.pages != tuple(own):
                if key in self._idle:  # asked for again, though not shared: young again
                    del self._idle[key]
                    self._idle[key] = None
                break
            parent = key
        return added

    def released(self, pages: Sequence[PageId]) -> None:
        """An owner let go of these pages of the first pool, in position order: some may be idle now."""
        first = self._pools[0]
        for page in reversed(pages):  # deepest first: children leave before their parents
            key = self._key_of.get(page)
            if key is not None and first.num_owners(page) == 1:
                self._idle[key] = None

    def evict(self, needs: Sequence[int]) -> int:
        """Free idle pages, oldest first, until each pool has as many free pages as it needs; returns how many.

        The caller knows that there are enough.
        """
        evicted = 0
        while self._idle and any(pool.num_free < need for pool, need in zip(self._pools, needs, strict=True)):
            self._drop(next(iter(self._idle)))
            evicted += 1
        return evicted

    def clear(self) -> None:
        """Forget everything. Pages in use stay with their owners."""
        for key in list(self._entries):
            self._drop(key)

    def _drop(self, key: PageKey) -> None:
        entry = self._entries.pop(key)
        self._idle.pop(key, None)
        del self._key_of[entry.pages[0]]
        for pool in self._pools:
            pool.release(CacheOwner(key))

    def check(self) -> None:
        """Raise LedgerCorrupt unless every entry has its page in every pool and idle means what it says."""
        for index, pool in enumerate(self._pools):
            held = {
                owner.key: pool.pages_of(owner) for owner in pool.owners() if isinstance(owner, CacheOwner)
            }
            if held != {key: (entry.pages[index],) for key, entry in self._entries.items()}:
                raise LedgerCorrupt(f"the {pool.name} pool and the prefix cache disagree on what is cached")
            for key, entry in self._entries.items():
                if (pool.num_owners(entry.pages[index]) == 1) != (key in self._idle):
                    raise LedgerCorrupt(
                        f"page {entry.pages[index]} of the {pool.name} pool is wrongly counted as idle or in use"
                    )
        if {entry.pages[0]: key for key, entry in self._entries.items()} != self._key_of:
            raise LedgerCorrupt("a cached page cannot be found by its id")
        waiting = dict.fromkeys(self._idle)
        for entry in self._entries.values():
            if entry.parent is not None and entry.parent not in self._entries:
                raise LedgerCorrupt("a cached page has lost the page before it")
        for key in self._idle:
            del waiting[key]
            parent = self._entries[key].parent
            if parent is not None and parent in self._idle and parent not in waiting:
                raise LedgerCorrupt("a cached page would be evicted before the page behind it")
        for key, entry in self._entries.items():
            if key not in self._idle and entry.parent in self._idle:
                raise LedgerCorrupt("a cached page is in use, the page before it is not")
