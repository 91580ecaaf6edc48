"""What is known of a pair's acceptance: the bounds that follow from it, their gates, and the file they lie in."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cluster.gates import GateSettings, failing
from cluster.prompt_sets import BUILTIN_SETS, EvalPrompt, builtin_prompts
from cluster.reference import FILE_NAME, GATED_REQUESTS, Reference, bounds, measure
from cluster.reference_files import facts_of, reference_of, write_reference
from cluster.report import Answer, summarize
from workers.errors import InvalidRequest
from workers.pairs import resolve_pair

POSITIONS = 3


def simulated(kind: str, chance: random.Random, accepts: float, tokens: int = 60) -> Answer:
    """An answer whose drafts are each accepted with this probability."""
    accepted, drafted, emitted, per_step = [0] * POSITIONS, [0] * POSITIONS, 0, []
    while emitted < tokens:
        run = next((at for at in range(POSITIONS) if chance.random() > accepts), POSITIONS)
        kept = min(run + 1, tokens - emitted)
        for at in range(POSITIONS):
            drafted[at] += 1
            accepted[at] += at < run
        emitted += kept
        per_step.append(kept)
    return Answer(
        kind=kind,
        token_ids=(1,) * (tokens + 1),
        text="",
        decode_steps=len(per_step),
        decode_tokens=emitted,
        decode_steps_first8=len(per_step[:8]),
        decode_tokens_first8=sum(per_step[:8]),
        accepted_by_position=tuple(accepted),
        drafted_by_position=tuple(drafted),
        prompt_tokens_computed_on_generation=0,
        kv_bytes_target=1,
        kv_bytes_draft=1,
        time_to_first_token_s=0.1,
        token_gaps_s=(),
        step_tokens=tuple(per_step),
    )


def several(chance: random.Random, count: int, chat: float = 0.7, questions: float = 0.5) -> list[Answer]:
    return [simulated("chat", chance, chat) for _ in range(count)] + [
        simulated("questions", chance, questions) for _ in range(count)
    ]


def prompts_of(answers: list[Answer], name: str = "") -> list[EvalPrompt]:
    """A prompt for each answer; those of different names have no text in common."""
    return [EvalPrompt(answer.kind, f"{name} {number}") for number, answer in enumerate(answers)]


def known(answers: list[Answer], **changes: object) -> Reference:
    facts: dict[str, object] = {
        "pair": "some",
        "family": "dflash",
        "drafter": "d1",
        "prompt_form": "chat template",
        "max_tokens": 61,
    }
    return measure(prompts_of(answers), answers, **{**facts, **changes})  # type: ignore[arg-type]


def gates(answers: list[Answer], reference: Reference, name: str = "others") -> set[str]:
    settings = GateSettings(
        exact_tokens=True, sequential=True, reference=bounds(reference, prompts_of(answers, name))
    )
    return set(failing({"split": summarize(answers, 1.0, 0, 0)}, settings))


def test_a_mix_of_sets_is_expected_to_reach_its_own_acceptance() -> None:
    answers = several(random.Random(1), 64)
    reference = known(answers)
    chat = [answer for answer in answers if answer.kind == "chat"]
    for part in (answers, chat, [*chat, *answers[64:80]]):
        expected = bounds(reference, prompts_of(part))
        assert expected is not None
        report = summarize(part, 1.0, 0, 0)
        assert expected.length.least < expected.length.expected
        assert expected.length.expected == pytest.approx(report.acceptance_length, rel=0.02)
        assert expected.length_first8.expected == pytest.approx(report.acceptance_length_first8, rel=0.02)
        shares = [bound.expected for bound in expected.positions]
        assert shares == pytest.approx(report.acceptance_by_position, rel=0.04)


def test_the_figures_for_64_requests_of_each_set_are_written_out() -> None:
    reference = known(several(random.Random(2), 64))
    alone = bounds(reference, [EvalPrompt("chat", "a")] * GATED_REQUESTS)
    both = [EvalPrompt("chat", "a"), EvalPrompt("questions", "b")]
    even = bounds(reference, both * (GATED_REQUESTS // 2))
    assert alone is not None
    assert even is not None
    chat = reference.kinds["chat"]
    assert (chat.ref_al, chat.min_al) == pytest.approx((alone.length.expected, alone.length.least), abs=1e-4)
    assert (reference.ref_al, reference.min_al) == pytest.approx(
        (even.length.expected, even.length.least), abs=1e-4
    )


def test_sound_drafters_pass_and_hardly_ever_fail() -> None:
    chance = random.Random(3)
    failed = 0
    for _ in range(100):
        reference = known(several(chance, 32))
        failed += bool(gates(several(chance, 16), reference))
    assert failed <= 2  # 0.3 expected


def test_a_drafter_that_lost_some_of_its_acceptance_fails() -> None:
    chance = random.Random(4)
    reference = known(several(chance, 64))
    assert gates(several(chance, 16, chat=0.5, questions=0.35), reference) == {
        "AL",
        "AL, first 8 steps",
        "AL by position",
    }


def test_a_fault_of_the_last_position_alone_fails_by_position() -> None:
    chance = random.Random(5)
    reference = known(several(chance, 64))
    answers = [
        replace(answer, accepted_by_position=(*answer.accepted_by_position[:2], 0))
        for answer in several(chance, 32)
    ]
    assert gates(answers, reference) == {"AL by position"}


def test_a_small_loss_on_the_same_prompts_fails_where_it_hides_among_others() -> None:
    answers = several(random.Random(5), 64)
    reference = known(answers)
    slower = [
        replace(answer, decode_steps=answer.decode_steps + number % 2)
        for number, answer in enumerate(answers)
    ]
    one_more = [replace(answers[0], decode_steps=answers[0].decode_steps + 1), *answers[1:]]
    assert gates(answers, reference, name="") == set()
    assert gates(one_more, reference, name="") == set()
    assert gates(slower, reference, name="") == {"AL, same prompts"}
    assert gates(slower, reference, name="others") == set()


def test_fewer_requests_must_reach_less() -> None:
    reference = known(several(random.Random(6), 64))
    leasts = []
    for count in (4, 16, 64):
        found = bounds(reference, [EvalPrompt("chat", "a")] * count)
        assert found is not None
        leasts.append(found.length.least)
    assert leasts == sorted(leasts)


def test_prompts_of_a_set_that_is_not_known_have_no_bounds() -> None:
    reference = known(several(random.Random(7), 16))
    assert bounds(reference, [EvalPrompt("chat", "a"), EvalPrompt("poems", "b")]) is None
    assert bounds(reference, []) is None


def test_too_few_answers_make_no_reference() -> None:
    with pytest.raises(ValueError, match="a reference needs 16"):
        known(several(random.Random(8), 15))


def own_pair(directory: Path) -> str:
    """The pair tiny under a path of its own."""
    tiny = resolve_pair("tiny")
    assert tiny.drafter_path is not None
    shutil.copytree(tiny.drafter_path, directory / "drafter", ignore=shutil.ignore_patterns(FILE_NAME))
    return f"{tiny.target_path}:{directory / 'drafter'}"


def test_a_reference_is_found_for_its_answer_length_alone_and_replaced_in_its_place(tmp_path: Path) -> None:
    pair = own_pair(tmp_path)
    assert reference_of(pair, 61) is None
    family, drafter = facts_of(pair)
    answers = several(random.Random(9), 16)
    first = known(answers, pair=pair, family=family, drafter=drafter)
    longer = known(answers, pair=pair, family=family, drafter=drafter, max_tokens=320)
    for reference in (first, longer):
        assert write_reference(reference) == tmp_path / "drafter" / FILE_NAME
    assert reference_of(pair, 61) == first
    assert reference_of(pair, 320) == longer
    assert reference_of(pair, 32) is None
    again = known(several(random.Random(10), 16), pair=pair, family=family, drafter=drafter)
    write_reference(again)
    assert reference_of(pair, 61) == again
    assert reference_of(pair, 320) == longer


def test_a_reference_does_not_make_the_drafter_another_one(tmp_path: Path) -> None:
    pair = own_pair(tmp_path)
    before = facts_of(pair)
    write_reference(known(several(random.Random(11), 16), pair=pair, family=before[0]))
    assert facts_of(pair) == before


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    pair = own_pair(tmp_path)
    (tmp_path / "drafter" / FILE_NAME).write_bytes(msgspec.json.encode([{"pair": "some"}]))
    with pytest.raises(InvalidRequest, match=r"reference_al\.json is no reference file"):
        reference_of(pair, 61)


def test_the_shipped_reference_of_tiny_is_of_the_shipped_drafter() -> None:
    reference = reference_of("tiny", 64)
    assert reference is not None
    assert (reference.pair, reference.family, reference.drafter) == ("tiny", *facts_of("tiny"))
    assert set(reference.kinds) == set(BUILTIN_SETS)
    assert bounds(reference, builtin_prompts(64)) is not None
