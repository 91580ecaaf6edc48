"""The tools that judge long runs: the line through memory samples, and nonsense that is valid where it must be."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import Message

from cluster.rpc.v1 import admin_pb2, inference_pb2
from tests.faults import nonsense
from tests.faults.memory import fit

MIB = 1 << 20


def noise(chance: random.Random, slope: float) -> list[tuple[float, float]]:
    """Memory in lumps of 256 KiB, as allocators hold it."""
    points = []
    for requests in range(0, 10_000, 50):
        wanted = 200 * MIB + slope * requests + chance.uniform(0, MIB / 4)
        points.append((float(requests), float(round(wanted / (MIB / 4)) * (MIB / 4))))
    return points


def test_a_line_has_the_slope_of_its_points() -> None:
    line = fit([(0, 5.0), (1, 7.0), (2, 9.0), (4, 13.0)])
    assert (line.slope, line.error, line.span, line.samples) == (2.0, 0.0, 4, 4)


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_is_told_from_noise(seed: int) -> None:
    chance = random.Random(seed)
    assert not fit(noise(chance, 0.0)).grows(MIB)
    assert not fit(noise(chance, -500.0)).grows(MIB)
    assert fit(noise(chance, 1024.0)).grows(MIB)


@pytest.mark.parametrize("points", [[], [(0, 1.0), (1, 2.0)], [(3, 1.0), (3, 2.0), (3, 3.0)]])
def test_too_little_is_no_line(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="sample"):
        fit(points)


@pytest.mark.parametrize(
    "kind", [inference_pb2.GenerateRequest, admin_pb2.GetClusterStateResponse, admin_pb2.GetTimelineResponse]
)
def test_nonsense_is_a_valid_message_the_same_for_the_same_seed(kind: type[Message]) -> None:
    filled = {
        nonsense.fill(kind(), random.Random(seed)).SerializeToString(deterministic=True) for seed in range(30)
    }
    assert len(filled) > 20
    again = nonsense.fill(kind(), random.Random(7)).SerializeToString(deterministic=True)
    assert again in filled
    fields = {field.name for data in filled for field, _ in kind.FromString(data).ListFields()}
    assert fields == {field.name for field in kind.DESCRIPTOR.fields}
