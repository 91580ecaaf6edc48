"""Sums over NCCL, on both of two GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.bench.gpu import exchange, suite

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
TOKENS = (1, 3, 16, 700)


def test_sums_are_those_of_their_parts_launched_and_captured(capsys: pytest.CaptureFixture[str]) -> None:
    """The bench raises for others."""
    for hidden in (7, 4096):
        exchange.main(["--tokens", *map(str, TOKENS), "--hidden", str(hidden)])
        figures = suite.read_figures(capsys.readouterr().out.splitlines())
        assert {figure.x for figure in figures if figure.figure.startswith("sum")} == set(TOKENS)
