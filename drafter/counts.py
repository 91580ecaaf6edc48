"""What penalties count: the tokens that a request has before it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class TokenCounts:
    """The distinct tokens a request has before it, and how often its output has each of them (0: told, not said)."""

    def __init__(self, told: Iterable[int] = ()) -> None:
        self._token_ids = array("q", dict.fromkeys(told))
        self._counts = array("q", bytes(8 * len(self._token_ids)))
        self._index = {token: at for at, token in enumerate(self._token_ids)}

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> TokenCounts:
        """From `pairs` of another."""
        counts = cls()
        for at, (token, times) in enumerate(pairs):
            counts._index[token] = at
            counts._token_ids.append(token)
            counts._counts.append(times)
        return counts

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(token, how often it was said), in the order they came."""
        return tuple(zip(self._token_ids, self._counts, strict=True))

    def say(self, token: int) -> None:
        """One more token of the output."""
        at = self._index.setdefault(token, len(self._token_ids))
        if at == len(self._token_ids):
            self._token_ids.append(token)
            self._counts.append(0)
        self._counts[at] += 1

    def arrays(self) -> tuple[Ints, Ints]:
        """Token ids and counts, copied."""
        return np.array(self._token_ids), np.array(self._counts)
