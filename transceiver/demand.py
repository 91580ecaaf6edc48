"""What a transfer of n tokens takes on this worker: pages and bytes, target and draft apart. Pure.

Bytes shipped are pages_for(num_tokens) * page_bytes, and nothing else: whole pages, each once.
"""

from __future__ import annotations

from dataclasses import dataclass

from transceiver.errors import PlanError
from transceiver.wire import Fingerprint, Pools


@dataclass(frozen=True, slots=True)
class Demand:
    target_pages: int
    draft_pages: int
    target_bytes: int
    draft_bytes: int


def demand(fingerprint: Fingerprint, pools: Pools, num_tokens: int) -> Demand:
    """Draft counts are 0 where there is no draft pool. Raises PlanError for less than one token."""
    if num_tokens < 1:
        raise PlanError(f"a transfer of {num_tokens} tokens")
    target = fingerprint.target.pages_for(num_tokens)
    draft, draft_bytes = 0, 0
    if pools.draft is not None and fingerprint.draft is not None:
        draft = fingerprint.draft.pages_for(num_tokens)
        draft_bytes = draft * pools.draft.page_bytes
    return Demand(target, draft, target * pools.target.page_bytes, draft_bytes)
