"""Faults of drafting leave every token right and fail a gate. `make faults` plants all of them; these are three."""

from __future__ import annotations

import pytest
import torch

from tests.faults.drafting import Laboratory, Pair, ask_aggregated, known_of, load_pair
from tests.faults.planted import ANOTHERS_CONTEXT, MISSING_CONTEXT, PLANTS, SWAPPED_SLOTS, Plant

REQUESTS = 4
STRANGER = PLANTS[-1]
BY_REFERENCE = {"AL", "AL, first 8 steps", "AL by position", "AL, same prompts"}


@pytest.fixture(scope="module")
def tiny() -> Pair:
    torch.set_num_threads(1)
    pair = load_pair("tiny")
    return Pair(pair.models, pair.prompts, pair.token_ids, max_tokens=24)


@pytest.fixture(scope="module")
def laboratory(tiny: Pair) -> Laboratory:
    answers = ask_aggregated(tiny, tiny.models, 64)
    return Laboratory(tiny, known_of(tiny, answers, range(64)), REQUESTS)


@pytest.mark.parametrize(
    ("plant", "gates"),
    [
        (SWAPPED_SLOTS, BY_REFERENCE),
        (MISSING_CONTEXT, BY_REFERENCE | {"split = aggregated"}),
        (ANOTHERS_CONTEXT, BY_REFERENCE | {"split = aggregated"}),
    ],
    ids=lambda part: part.name if isinstance(part, Plant) else "",
)
def test_a_fault_of_drafting_changes_no_token_and_fails_gates(
    laboratory: Laboratory, plant: Plant, gates: set[str]
) -> None:
    row = laboratory.run(plant)
    assert row.tokens_right
    assert set(row.gates) == gates
    assert row.al < 0.6 * row.al_clean


def test_a_drafter_of_another_target_on_one_side_is_refused_at_the_handshake(laboratory: Laboratory) -> None:
    row = laboratory.run(STRANGER)
    assert STRANGER.one_sided
    assert set(row.gates) == {"handshake"}
    assert any("draft model" in said for said in row.says)
