"""Configuration is parsed once, and what is wrong with it is said by name."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cluster.config import ConfigError, load_config
from workers.config import EveryRequestFits, FixedPages, MemoryFraction, WorkerConfig


def test_the_default_is_a_split_cluster_of_two() -> None:
    config = load_config(None, {})
    assert config.worker_roles() == ("context", "generation")
    assert config.worker_config("context").kv == EveryRequestFits()


def test_options_override_the_file_and_absent_options_do_not(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('mode = "aggregated"\nmax_batch = 3\nmax_seq_len = 99\n')
    config = load_config(file, {"max_batch": 5, "max_seq_len": None})
    assert (config.mode, config.max_batch, config.max_seq_len) == ("aggregated", 5, 99)
    assert config.worker_roles() == ("aggregated",)


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown configuration key 'max_bach'; did you mean 'max_batch'\?"
    ):
        load_config(None, {"max_bach": 4})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "float8"}, "dtype"),
        ({"max_batch": 0}, "max_batch must be at least 1"),
        ({"draft_tokens": -1}, "draft_tokens must be at least 0"),
        ({"draft_tokens": "some"}, "draft_tokens"),
        ({"draft_vocab": -1}, "draft_vocab must be at least 0"),
        ({"num_kv_pages": 9, "memory_fraction": 0.5}, "exclude each other"),
        ({"num_kv_pages": 1}, "num_target_pages must be at least 2"),
        ({"memory_fraction": 1.5}, r"fraction must be in \(0, 1\]"),
        ({"generation_workers": 0}, "needs at least one generation worker"),
        ({"context_workers": -1}, "must not be negative"),
        ({"drain_s": -1.0}, "drain_s must not be negative"),
        ({"max_live_requests": 0}, "max_live_requests must be positive"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, values)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.toml", {})
    broken = tmp_path / "broken.toml"
    broken.write_text("mode = ")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(broken, {})


def test_memory_settings_reach_the_workers() -> None:
    assert load_config(None, {"num_kv_pages": 9}).worker_config("generation").kv == FixedPages(
        num_target_pages=9
    )
    assert load_config(None, {"memory_fraction": 0.5}).worker_config("context").kv == MemoryFraction(
        fraction=0.5
    )


def test_the_form_of_the_drafters_kv_and_the_prefix_cache_reach_the_workers() -> None:
    plain = load_config(None, {}).worker_config("generation")
    assert (plain.draft_kv, plain.pool_layout, plain.prefix_cache) == ("mirrored", "strided", True)
    values = {"draft_kv": "unified", "pool_layout": "dense", "prefix_cache": False}
    other = load_config(None, values).worker_config("context")
    assert (other.draft_kv, other.pool_layout, other.prefix_cache) == ("unified", "dense", False)
    with pytest.raises(ConfigError, match="draft_kv"):
        load_config(None, {"draft_kv": "joined"})


def test_a_workers_configuration_survives_the_wire() -> None:
    config = load_config(None, {"draft_tokens": 3, "memory_fraction": 0.5}).worker_config("generation")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=WorkerConfig) == config


def test_each_worker_gets_one_gpu_when_there_are_enough_or_when_they_are_asked_for() -> None:
    auto, cpu, cuda = (load_config(None, {"device": name}) for name in ("auto", "cpu", "cuda"))
    assert [config.gpus_per_rank(2) for config in (auto, cpu, cuda)] == [1, 0, 1]
    assert [config.gpus_per_rank(1) for config in (auto, cpu, cuda)] == [0, 0, 1], "two workers, one GPU"
    assert auto.worker_config("context", gpus=1).device == "cuda"
    assert auto.worker_config("context").device == "cpu"


def test_prompts_are_computed_in_larger_chunks_on_a_gpu_unless_told_otherwise() -> None:
    plain, told = load_config(None, {}), load_config(None, {"chunk_tokens": 64})
    assert [plain.worker_config("context", gpus).chunk_tokens for gpus in (0, 1)] == [256, 8192]
    assert [told.worker_config("context", gpus).chunk_tokens for gpus in (0, 1)] == [64, 64]


def test_short_prompts_share_a_step_on_a_gpu_unless_told_otherwise() -> None:
    plain, told = load_config(None, {}), load_config(None, {"packed_tokens": 48})
    assert [plain.worker_config("context", gpus).packed_tokens for gpus in (0, 1)] == [0, 512]
    assert [told.worker_config("context", gpus).packed_tokens for gpus in (0, 1)] == [48, 48]
    assert load_config(None, {"chunk_tokens": 64}).worker_config("context", 1).packed_tokens == 64


def test_the_ranks_of_a_role_take_gpus_threads_and_a_place_of_their_own() -> None:
    values = {"aggregated": {"tensor_parallel_size": 2}, "mode": "aggregated", "aggregated_workers": 3}
    config = load_config(None, values)
    assert config.num_ranks == 6
    assert [config.gpus_per_rank(gpus) for gpus in (5, 6)] == [0, 1]
    told = config.worker_config("aggregated")
    assert (told.tensor_parallel_size, told.attention_dp, told.expert_parallel) == (2, False, False)
    where = config.placement_of("aggregated", 1.0)
    assert where is not None
    assert where.group("aggregated-0", "aggregated", 2).wanted() == (
        "2 ranks of 0.01 CPU and 1 GPU, all in one ray.io/node-id"  # no label tells of domains
    )
    assert load_config(None, {}).placement_of("generation", 1.0) is None


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1, got 0"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
        ({"attention_dp": True}, "attention_dp divides work among ranks: it needs tensor_parallel_size"),
    ],
)
def test_ranks_that_make_no_sense_are_refused_by_name(role: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, {"generation": role})
