from __future__ import annotations

import itertools

import pytest

from workers.buckets import fitting, powers_up_to


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 16, 100, 128])
def test_sizes_double_up_to_the_largest_which_is_one_of_them(largest: int) -> None:
    sizes = powers_up_to(largest)
    assert sizes[0] == 1
    assert sizes[-1] == largest
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(sizes))


def test_a_step_takes_the_smallest_shape_that_holds_it() -> None:
    sizes = powers_up_to(24)
    for size in range(1, 25):
        chosen = fitting(size, sizes)
        assert chosen >= size
        assert all(other < size for other in sizes if other < chosen)


def test_a_step_that_no_shape_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="9 is larger than the largest of"):
        fitting(9, powers_up_to(8))
    with pytest.raises(ValueError, match="at least 1"):
        powers_up_to(0)
