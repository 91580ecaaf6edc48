"""What an evaluation counts, and what it refuses to pass."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from cluster.gates import GateSettings, failures
from cluster.prompt_sets import (
    BUILTIN_SETS,
    builtin_prompts,
    builtin_set,
    file_prompts,
    final_number,
    task_prompts,
)
from cluster.report import Answer, ModeReport, accuracy_threshold, summarize, tokens_sha256
from workers.errors import InvalidRequest


def answer(kind: str = "chat", tokens: tuple[int, ...] = (1, 2, 3, 4, 5), **changes: object) -> Answer:
    """Five tokens: the first from prefill, then steps of 3 and 1 tokens with two drafts each."""
    values: dict[str, object] = {
        "kind": kind,
        "token_ids": tokens,
        "text": "",
        "decode_steps": 2,
        "decode_tokens": 4,
        "decode_steps_first8": 1,
        "decode_tokens_first8": 3,
        "accepted_by_position": (1, 1, 0),
        "drafted_by_position": (2, 2, 0),
        "prompt_tokens_computed_on_generation": 0,
        "kv_bytes_target": 100,
        "kv_bytes_draft": 10,
        "time_to_first_token_s": 0.5,
        "token_gaps_s": (0.1, 0.1, 0.1, 0.3),
    }
    return Answer(**{**values, **changes})  # type: ignore[arg-type]


def report(**changes: object) -> ModeReport:
    base = summarize([answer(), answer("paragraphs")], wall_s=2.0, pages_leaked=0, slots_leaked=0)
    return msgspec.structs.replace(base, **changes)


def test_acceptance_length_counts_decode_steps_alone() -> None:
    figures = report()
    assert figures.acceptance_length == 2.0
    assert figures.acceptance_length_first8 == 3.0
    assert figures.output_tokens == 10
    assert figures.tokens_per_s == 5.0
    assert (figures.kv_bytes_target, figures.kv_bytes_draft) == (200, 20)
    assert figures.ttft_ms_p50 == 500.0
    assert figures.itl_ms_p50 == 100.0
    assert figures.acceptance_by_kind == {"chat": [2.0, 3.0], "paragraphs": [2.0, 3.0]}


def test_acceptance_by_position_leaves_out_positions_never_drafted() -> None:
    assert report().acceptance_by_position == [0.5, 0.5]


def test_target_only_has_an_acceptance_length_of_one() -> None:
    plain = answer(decode_steps=4, decode_tokens=4, accepted_by_position=(), drafted_by_position=())
    assert summarize([plain], 1.0, 0, 0).acceptance_length == 1.0


def test_the_digest_sees_order_and_borders_of_answers() -> None:
    digests = {tokens_sha256(outputs) for outputs in ([[1, 2], [3]], [[1], [2, 3]], [[3], [1, 2]])}
    assert len(digests) == 3


def test_the_accuracy_threshold_is_the_published_one() -> None:
    """GSM8K's 1,319 questions at a reference of 96.5 %: TensorRT-LLM's suite prints 93.297."""
    assert accuracy_threshold(96.5, 1319) == pytest.approx(93.297, abs=1e-3)


EXACT = GateSettings(exact_tokens=True, sequential=True)


def test_equal_modes_pass_every_gate() -> None:
    assert failures({"target_only": report(), "aggregated": report(), "split": report()}, EXACT) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens_sha256": "other"}, "tokens differ"),
        ({"decode_steps": 5}, "5 decode steps"),
        ({"acceptance_length": 1.9999}, "1.9999"),
        ({"prompt_tokens_computed_on_generation": 7}, "7 prompt tokens"),
        ({"kv_bytes_draft": 0}, "no draft KV"),
        ({"pages_leaked": 1}, "1 pages"),
        ({"slots_leaked": 2}, "2 slots"),
    ],
)
def test_each_fault_of_split_fails_a_gate_that_names_it(changes: dict[str, object], says: str) -> None:
    found = failures({"aggregated": report(), "split": report(**changes)}, EXACT)
    assert len(found) == 1
    assert says in found[0]


def test_batched_runs_allow_two_tenths_of_a_per_cent_in_acceptance_length() -> None:
    batched = GateSettings(exact_tokens=True, sequential=False)
    near, far = report(acceptance_length=1.997), report(acceptance_length=1.995)
    assert failures({"aggregated": report(), "split": near}, batched) == []
    assert len(failures({"aggregated": report(), "split": far}, batched)) == 1


def test_the_acceptance_gate_bites_drafting_modes_alone() -> None:
    settings = GateSettings(exact_tokens=True, sequential=True, min_al=2.5)
    modes = {"target_only": report(), "split": report(), "split_empty_context": report()}
    assert failures(modes, settings) == ["split: AL 2.000 is under --min-al 2.5"]


def test_the_accuracy_gate_compares_with_target_only_unless_told() -> None:
    reports = {"target_only": report(accuracy=90.0), "split": report(accuracy=50.0)}
    settings = GateSettings(exact_tokens=False, sequential=False, num_questions=100)
    assert failures(reports, settings) == [
        "split: accuracy 50.00 % is under 78.37 % (reference 90.00 %)",
    ]
    lenient = GateSettings(exact_tokens=False, sequential=False, num_questions=100, reference_accuracy=55.0)
    assert failures(reports, lenient) == []


def test_builtin_prompts_come_evenly_from_the_four_sets() -> None:
    kinds = [prompt.kind for prompt in builtin_prompts(8)]
    assert kinds == [*BUILTIN_SETS, *BUILTIN_SETS]
    with pytest.raises(InvalidRequest, match="the built-in sets hold"):
        builtin_prompts(10_000)
    with pytest.raises(InvalidRequest, match="at least 1"):
        builtin_prompts(0)


@pytest.mark.parametrize("name", BUILTIN_SETS)
def test_each_builtin_set_holds_64_different_prompts(name: str) -> None:
    assert len({prompt.text for prompt in builtin_set(name)}) >= 64


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so she has 1,234.50 left", "1234.50"),
        ("3 + 4 = 7.", "7"),
        ("#### -12", "-12"),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text_is_its_answer(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


def test_files_that_are_no_prompts_name_line_and_field(tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "ok"}\nnot json\n')
    with pytest.raises(InvalidRequest, match=r"broken\.jsonl:2: not JSON"):
        file_prompts(broken)
    broken.write_text('{"text": "ok"}\n')
    with pytest.raises(InvalidRequest, match=r":1: needs a non-empty `prompt`"):
        file_prompts(broken)
    with pytest.raises(InvalidRequest, match="cannot read"):
        file_prompts(tmp_path / "absent.jsonl")


def test_task_lines_carry_the_expected_number(tmp_path: Path) -> None:
    task = tmp_path / "task.jsonl"
    task.write_text(json.dumps({"question": "1+1?", "answer": "It is two.\n#### 2"}) + "\n")
    assert [(p.text, p.answer) for p in task_prompts(task)] == [("1+1?", Decimal(2))]
    task.write_text(json.dumps({"question": "1+1?", "answer": "two"}) + "\n")
    with pytest.raises(InvalidRequest, match="ending in a number"):
        task_prompts(task)
