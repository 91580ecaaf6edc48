"""The bench of short prompts as a CPU can run it."""

from __future__ import annotations

import pytest

from tests.bench.gpu import short_prompts, suite


def test_both_ways_are_measured_at_the_same_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prompts", "3", "--tokens", "5", "9", "--packed", "16", "--repeats", "1"]
    short_prompts.main(["--device", "cpu", "--tiny", *sizes])
    figures = suite.read_figures(capsys.readouterr().out.splitlines())
    ways = {(figure.line, figure.x) for figure in figures}
    assert ways == {(way, tokens) for way in ("own steps", "packed") for tokens in (5, 9)}
    assert len(figures) == 8
    assert all(figure.value > 0 for figure in figures)
