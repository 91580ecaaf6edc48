from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.workers.tiny_checkpoints import config_of, random_tensors, write_directory, write_gguf
from workers.models.errors import CheckpointError
from workers.models.load import load_config, load_decoder


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(path, torch.float32)
    return str(caught.value)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    message = refused(tmp_path / "nowhere")
    assert "nowhere" in message
    assert "does not exist" in message


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    config = config_of("qwen3")
    tensors = random_tensors(config)
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    assert "missing tensor model.layers.1.self_attn.q_norm.weight" in refused(
        write_directory(tmp_path, config, tensors)
    )


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    config = config_of("llama")
    tensors = {name: tensor for name, tensor in random_tensors(config).items() if "mlp" not in name}
    assert "and 5 more" in refused(write_directory(tmp_path, config, tensors))


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    config = config_of("llama")
    tensors = random_tensors(config)
    del tensors["lm_head.weight"]
    assert "missing tensor lm_head.weight" in refused(write_directory(tmp_path, config, tensors))


def test_the_wrong_vocabulary_is_told_with_both_shapes(tmp_path: Path) -> None:
    tensors = random_tensors(config_of("llama"))
    message = refused(write_directory(tmp_path, config_of("llama", vocab_size=70), tensors))
    assert "model.embed_tokens.weight: expected shape [70, 64], found [61, 64]" in message


def test_a_gguf_file_whose_tokens_do_not_fit_its_embedding_is_refused(tmp_path: Path) -> None:
    config = config_of("llama")
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), tokens=["a", "b"])
    message = refused(path)
    assert "61 rows" in message
    assert "2 tokens" in message


def test_gguf_errors_use_the_names_of_the_file(tmp_path: Path) -> None:
    config = config_of("llama")
    tensors = random_tensors(config)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    assert "missing tensor blk.2.ffn_up.weight" in refused(write_gguf(tmp_path / "m.gguf", config, tensors))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "supported: LlamaForCausalLM, Qwen2ForCausalLM, Qwen3For",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be an integer, not '3'"),
        ({"num_hidden_layers": 0}, "num_layers must be positive, not 0"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 15}, "head_dim must be positive and even, not 15"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs the field 'factor'"),
    ],
)
def test_a_config_that_is_not_supported_names_the_field(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    message = refused(
        write_directory(tmp_path, config_of("llama") | changes, random_tensors(config_of("llama")))
    )
    assert problem in message
    assert "config.json" in message


@pytest.mark.parametrize(
    ("content", "problem"),
    [("{", "cannot be read"), ("[]", "must hold a JSON object"), (None, "cannot be read")],
)
def test_a_broken_config_json_is_named(content: str | None, problem: str, tmp_path: Path) -> None:
    config = config_of("llama")
    write_directory(tmp_path, config, random_tensors(config))
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert problem in refused(tmp_path)


def test_a_directory_without_weights_says_what_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
    assert "has neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    config = config_of("llama")
    write_directory(tmp_path, config, random_tensors(config), num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "shard model-00002-of-00003.safetensors is missing (1 of 3)" in refused(tmp_path)


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(tmp_path: Path) -> None:
    config = config_of("llama")
    tensors = random_tensors(config)
    write_directory(tmp_path, config, tensors, num_shards=2)
    names = sorted(tensors)[1::2]
    save_file({name: tensors[name] for name in names[1:]}, tmp_path / "model-00002-of-00002.safetensors")
    assert f"missing tensor {names[0]}" in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 40, 1000])
def test_truncated_weights_are_refused(keep: int, tmp_path: Path) -> None:
    config = config_of("llama")
    path = write_directory(tmp_path, config, random_tensors(config)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors: cannot be read as safetensors" in refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 3, 8, 40, 500, 20000])
def test_a_truncated_gguf_file_is_refused(keep: int, tmp_path: Path) -> None:
    config = config_of("llama")
    whole = write_gguf(tmp_path / "m.gguf", config, random_tensors(config))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:keep])
    assert "cut.gguf" in refused(cut)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "not a GGUF file" in refused(path)


def test_an_unsupported_gguf_architecture_lists_the_supported(tmp_path: Path) -> None:
    config = config_of("llama")
    path = write_gguf(tmp_path / "m.gguf", config | {"model_type": "gemma"}, random_tensors(config))
    assert "'gemma' is not supported (supported: llama, qwen2, qwen3)" in refused(path)


def test_generation_config_decides_what_ends_an_answer(tmp_path: Path) -> None:
    config = config_of("llama")
    write_directory(tmp_path, config, random_tensors(config))
    assert load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert load_config(tmp_path).eos_token_ids == (2, 7)


def test_the_next_checkpoint_loads_after_a_refused_one(tmp_path: Path) -> None:
    config = config_of("llama")
    good = write_directory(tmp_path / "good", config, random_tensors(config))
    bad = shutil.copytree(good, tmp_path / "bad")
    (bad / "config.json").write_text("nonsense")
    refused(bad)
    assert load_decoder(good, torch.float32).config.num_layers == 3
