"""The suite's own part: which lines are figures, what goes into which plot, and that nothing is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.gpu import suite
from tests.bench.gpu.figures import report
from tests.bench.gpu.suite import Figure, Ran


def test_what_a_bench_reports_is_what_the_suite_reads(capsys: pytest.CaptureFixture[str]) -> None:
    report("KV transfer", "port", 294.0, "GB/s", 392.0)
    print("a table for people")
    print('{"unlike": "a figure"}')
    report("ITL: split", 4.0, 0.0123456789, "s")
    assert suite.read_figures(capsys.readouterr().out.splitlines()) == (
        Figure("KV transfer", "port", 294.0, "GB/s", 392.0, 0.75),
        Figure("ITL: split", 4.0, 0.0123457, "s"),
    )


def test_figures_of_one_name_share_a_plot_and_the_rest_of_the_name_is_the_line() -> None:
    figures = [Figure(f"ITL: {line}", rate, 1.0, "s") for line in ("split", "aggregated") for rate in (1, 2)]
    plots = suite.by_plot([*figures, Figure("KV transfer", "port", 1.0, "GB/s")])
    assert list(plots) == ["ITL", "KV transfer"]
    assert [figure.line for figure in plots["ITL"]] == ["split", "split", "aggregated", "aggregated"]
    assert suite.file_name("KV transfer, 8192 tokens") == "kv-transfer-8192-tokens.png"


def test_a_run_is_read_back_as_it_was_saved_and_a_failed_bench_stands_in_the_table(tmp_path: Path) -> None:
    ran = [
        Ran("transfer", 3.0, 0, (Figure("KV transfer", "port", 294.0, "GB/s", 392.0, 0.75),)),
        Ran("load", 1.0, 1, (), "out of memory"),
    ]
    suite.save(ran, tmp_path / "figures.json")
    assert suite.load(tmp_path / "figures.json") == ran
    text = suite.table(ran)
    assert "294 GB/s" in text
    assert "0.750" in text
    assert "ended with status 1" in text


def test_every_module_of_the_package_is_a_bench_or_known_not_to_be() -> None:
    names = suite.benches()
    assert names[0] == "transfer"
    for name in names:
        source = (Path(suite.__file__).parent / f"{name}.py").read_text()
        assert "report(" in source or '"figure"' in source, name
        assert "def main(" in source, name


def test_a_bench_that_dies_is_a_status_and_its_figures_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    line = json.dumps({"figure": "f", "x": 1, "value": 2.0, "unit": "s", "limit": None, "ratio": None})
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho '{line}'\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(suite.sys, "executable", str(fake))
    ran = suite.run("transfer", [], timeout_s=10)
    assert (ran.status, ran.figures) == (3, (Figure("f", 1, 2.0, "s"),))
