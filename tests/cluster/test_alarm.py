"""The alarm of acceptance length: a window per incarnation, a verdict only on evidence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.alarm import AcceptanceWatch, Change
from kvmanager.ids import WorkerEpoch

EPOCH = WorkerEpoch("one")


def fed(
    watch: AcceptanceWatch, *samples: tuple[float, int, int], epoch: WorkerEpoch = EPOCH
) -> list[Change | None]:
    """(time, decode steps, decode tokens) since the start."""
    return [watch.note("w", epoch, now_s, steps, tokens) for now_s, steps, tokens in samples]


def test_it_falls_once_and_recovers_once() -> None:
    watch = AcceptanceWatch(2.0, 10.0, 50)
    assert fed(watch, (0, 0, 0), (1, 100, 300)) == [None, None]
    assert fed(watch, (12, 200, 410), (13, 300, 510), (14, 400, 610)) == ["fell", None, None]
    assert watch.low("w")
    assert fed(watch, (25, 500, 1000), (26, 600, 1400)) == ["recovered", None]
    assert not watch.low("w")


def test_only_the_window_counts() -> None:
    watch = AcceptanceWatch(2.0, 10.0, 50)
    fed(watch, (0, 0, 0), (1, 10_000, 40_000))  # a good hour
    assert watch.recent("w") == 4.0
    fed(watch, (11, 10_000, 40_000), (12, 10_100, 40_100))
    assert watch.recent("w") == 1.0
    assert watch.low("w")


def test_few_steps_are_no_evidence_and_an_idle_worker_stays_what_it_was() -> None:
    watch = AcceptanceWatch(2.0, 10.0, 50)
    assert fed(watch, (0, 0, 0), (1, 49, 49)) == [None, None]
    assert not watch.low("w")
    assert fed(watch, (2, 50, 50)) == ["fell"]
    assert fed(watch, (60, 50, 50), (120, 50, 50)) == [None, None]
    assert watch.low("w")
    assert watch.recent("w") == 0.0


def test_a_new_incarnation_starts_again() -> None:
    watch = AcceptanceWatch(2.0, 10.0, 50)
    fed(watch, (0, 0, 0), (1, 100, 100))
    assert watch.low("w")
    fed(watch, (2, 0, 0), epoch=WorkerEpoch("two"))
    assert not watch.low("w")
    assert watch.recent("nobody") == 0.0


def test_a_minimum_of_zero_never_alarms() -> None:
    watch = AcceptanceWatch(0.0, 10.0, 1)
    assert fed(watch, (0, 0, 0), (1, 100, 100)) == [None, None]
    assert watch.recent("w") == 1.0


@given(
    st.lists(st.tuples(st.floats(0.01, 30), st.integers(0, 100), st.integers(1, 8)), min_size=1, max_size=40)
)
def test_the_window_is_what_a_list_of_all_samples_says(changes: list[tuple[float, int, int]]) -> None:
    watch = AcceptanceWatch(2.0, 10.0, 50)
    samples = [(0.0, 0, 0)]
    watch.note("w", EPOCH, *samples[0])
    for wait_s, steps, length in changes:
        now_s, before, tokens = samples[-1]
        samples.append((now_s + wait_s, before + steps, tokens + steps * length))
        watch.note("w", EPOCH, *samples[-1])
    now_s = samples[-1][0]
    old = [sample for sample in samples[:-1] if sample[0] <= now_s - 10.0]
    _, first_steps, first_tokens = old[-1] if old else samples[0]
    steps, tokens = samples[-1][1] - first_steps, samples[-1][2] - first_tokens
    assert watch.recent("w") == pytest.approx(tokens / steps if steps else 0.0)
