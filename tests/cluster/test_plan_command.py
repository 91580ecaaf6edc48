"""`slipstream plan` as a user calls it: files in, figures and an exit status out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cluster.cli import cli

TARGET = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
DRAFTER = {
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
    "block_size": 8,
    "max_position_embeddings": 1_048_576,
}
PUBLISHED = ["--max-seq-len", "997696", "--max-batch", "8", "--tp", "8"]


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[str]:
    """--model and --drafter, the one as a directory and the other as a file."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(TARGET))
    (tmp_path / "drafter.json").write_text(json.dumps(DRAFTER))
    return ["--model", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter.json")]


def plan(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli, ["plan", *arguments, "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_the_published_case_starts_and_shows_the_published_figures(checkpoints: list[str]) -> None:
    status, shown = plan(*checkpoints, *PUBLISHED, "--memory-gib", "80")
    assert status == 0
    assert shown["starts"] is True
    assert shown["drafter"]["bytes_per_token"] == 2_560
    assert round(shown["dense_arena_gib"], 1) == 21.4
    assert shown["total_bytes"] <= 80 * 2**30
    assert shown["tokens_that_fit"] >= 997_696


def test_attention_dp_shows_unsharded_heads(checkpoints: list[str]) -> None:
    _, shown = plan(*checkpoints, *PUBLISHED, "--attention-dp", "--memory-gib", "400")
    assert shown["drafter"]["bytes_per_token"] == 20_480
    assert shown["target"]["kv_heads_per_rank"] == 8


def test_too_little_memory_exits_with_1_and_the_reason(checkpoints: list[str]) -> None:
    status, shown = plan(*checkpoints, *PUBLISHED, "--memory-gib", "2")
    assert status == 1
    assert shown["starts"] is False
    assert "max_seq_len 997696" in shown["reason"]
    assert "would fit" in shown["reason"]


def test_the_table_says_the_same_in_words(checkpoints: list[str]) -> None:
    shown = CliRunner().invoke(cli, ["plan", *checkpoints, *PUBLISHED, "--memory-gib", "80"]).stdout
    assert "2,560" in shown
    assert "21.41 GiB" in shown
    assert "starts" in shown
    refused = CliRunner().invoke(cli, ["plan", *checkpoints, *PUBLISHED, "--memory-gib", "2"]).stdout
    assert "does not start" in refused


def embedding_target(directory: Path, stages: int) -> Path:
    """A target's directory of which nothing but the config and the tensors' names is there."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TARGET | {"dspark_block_size": 7}))
    names = [f"mtp.{stage}.input_layernorm.weight" for stage in range(stages)]
    header = json.dumps(
        {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    ).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory


def test_a_drafter_inside_the_target_is_counted_by_its_window(tmp_path: Path) -> None:
    target = embedding_target(tmp_path / "target", stages=3)
    arguments = ["--model", str(target), "--max-seq-len", "65536", "--max-batch", "8", "--memory-gib", "40"]
    status, shown = plan(*arguments)
    assert status == 0
    drafter = shown["drafter"]
    assert (drafter["layers"], drafter["window"], shown["target"]["window"]) == (3, 128, None)
    # 128 of context and 8 of look-ahead in pages of 16: 10 for each of 8 requests, however long they are.
    assert drafter["pages"] == 80
    assert drafter["pool_bytes"] == 81 * 16 * drafter["bytes_per_token"]
    assert shown["bytes_per_token"] == shown["target"]["bytes_per_token"]
    assert "a window of 128 positions" in " ".join(shown["notes"])


def test_a_config_alone_does_not_tell_how_many_layers_a_drafter_inside_has(tmp_path: Path) -> None:
    file = embedding_target(tmp_path / "target", stages=3) / "config.json"
    arguments = ["--model", str(file), "--max-seq-len", "10", "--max-batch", "1", "--memory-gib", "1"]
    result = CliRunner().invoke(cli, ["plan", *arguments])
    assert result.exit_code == 1
    assert "give the checkpoint's directory" in result.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot read"), ("{", "is not JSON"), ("[]", "expected an object"), ("{}", "num_hidden_layers")],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, says: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    result = CliRunner().invoke(
        cli, ["plan", "--model", str(file), "--max-seq-len", "10", "--max-batch", "1", "--memory-gib", "1"]
    )
    assert result.exit_code == 1
    assert says in result.stderr
    assert str(file) in result.stderr


def test_planning_loads_neither_torch_nor_ray() -> None:
    code = (
        "import sys, cluster.plan_command; "
        "print([name for name in ('torch', 'ray', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "intermediate_size": 6144,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
}
SMALL = ["--max-seq-len", "4096", "--max-batch", "4", "--memory-gib", "8"]


def test_weights_of_a_mixture_count_its_experts_as_they_are_shared(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    model = ["--model", str(tmp_path), *SMALL]
    _, alone = plan(*model)
    assert alone["target_weights"]["total_bytes"] == 2 * 30_532_122_624  # as published
    _, inside = plan(*model, "--tp", "4")
    _, whole = plan(*model, "--tp", "4", "--expert-parallel")
    _, data_parallel = plan(*model, "--tp", "4", "--expert-parallel", "--attention-dp")
    for shared in (inside, whole, data_parallel):
        assert shared["target_weights"]["expert_bytes"] == alone["target_weights"]["expert_bytes"] // 4
    assert inside["target_weights"] == whole["target_weights"]
    assert data_parallel["target_weights"]["total_bytes"] > whole["target_weights"]["total_bytes"]
    shown = CliRunner().invoke(cli, ["plan", *model, "--tp", "4"]).stdout
    assert "beside this memory: 14.2" in shown


@pytest.mark.parametrize(
    ("changes", "options", "problem"),
    [
        ({}, ["--tp", "3"], "heads cannot be divided"),
        ({"moe_intermediate_size": 770}, ["--tp", "4"], "moe_intermediate_size"),
        ({"num_experts": 126}, ["--tp", "4", "--expert-parallel"], "num_experts"),
        ({"num_experts": None}, [], "num_local_experts"),
        ({"mlp_only_layers": 3}, [], "mlp_only_layers"),
        ({"num_attention_heads": 36}, ["--tp", "8"], "num_attention_heads"),
        ({"num_attention_heads": 36}, ["--tp", "8", "--attention-dp"], None),
        ({"vocab_size": 6}, ["--tensor-parallel-size", "4"], "vocab_size"),
    ],
)
def test_what_would_not_load_is_refused_by_field(
    changes: dict[str, Any], options: list[str], problem: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B | changes))
    result = CliRunner().invoke(cli, ["plan", "--model", str(tmp_path), *SMALL, *options])
    assert result.exit_code == (problem is not None)
    assert problem is None or problem in result.output
