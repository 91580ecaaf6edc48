"""Shapes of captured steps: a captured graph fits one batch size and one width, so steps are rounded up to few of them.

batch    1, 2, 4, ... max_batch        rows behind the live ones are padding, on the dummy slot
width    1, 2, 4, ... 1 + max drafts   tokens verified per request; what a step did not ask for is not looked at
"""

from __future__ import annotations

from collections.abc import Sequence


def powers_up_to(largest: int) -> tuple[int, ...]:
    """1, 2, 4, ..., and `largest` itself, ascending. Raises ValueError for less than 1."""
    if largest < 1:
        raise ValueError(f"the largest of a set of sizes is {largest}, it must be at least 1")
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return tuple(sizes) if sizes[-1] == largest else (*sizes, largest)


def fitting(size: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds `size`. Raises ValueError when none does."""
    for candidate in sizes:
        if candidate >= size:
            return candidate
    raise ValueError(f"{size} is larger than the largest of {list(sizes)}")
