"""Faults that the evaluation injects into a worker to show what a broken drafter costs.

No configuration reaches them: `EngineHost.inject` is the only way in, and only the evaluation's own actors call it.
Both faults leave every token right, which is why an accuracy gate cannot see them.
"""

from __future__ import annotations

from enum import Enum


class Fault(Enum):
    """NONE in service. The others reproduce what disaggregated servers did with their drafters."""

    NONE = "none"
    EMPTY_CONTEXT = "empty_context"
    """The drafter's prompt context is not shipped: its context starts with the first generated token."""
    DUMMY_SLOT = "dummy_slot"
    """Every request drafts on the dummy slot: all of them write and read the same page."""
