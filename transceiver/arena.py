"""Who uses which bytes of the staging buffer. Pure.

Life of a span: `take` cuts it from the first gap that is large enough -> its write ends -> `give`, which melts it into
the gaps beside it. There are as many spans as writes in flight, so lists are short.
"""

from __future__ import annotations

from typing import NamedTuple

from transceiver.errors import BookCorrupt

_GRAIN_BYTES = 64


class Span(NamedTuple):
    offset: int
    size: int


class Arena:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes - size_bytes % _GRAIN_BYTES
        self._gaps = [Span(0, self.size_bytes)] if self.size_bytes else []
        self._taken: dict[int, int] = {}

    @property
    def largest(self) -> int:
        """Bytes that one `take` can get now."""
        return max((gap.size for gap in self._gaps), default=0)

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    def take(self, size_bytes: int) -> Span | None:
        """At least so many bytes in one piece; None while there are none."""
        size = -(-max(size_bytes, 1) // _GRAIN_BYTES) * _GRAIN_BYTES
        for index, gap in enumerate(self._gaps):
            if gap.size >= size:
                rest = Span(gap.offset + size, gap.size - size)
                self._gaps[index : index + 1] = [rest] if rest.size else []
                self._taken[gap.offset] = size
                return Span(gap.offset, size)
        return None

    def give(self, span: Span) -> None:
        """Raises BookCorrupt for a span that was not taken."""
        if self._taken.pop(span.offset, None) != span.size:
            raise BookCorrupt(f"{span} of the staging buffer is given back, but was not taken")
        melted: list[Span] = []
        for gap in sorted([*self._gaps, span]):
            if melted and melted[-1].offset + melted[-1].size == gap.offset:
                melted[-1] = Span(melted[-1].offset, melted[-1].size + gap.size)
            else:
                melted.append(gap)
        self._gaps = melted

    def check(self) -> None:
        """Raises BookCorrupt unless every byte is either taken or in a gap, once."""
        spans = sorted([*self._gaps, *(Span(offset, size) for offset, size in self._taken.items())])
        end = 0
        for span in spans:
            if span.offset != end:
                raise BookCorrupt(f"the staging buffer has a hole or an overlap at {end}")
            end += span.size
        if end != self.size_bytes:
            raise BookCorrupt(f"the staging buffer's spans end at {end} of {self.size_bytes}")
