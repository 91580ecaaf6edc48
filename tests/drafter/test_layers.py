from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from drafter.layers import (
    RopeError,
    RopeParameters,
    RotaryTable,
    inverse_frequencies,
    rms_norm,
    rotate,
    swiglu,
)

F64 = torch.float64


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    x = torch.tensor([[3.0, -4.0]], dtype=F64)
    weight = torch.tensor([2.0, 10.0], dtype=F64)
    root = math.sqrt(12.5 + 0.5)
    torch.testing.assert_close(rms_norm(x, weight, 0.5), torch.tensor([[6 / root, -40 / root]], dtype=F64))


def test_swiglu_gates_with_the_first_half() -> None:
    gate_up = torch.tensor([[1.0, -2.0, 5.0, 7.0]], dtype=F64)
    silu = [1 / (1 + math.exp(-1)), -2 / (1 + math.exp(2))]
    torch.testing.assert_close(swiglu(gate_up), torch.tensor([[silu[0] * 5, silu[1] * 7]], dtype=F64))


def test_rotation_pairs_an_element_with_the_one_half_a_head_away() -> None:
    table = RotaryTable(RopeParameters(theta=100.0), 4, F64, "cpu")
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], dtype=F64)
    angles = [3.0, 3.0 * 100.0**-0.5]
    expected = [
        1 * math.cos(angles[0]) - 3 * math.sin(angles[0]),
        2 * math.cos(angles[1]) - 4 * math.sin(angles[1]),
        3 * math.cos(angles[0]) + 1 * math.sin(angles[0]),
        4 * math.cos(angles[1]) + 2 * math.sin(angles[1]),
    ]
    rotated = rotate(x, table.at(torch.tensor([3])))
    torch.testing.assert_close(rotated, torch.tensor([[expected]], dtype=F64))


def test_scores_depend_on_the_distance_of_positions_alone() -> None:
    table = RotaryTable(RopeParameters(theta=10000.0), 16, F64, "cpu")
    q, k = torch.randn(2, 1, 1, 16, dtype=F64)

    def score(query: int, key: int) -> torch.Tensor:
        return (rotate(q, table.at(torch.tensor([query]))) * rotate(k, table.at(torch.tensor([key])))).sum()

    torch.testing.assert_close(score(9, 4), score(1009, 1004))


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5e5}},
    ],
)
def test_both_dialects_give_the_same_parameters(config: dict[str, Any]) -> None:
    assert RopeParameters.from_config(config) == RopeParameters(5e5)


def test_the_old_name_of_the_scaling_type_is_read() -> None:
    config = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert RopeParameters.from_config(config) == RopeParameters(1e4, "linear", 4.0)


def test_linear_scaling_slows_every_frequency() -> None:
    plain = inverse_frequencies(RopeParameters(1e4), 8, F64)
    torch.testing.assert_close(inverse_frequencies(RopeParameters(1e4, "linear", 4.0), 8, F64), plain / 4)


def test_llama3_scaling_keeps_fast_frequencies_and_slows_slow_ones() -> None:
    config = {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }  # fmt: skip
    plain = inverse_frequencies(RopeParameters(5e5), 128, F64)
    scaled = inverse_frequencies(RopeParameters.from_config(config), 128, F64)
    wavelengths = 2 * math.pi / plain
    assert torch.equal(scaled[wavelengths < 8192 / 4], plain[wavelengths < 8192 / 4])
    torch.testing.assert_close(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8)
    between = (wavelengths > 8192 / 4) & (wavelengths < 8192)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    config = {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
        },
    }  # fmt: skip
    rope = RopeParameters.from_config(config)
    plain = inverse_frequencies(RopeParameters(1e6), 128, F64)
    scaled = inverse_frequencies(rope, 128, F64)
    assert torch.equal(scaled[:20], plain[:20])
    torch.testing.assert_close(scaled[-10:], plain[-10:] / 4)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    table = RotaryTable(rope, 128, F64, "cpu")
    torch.testing.assert_close(
        table.at(torch.tensor([0])).cos_T1D, torch.full((1, 1, 128), rope.attention_factor, dtype=F64)
    )


def test_yarn_without_a_factor_takes_the_ratio_of_lengths() -> None:
    config = {
        "max_position_embeddings": 65536,
        "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16384},
    }
    assert RopeParameters.from_config(config).factor == 4.0


def test_divisors_are_applied_last() -> None:
    plain = inverse_frequencies(RopeParameters(1e4), 4, F64)
    divided = inverse_frequencies(RopeParameters(1e4, divisors=(1.0, 8.0)), 4, F64)
    torch.testing.assert_close(divided, plain / torch.tensor([1.0, 8.0], dtype=F64))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs the field 'factor'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings"),
        (
            {"max_position_embeddings": 9, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "needs the field 'low_freq_factor'",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ],
)
def test_settings_that_are_not_implemented_name_their_field(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(RopeError, match=problem):
        RopeParameters.from_config(config)
