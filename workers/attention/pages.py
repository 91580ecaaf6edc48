"""What a step's page tables say, as flat arrays: pure arithmetic on lengths.

request b reads entries[starts[b] : starts[b + 1]], of which the last holds last_page_lens[b] positions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageRuns:
    """Page table entries of B requests, one run each."""

    starts: Ints  # [B + 1]
    entries: Ints  # [starts[B]]
    kv_lens: Ints  # [B]
    last_page_lens: Ints  # [B]
    page_size: int

    def offsets(
        self, q_lens: Sequence[int], entry_elements: int, position_elements: int
    ) -> npt.NDArray[np.int64]:
        """Where each request's last q_lens[b] positions lie: entry * entry_elements + position in page *
        position_elements, [sum(q_lens)]. Raises ValueError for a q_len that its kv_len does not cover.
        """
        queries = np.asarray(q_lens, dtype=np.int64)
        if len(queries) != len(self.kv_lens) or (queries < 1).any() or (queries > self.kv_lens).any():
            raise ValueError(f"q_lens {list(q_lens)} do not fit kv_lens {self.kv_lens.tolist()}")
        request_T = np.repeat(np.arange(len(queries)), queries)
        first_T = np.repeat(np.cumsum(queries) - queries, queries)
        position_T = (self.kv_lens - queries)[request_T] + np.arange(len(request_T)) - first_T
        page_T, within_T = np.divmod(position_T, self.page_size)
        entry_T = self.entries[self.starts[request_T] + page_T].astype(np.int64)
        offsets: npt.NDArray[np.int64] = entry_T * entry_elements + within_T * position_elements
        return offsets


def page_runs(page_rows: Ints, kv_lens: Sequence[int], page_size: int, entries_per_page: int = 1) -> PageRuns:
    """Cut rows [B, max_pages] to the pages that kv_lens need.

    Raises ValueError for no request, and for a length that is not in 1 .. max_pages * page_size.
    """
    if len(page_rows) != len(kv_lens) or not kv_lens:
        raise ValueError(f"{len(page_rows)} page rows, {len(kv_lens)} lengths")
    lens = np.asarray(kv_lens, dtype=np.int32)
    capacity = page_rows.shape[1] * page_size
    if not (lens.min() >= 1 and lens.max() <= capacity):
        raise ValueError(f"kv_lens {list(kv_lens)} are not all in 1 .. {capacity}")
    counts = -(-lens // page_size)
    starts = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    entries = page_rows[np.arange(page_rows.shape[1]) < counts[:, None]]
    if entries_per_page != 1:
        entries = entries * np.int32(entries_per_page)
    return PageRuns(starts, entries, lens, lens - (counts - 1) * np.int32(page_size), page_size)
