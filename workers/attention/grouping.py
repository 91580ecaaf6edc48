"""Which requests of a step are attended to together: pure arithmetic on their lengths.

A group is one batch of equal shapes: it is padded to its longest member, so members must not differ too much in length;
and what it gathers should stay in the core's cache, so it must not grow large. Requests with a few queries each share
groups too, padded to the most queries: a group's calls cost more than such rows.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAX_PADDING = 2  # a group gathers at most this many times the positions its requests have
_FEW_QUERIES = 16


def grouped(q_lens: Sequence[int], kv_lens: Sequence[int], *, max_positions: int) -> list[list[int]]:
    """Indices of the requests of each group, every request in exactly one.

    All members of a group have the same q_len or at most `_FEW_QUERIES` each, and all or none start at position 0
    (q_len == kv_len), if all then with the same q_len. A group gathers at most `max_positions` padded positions, unless
    it is a single request.
    """
    pools: dict[tuple[int, bool], list[int]] = {}
    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        from_zero = q_len == kv_len
        alike = q_len if from_zero else max(q_len, _FEW_QUERIES)
        pools.setdefault((alike, from_zero), []).append(request)
    groups: list[list[int]] = []
    for members in pools.values():
        if max(kv_lens[m] for m in members) * len(members) > _MAX_PADDING * sum(kv_lens[m] for m in members):
            members = sorted(members, key=lambda m: kv_lens[m])
        group: list[int] = []
        longest = total = 0
        for member in members:
            longest, total = max(longest, kv_lens[member]), total + kv_lens[member]
            padded = longest * (len(group) + 1)
            if group and (padded > max_positions or padded > _MAX_PADDING * total):
                groups.append(group)
                group, longest, total = [], kv_lens[member], kv_lens[member]
            group.append(member)
        groups.append(group)
    return groups
