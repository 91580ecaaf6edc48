"""What the ledgers cost: bookkeeping of one decode step, and whole requests per second.

    .venv/bin/python -m tests.bench.bookkeeping

A step asks the ledger what `workers.decode` and `workers.runner` ask it: lengths for the step, the draft and the
verify pass, slots for the target's pass and the drafter's two, then one commit. Target and mirrored drafter, prefix
cache on. A figure is the median of many steps; pools of other sizes show that the size of the pool does not matter.
"""

from __future__ import annotations

import json
import statistics
import time

from kvmanager.ids import RequestId
from kvmanager.layout import KvGeometry
from kvmanager.ledger import KvLedger

TARGET = KvGeometry(num_layers=28, num_kv_heads=8, head_dim=128, page_size=16, element_bytes=2)
DRAFT = KvGeometry(num_layers=5, num_kv_heads=8, head_dim=128, page_size=16, element_bytes=2)
LIVE = (1, 64, 256, 1024)
POOL_PAGES = (150_000, 1_000_000)
STEPS = 400
GOAL_MS = 0.2


def main() -> None:
    rows = [measure(live, pages) for pages in POOL_PAGES for live in LIVE]
    print(
        f"{'pool pages':>12} {'live':>6} {'ms/step':>9} {'us/request':>11} {'requests/s':>11} {'commits/s':>12}"
    )
    for row in rows:
        print(
            f"{row['pool_pages']:>12,} {row['live']:>6} {row['ms_per_step']:>9.4f} {row['us_per_request']:>11.3f}"
            f" {row['requests_per_s']:>11,.0f} {row['commits_per_s']:>12,.0f}"
        )
    at_256 = max(row["ms_per_step"] for row in rows if row["live"] == 256)
    print(f"bookkeeping at 256 live requests: {at_256:.3f} ms a step (goal: {GOAL_MS} ms)")
    print(json.dumps({"bookkeeping": rows}))


def measure(live: int, num_pages: int) -> dict[str, float]:
    ledger = KvLedger(
        target=TARGET,
        draft=DRAFT,
        num_target_pages=num_pages,
        num_draft_pages=num_pages,
        max_batch=1024,
        max_seq_len=2048,
        lookahead=16,
        prefix_cache=True,
    )
    assert ledger.draft is not None
    ids = [RequestId(f"request-{number}") for number in range(live)]
    for request in ids:
        ledger.reserve(request, 2000)
    seconds: list[float] = []
    length = 0
    for _ in range(STEPS):
        length += 4
        start_s = time.perf_counter()
        ledger.lengths_of(ids)  # the step
        ledger.lengths_of(ids)  # the draft
        ledger.draft.slots_of(ids)
        ledger.lengths_of(ids)  # the verify pass
        ledger.slots_of(ids)
        ledger.draft.slots_of(ids)
        ledger.commit_all(ids, [length] * live)
        seconds.append(time.perf_counter() - start_s)
    step_s = statistics.median(seconds)
    ledger.check()
    for request in ids:
        ledger.free(request)
    return {
        "pool_pages": num_pages,
        "live": live,
        "ms_per_step": step_s * 1e3,
        "us_per_request": step_s / live * 1e6,
        "requests_per_s": _requests_per_s(ledger),
        "commits_per_s": _commits_per_s(ledger),
    }


def _requests_per_s(ledger: KvLedger, count: int = 2000) -> float:
    """Reserve 1,000 tokens in both pools, free them."""
    start_s = time.perf_counter()
    for number in range(count):
        request = RequestId(str(number))
        ledger.reserve(request, 1000)
        ledger.free(request)
    return count / (time.perf_counter() - start_s)


def _commits_per_s(ledger: KvLedger, count: int = 2000) -> float:
    request = RequestId("one")
    ledger.reserve(request, count)
    start_s = time.perf_counter()
    for length in range(count):
        ledger.commit(request, length)
    rate = count / (time.perf_counter() - start_s)
    ledger.free(request)
    return rate


if __name__ == "__main__":
    main()
