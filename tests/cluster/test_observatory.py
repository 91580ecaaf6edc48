"""The page of an evaluation: every picture with its figures, readable by machines and people, and nothing to load."""

from __future__ import annotations

import random
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from cluster.charts import Chart, Known, Point, Series, bars, lines
from cluster.evaluate import Evaluation, EvaluationPlan
from cluster.measure import step_tokens
from cluster.modes import MODES, EvaluationCluster
from cluster.observatory import page
from cluster.prompt_sets import EvalPrompt
from cluster.reference import Reference
from cluster.report import Answer, summarize
from tests.cluster.test_reference import known, several
from workers.request import RequestStats

CHART = Chart(title="a <title>", description="what it shows", x_label="x, tokens", y_label="y, %")


def evaluation(failures: tuple[str, ...] = (), reference: Reference | None = None) -> Evaluation:
    chance = random.Random(1)
    answers: Mapping[str, list[Answer]] = {
        "aggregated": [replace(a, prompt_tokens=20 + n) for n, a in enumerate(several(chance, 16))]
    }
    answers = {**answers, "split": answers["aggregated"]}
    answers["split_empty_context"] = [replace(a, prompt_tokens=30) for a in several(chance, 16, 0.1, 0.1)]
    cluster = EvaluationCluster(
        pair="some <pair>", dtype="float32", draft_tokens="full", concurrency=8, max_seq_len=1024
    )
    plan = EvaluationPlan(
        cluster=cluster,
        modes=MODES,
        prompts=[EvalPrompt(answer.kind, "a prompt") for answer in answers["split"]],
        max_tokens=61,
        reference=reference,
    )
    reports = {mode: summarize(found, 1.0, 0, 0) for mode, found in answers.items()}
    return Evaluation(plan, reports, dict(answers), list(failures))


def svgs(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)]


def words(picture: ElementTree.Element) -> list[str]:
    return [part.strip() for part in picture.itertext() if part.strip()]


def test_the_page_has_every_picture_with_title_description_labels_and_figures() -> None:
    text = page(evaluation(reference=known(several(random.Random(2), 16))))
    pictures = svgs(text)
    assert len(pictures) == text.count("<details>") == 4
    for picture, label in zip(
        pictures,
        (
            "position in the draft block",
            "decode steps since the first token",
            "prompt length, tokens",
            "prompt set",
        ),
        strict=True,
    ):
        assert picture.get("role") == "img"
        assert [child.tag.rpartition("}")[2] for child in picture[:2]] == ["title", "desc"]
        said = words(picture)
        assert label in said
        assert "split" in said
        assert "split, drafter context not shipped (fault injected)" in said
    assert text.count("class='band'") == 1
    assert text.count("class='least'") == 1 + 2


def test_the_page_is_whole_html_that_loads_nothing() -> None:
    text = page(evaluation())
    opened: list[str] = []

    class Nesting(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "img", "iframe")
            assert not {"src", "href"} & {name for name, _ in attrs}
            if tag != "meta":
                opened.append(tag)

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            pass

        def handle_endtag(self, tag: str) -> None:
            assert opened.pop() == tag

    Nesting().feed(text)
    assert opened == []
    assert "url(" not in text
    assert "some &lt;pair&gt;" in text
    assert "prefers-color-scheme: dark" in text


def test_failed_gates_stand_on_the_page_and_so_does_a_missing_reference() -> None:
    assert "split: AL &lt; 2" in page(evaluation(("split: AL < 2",)))
    assert "no reference" in page(evaluation())
    with_reference = page(evaluation(reference=known(several(random.Random(2), 16))))
    assert "no reference" not in with_reference
    assert "Every gate passed" in with_reference


@pytest.mark.parametrize(
    "points", [(), (Point(1, 0.0),), (Point(1, 2.0), Point(40, 88.0)), (Point(0.5, 1e-4),)]
)
def test_lines_of_any_figures_stay_inside_the_picture(points: tuple[Point, ...]) -> None:
    one = Series("one", 0, points)
    picture = ElementTree.fromstring(lines(CHART, [one], Known(((1, 0.5, 0.25),))))
    _, _, width, height = (float(part) for part in picture.attrib["viewBox"].split())
    for element in picture.iter():
        for name in ("x", "x1", "x2"):
            assert 0 <= float(element.get(name, 0)) <= width
        for name in ("y", "y1", "y2"):
            assert 0 <= float(element.get(name, 0)) <= height


def test_a_drafter_of_which_nothing_is_accepted_has_its_pictures_too() -> None:
    nothing = [Series("one", 0, (Point(0, 0.0), Point(1, 0.0)))]
    assert svgs(lines(CHART, nothing) + bars(CHART, ["first", "second"], nothing))


def test_a_bar_is_as_high_as_its_figure() -> None:
    one, two = (
        Series("one", 0, (Point(0, 4.0), Point(1, 2.0))),
        Series("two", 1, (Point(0, 1.0), Point(1, 0.0))),
    )
    picture = ElementTree.fromstring(bars(CHART, ["first", "second"], [one, two]))
    drawn = [e for e in picture.iter() if e.tag.endswith("rect") and e.get("rx") == "2" and len(e)]
    heights = [float(e.attrib["height"]) for e in drawn]
    assert heights[1:] == pytest.approx([heights[0] / 2, heights[0] / 4, 0.0], abs=0.05)


def test_tokens_of_steps_are_known_only_where_each_message_was_a_step() -> None:
    stats = RequestStats(
        prompt_tokens=3,
        output_tokens=6,
        decode_steps=2,
        decode_tokens=5,
        decode_steps_first8=2,
        decode_tokens_first8=5,
        accepted_by_position=(),
        drafted_by_position=(),
        prompt_tokens_computed=0,
        kv_bytes_target=0,
        kv_bytes_draft=0,
    )
    assert step_tokens([1, 3, 2], stats) == (3, 2)
    assert step_tokens([1, 5], stats) == ()
    assert step_tokens([4, 2], stats) == ()
    assert step_tokens([], stats) == ()
