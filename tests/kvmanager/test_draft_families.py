"""Which drafters may keep KV apart from the target's, row by row."""

from __future__ import annotations

import pytest

from kvmanager.errors import LayoutRefused
from kvmanager.families import DRAFT_KV_FORMS, ServingMode, require_form
from kvmanager.layout import DraftKv

MODES: list[ServingMode] = ["aggregated", "split", "attention_dp"]
ROWS: list[tuple[str, DraftKv, bool]] = [
    ("dflash", "mirrored", True),
    ("dflash", "unified", True),
    ("dflash2", "mirrored", True),
    ("dflash2", "unified", True),
    ("dspark", "mirrored", True),
    ("dspark", "unified", True),
    ("dspark_embedded", "mirrored", True),
    ("dspark_embedded", "unified", False),
    ("mtp", "mirrored", False),
    ("mtp", "unified", True),
    ("eagle3", "mirrored", False),
    ("eagle3", "unified", True),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "draft_kv", "allowed"), ROWS)
def test_each_row_of_the_table(family: str, mode: ServingMode, draft_kv: DraftKv, allowed: bool) -> None:
    if allowed:
        require_form(family, mode, draft_kv)
        return
    other = "mirrored" if draft_kv == "unified" else "unified"
    with pytest.raises(LayoutRefused, match=rf"a {family} drafter .* {mode} mode: use draft_kv = {other}"):
        require_form(family, mode, draft_kv)


def test_every_family_of_the_table_has_its_rows_here() -> None:
    assert {family for family, _, _ in ROWS} == set(DRAFT_KV_FORMS)
    assert all(set(modes) == set(MODES) for modes in DRAFT_KV_FORMS.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("draft_kv", ["mirrored", "unified"])
def test_an_unknown_family_is_refused_by_name(mode: ServingMode, draft_kv: DraftKv) -> None:
    with pytest.raises(LayoutRefused, match=r"'medusa' .* dflash, dflash2, dspark"):
        require_form("medusa", mode, draft_kv)
