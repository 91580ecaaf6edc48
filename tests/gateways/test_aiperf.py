"""aiperf, NVIDIA's load client, against a real cluster: every chunk of every answer is read by somebody else's code.

It counts tokens by itself, checks the shape of each event, and fails a request for what it does not expect.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.client import Client
from tests.bench.hf_directory import write_tokenizer
from tests.cluster.parts import held_at
from tests.gateways.processes import ROOT, Served
from workers.pairs import resolve_pair

pytestmark = [pytest.mark.gateways, pytest.mark.ray, pytest.mark.timeout(900)]

LOAD = Path(os.environ.get("SLIPSTREAM_LOAD", ROOT / ".venv-load"))
NUM_REQUESTS = 60
CONCURRENCY = 6
OUTPUT_TOKENS = 24


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served('pair = "smollm2"\nmode = "split"\nmax_seq_len = 1024\n') as process:
        yield process


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf_finds_every_answer_whole(served: Served, tmp_path: Path, endpoint: str) -> None:
    with Client(served.address) as client:
        model = client.model().model
    command = [
        *(str(LOAD / "bin" / "aiperf"), "profile", "--model", model, "--url", served.http),
        *("--endpoint-type", endpoint, "--streaming", "--use-server-token-count"),
        *("--tokenizer", str(write_tokenizer(resolve_pair("smollm2").target_path, tmp_path / "tokenizer"))),
        *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", str(OUTPUT_TOKENS)),
        *("--extra-inputs", "ignore_eos:true", "--concurrency", str(CONCURRENCY)),
        *("--request-count", str(NUM_REQUESTS), "--ui", "none"),
        *("--output-artifact-dir", str(tmp_path / "found")),
    ]
    # With these set it does not take a tokenizer from a path.
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    env = kept | {"HOME": str(tmp_path)}
    ran = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    [path] = (tmp_path / "found").rglob("profile_export_aiperf.json")
    figures: dict[str, Any] = json.loads(path.read_text())
    assert figures["request_count"]["avg"] == NUM_REQUESTS
    assert not figures.get("error_request_count")
    assert figures["output_sequence_length"]["min"] == OUTPUT_TOKENS
    names = ("time_to_first_token", "inter_token_latency", "output_token_throughput")
    print(endpoint, {name: (figures[name]["avg"], figures[name]["unit"]) for name in names})
    assert held_at(served.address) == []
