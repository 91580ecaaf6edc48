"""Held-out prompts stay out of training, and the shipped sets are what they promise."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import pytest

from drafter.training import banks
from drafter.training.prompts import (
    FAMILIES,
    FROM_TEMPLATES,
    HeldOut,
    choose_held_out,
    read_prompts,
    shipped_prompts,
    spread_out,
    training_prompts,
    write_prompts,
)

_SHIPPED = Path(__file__).parents[3] / "cluster" / "prompts"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_shipped_set_has_64_different_prompts(family: str) -> None:
    prompts = read_prompts(_SHIPPED / f"{family}.jsonl")
    assert len(prompts) >= 64
    assert len({prompt.strip().lower() for prompt in prompts}) == len(prompts)
    assert all(prompt.strip() for prompt in prompts)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) & set(FROM_TEMPLATES)))
def test_shipped_template_sets_are_what_the_generator_chooses(family: str) -> None:
    assert choose_held_out(family, 64) == read_prompts(_SHIPPED / f"{family}.jsonl")


def test_a_held_out_prompt_is_recognised_with_other_numbers_case_and_punctuation() -> None:
    held_out = HeldOut(["Maya has 12 apples. Omar gives Maya 3 more, how many are there?"])
    assert held_out.touches("maya has 40 apples! Omar gives Maya 7 more; how many are there?")
    assert held_out.touches(
        "Please solve: Maya has 12 apples. Omar gives Maya 3 more, how many are there? Thanks."
    )
    assert not held_out.touches("Lena has 12 pencils. Felix gives Lena 3 more, how many are there?")


def test_training_prompts_never_touch_the_shipped_sets() -> None:
    shipped = shipped_prompts(_SHIPPED)
    held_out = HeldOut(text for texts in shipped.values() for text in texts)
    exact = {text for texts in shipped.values() for text in texts}
    for family in FROM_TEMPLATES:
        drawn = list(training_prompts(family, 300, 1, held_out))
        assert len(drawn) == 300
        assert not exact & set(drawn)
        assert not any(held_out.touches(text) for text in drawn)


def test_the_filter_has_something_to_filter() -> None:
    held_out = HeldOut(read_prompts(_SHIPPED / "word_problems.jsonl"))
    rng = Random("word_problems held out")  # the seed of the shipped set
    redrawn = [FROM_TEMPLATES["word_problems"](rng) for _ in range(100)]
    assert sum(held_out.touches(text) for text in redrawn) >= 64


def test_spread_out_takes_no_two_near_prompts_and_says_when_there_are_too_few() -> None:
    assert spread_out(["What is 3 plus 4 here?", "What is 5 plus 6 here?", "Where is it?"], 2) == [
        "What is 3 plus 4 here?",
        "Where is it?",
    ]
    with pytest.raises(ValueError, match="only 1"):
        spread_out(["one two"] * 3, 2)


def test_prompt_files_keep_line_feeds_and_accents(tmp_path: Path) -> None:
    prompts = ["two\nlines", "Žluťoučký kůň"]
    write_prompts(tmp_path / "sets" / "a.jsonl", prompts)
    assert read_prompts(tmp_path / "sets" / "a.jsonl") == prompts


def test_templates_leave_no_placeholder_and_vary() -> None:
    for family, make in FROM_TEMPLATES.items():
        rng = Random(7)
        texts = list(islice((make(rng) for _ in iter(int, 1)), 400))
        assert not any("{" in text or "}" in text for text in texts), family
        assert len(set(texts)) > 350, family


def test_banks_hold_no_duplicates() -> None:
    for name in (n for n in dir(banks) if n.isupper()):
        words = getattr(banks, name)
        assert len(words) == len(set(words)), name
