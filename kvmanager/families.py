"""Where a drafter's KV may live, by family: in a pool of its own (`mirrored`) or in the target's pages (`unified`).

A standalone block drafter has its own geometry, and all that its pool needs of the target's is the same slots: both
forms serve it, on one worker, split in two roles, and with attention data parallelism, where a rank holds whole
requests and so their drafter's pages too. The layers of MTP and EAGLE are shaped like the target's, are written by
the target's own forward pass and are addressed by its page table: a second pool would have to be kept equal to the
first by hand, page for page, in every mode. They belong in the target's pages.

An embedded block drafter (`mtp.N` stages in the target's checkpoint) keeps a window of the context and frees what lies
behind it. The target keeps everything, so the two cannot share pages: a pool of its own, with the target's slots.

The table is the only place that knows. A family that is not in it is refused, not guessed.
"""

from __future__ import annotations

from typing import Literal

from kvmanager.errors import LayoutRefused
from kvmanager.layout import DraftKv

ServingMode = Literal["aggregated", "split", "attention_dp"]

_BOTH: frozenset[DraftKv] = frozenset({"mirrored", "unified"})
_MIRRORED: frozenset[DraftKv] = frozenset({"mirrored"})
_UNIFIED: frozenset[DraftKv] = frozenset({"unified"})


def _everywhere(forms: frozenset[DraftKv]) -> dict[ServingMode, frozenset[DraftKv]]:
    return {"aggregated": forms, "split": forms, "attention_dp": forms}


DRAFT_KV_FORMS: dict[str, dict[ServingMode, frozenset[DraftKv]]] = {
    "dflash": _everywhere(_BOTH),
    "dflash2": _everywhere(_BOTH),
    "dspark": _everywhere(_BOTH),
    "dspark_embedded": _everywhere(_MIRRORED),
    "mtp": _everywhere(_UNIFIED),
    "eagle3": _everywhere(_UNIFIED),
}


def require_form(family: str, mode: ServingMode, draft_kv: DraftKv) -> None:
    """Raise LayoutRefused unless drafters of `family` may keep their KV in the form `draft_kv` in this mode."""
    forms = DRAFT_KV_FORMS.get(family)
    if forms is None:
        raise LayoutRefused(
            f"where a {family!r} drafter keeps its KV is not known: families are {', '.join(DRAFT_KV_FORMS)}"
        )
    if draft_kv not in forms[mode]:
        allowed = " or ".join(sorted(forms[mode]))
        raise LayoutRefused(
            f"a {family} drafter cannot keep its KV {draft_kv} in {mode} mode: use draft_kv = {allowed}"
        )
