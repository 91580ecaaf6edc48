"""The modes an evaluation compares, and the cluster that can run them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.config import ClusterConfig
from workers.config import DraftPolicy, DtypeName
from workers.errors import InvalidRequest
from workers.faults import Fault

ModeName = Literal["target_only", "aggregated", "split", "split_empty_context", "split_dummy_slot"]


@dataclass(frozen=True)
class Mode:
    """`split`: through a context and a generation worker. `fault` is injected into both for the mode's duration."""

    name: ModeName
    title: str
    split: bool
    drafting: bool
    fault: Fault = Fault.NONE


MODES: tuple[Mode, ...] = (
    Mode("target_only", "target only (no drafting)", split=False, drafting=False),
    Mode("aggregated", "aggregated", split=False, drafting=True),
    Mode("split", "split", split=True, drafting=True),
    Mode(
        "split_empty_context",
        "split, drafter context not shipped (fault injected)",
        split=True,
        drafting=True,
        fault=Fault.EMPTY_CONTEXT,
    ),
    Mode(
        "split_dummy_slot",
        "split, all requests on the dummy slot (fault injected)",
        split=True,
        drafting=True,
        fault=Fault.DUMMY_SLOT,
    ),
)


def parse_modes(names: str) -> list[Mode]:
    """Modes of a comma-separated list, in its order. Raises InvalidRequest for a name that is none of them."""
    known = {mode.name: mode for mode in MODES}
    chosen = []
    for name in names.split(","):
        mode = known.get(name.strip())  # type: ignore[call-overload]
        if mode is None:
            raise InvalidRequest(
                f"unknown mode {name.strip()!r}: the modes are {', '.join(known)}",
                field="modes",
                limit=",".join(known),
            )
        chosen.append(mode)
    return chosen


@dataclass(frozen=True, kw_only=True)
class EvaluationCluster:
    """What to start for an evaluation. Workers of different modes never compute at once, so each takes all cores."""

    pair: str
    dtype: DtypeName
    draft_tokens: DraftPolicy | int
    concurrency: int
    max_seq_len: int
    draft_vocab: int | str = 0

    def config(self, modes: Sequence[Mode]) -> ClusterConfig:
        """One cluster with the workers that these modes need."""
        split = any(mode.split for mode in modes)
        return ClusterConfig(
            pair=self.pair,
            mode="split" if split else "aggregated",
            listen="127.0.0.1:0",
            context_workers=int(split),
            generation_workers=int(split),
            aggregated_workers=int(any(not mode.split for mode in modes)),
            dtype=self.dtype,
            max_batch=max(self.concurrency, 1),
            max_seq_len=self.max_seq_len,
            draft_tokens=self.draft_tokens,
            draft_vocab=self.draft_vocab,
            num_threads=os.cpu_count() or 1,
            # Modes are compared by what every one of them computes and ships itself.
            prefix_cache=False,
            local_prefill_tokens=0,
            without_context="refuse",
        )
