"""How many pages a request has: all it may ever need from the start, or more as its answer grows.

    admission "full"   prompt and max_tokens are reserved at once; no request ever lacks a page
    admission "grow"   prompt + quantum | + quantum | + quantum ...      up to prompt + max_tokens

(The ledger adds the look-ahead to each of these.) Few answers are as long as they might be, so growing admits more
requests into the same pool; the price is that the pool may run out while all of them are at work. Then the younger
give way to the older: see `workers.generation`.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from kvmanager.errors import PoolExhausted
from kvmanager.ids import RequestId
from kvmanager.ledgers import Ledger
from workers.limits import EngineLimits
from workers.sequence import Sequence


class PageGrowth:
    """One engine's rule. It remembers nothing that `forget` does not drop."""

    def __init__(self, ledger: Ledger, limits: EngineLimits) -> None:
        self._ledger = ledger
        self._growing = limits.admission == "grow"
        self._quantum = limits.growth_tokens
        self._reserved: dict[RequestId, int] = {}  # tokens, the look-ahead left out; growing requests only

    def at_admission(self, sequence: Sequence) -> int:
        """Tokens to reserve before the prompt's KV arrives."""
        whole = _whole(sequence)
        return min(sequence.num_prompt_tokens + self._quantum, whole) if self._growing else whole

    def spare_pages(self, num_running: int) -> int:
        """Pages that admission leaves to those who run already: it should not let in whom the next step turns out."""
        return num_running * self._ledger.target_geometry.pages_for(self._quantum) if self._growing else 0

    def admitted(self, sequence: Sequence) -> None:
        reserved = self.at_admission(sequence)
        if reserved < _whole(sequence):
            self._reserved[sequence.request_id] = reserved

    def lacking(self, decoding: Items[Sequence]) -> list[Sequence]:
        """Those whose next step may write beyond their pages, in the given order."""
        if not self._reserved:
            return []
        growing = [sequence for sequence in decoding if sequence.request_id in self._reserved]
        lengths = self._ledger.lengths_of([sequence.request_id for sequence in growing])
        # A step writes at most the look-ahead's number of positions from the length on.
        return [
            s for s, length in zip(growing, lengths, strict=True) if length > self._reserved[s.request_id]
        ]

    def grow(self, sequence: Sequence) -> bool:
        """Take pages for another quantum; False when the pool has none, cached prefixes included."""
        request_id, whole = sequence.request_id, _whole(sequence)
        num_tokens = min(self._ledger.length(request_id) + self._quantum, whole)
        try:
            self._ledger.grow(request_id, num_tokens)
        except PoolExhausted:
            return False
        if num_tokens < whole:
            self._reserved[request_id] = num_tokens
        else:
            self.forget(request_id)
        return True

    def forget(self, request_id: RequestId) -> None:
        self._reserved.pop(request_id, None)


def _whole(sequence: Sequence) -> int:
    return sequence.num_prompt_tokens + sequence.sampling.max_tokens
