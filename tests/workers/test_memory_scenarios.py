"""Pools that are too small for what is asked: everyone waits, nobody deadlocks, nothing is taken twice."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvmanager.layout import DraftKv
from tests.workers.split_pair import Outcome, SplitPair, config, run_aggregated
from workers import memory as memory_module
from workers.assembly import Models, build, lay_ground
from workers.config import EveryRequestFits, FixedPages, KvBudget, MemoryFraction, WorkerConfig
from workers.errors import ModelMismatch
from workers.request import Role, SamplingParams

PAGE = 16
MIB, GIB = 1 << 20, 1 << 30
FORMS = ["mirrored", "unified"]


def small(role: Role, pages: int, draft_kv: DraftKv = "mirrored", max_seq_len: int = 64) -> WorkerConfig:
    return msgspec.structs.replace(
        config(role, pages=pages, draft_kv=draft_kv, max_batch=4), max_seq_len=max_seq_len
    )


def answers(models: Models, pair: SplitPair, asked: list[tuple[list[int], int]]) -> list[Outcome]:
    """Ask all at once, run to the end, hold each answer against its golden one."""
    ids = [pair.ask(prompt, lengths(max_tokens)) for prompt, max_tokens in asked]
    pair.run()
    outcomes = [pair.outcomes[request_id] for request_id in ids]
    for outcome, (prompt, max_tokens) in zip(outcomes, asked, strict=True):
        golden = run_aggregated(models, [prompt], lengths(max_tokens))[0]
        assert outcome.tokens == golden.tokens
        assert outcome.stats is not None
        assert golden.stats is not None
        assert outcome.stats.decode_steps == golden.stats.decode_steps
    return outcomes


def lengths(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


@pytest.mark.parametrize("draft_kv", FORMS)
def test_s37_room_for_one_and_a_half_requests_serves_three(
    models: Models, prompts: list[list[int]], draft_kv: DraftKv
) -> None:
    """Each needs 64 positions and the look-ahead: 5 pages. The pool has 8 beside the dummy."""
    pair = SplitPair(
        models, context=config("context", draft_kv=draft_kv), generation=small("generation", 9, draft_kv)
    )
    answers(models, pair, [(prompt[:40], 24) for prompt in prompts[:3]])
    assert pair.usage() == pair.baseline


@pytest.mark.parametrize("draft_kv", FORMS)
def test_s39_two_requests_of_60_percent_of_the_pool_with_long_outputs_run_one_after_the_other(
    models: Models, prompts: list[list[int]], draft_kv: DraftKv
) -> None:
    pair = SplitPair(
        models,
        context=config("context", draft_kv=draft_kv),
        generation=small("generation", 21, draft_kv, max_seq_len=192),
    )
    asked = [(prompt[:16], 160) for prompt in prompts[:2]]
    ids = [pair.ask(prompt, lengths(max_tokens)) for prompt, max_tokens in asked]
    most = 0
    while not all(pair.outcomes[request_id].over for request_id in ids):
        pair.tick()
        most = max(most, pair.generation.num_running)
    pair.run()
    assert most == 1, "growth is counted at admission, so the second never starts beside the first"
    golden = run_aggregated(models, [prompt for prompt, _ in asked], lengths(160))
    assert [pair.outcomes[i].tokens for i in ids] == [g.tokens for g in golden]


@pytest.mark.parametrize("draft_kv", FORMS)
def test_s40_a_needs_4_pages_and_1_of_look_ahead_b_3_and_1_of_7_and_nobody_deadlocks(
    models: Models, prompts: list[list[int]], draft_kv: DraftKv
) -> None:
    """The published numbers: 4+1 and 3+1 pages in a pool of 7. Admitting both without their look-ahead strands both."""
    pair = SplitPair(
        models, context=config("context", draft_kv=draft_kv), generation=small("generation", 8, draft_kv)
    )
    geometry, lookahead = pair.generation.ledger.target.geometry, pair.generation.ledger.limits.lookahead
    a, b = (prompts[0][:40], 24), (prompts[1][:30], 18)
    for (prompt, max_tokens), pages in ((a, 4), (b, 3)):
        tokens = len(prompt) + max_tokens
        assert geometry.pages_for(tokens) == pages
        assert geometry.pages_for(tokens + lookahead) == pages + 1
    answers(models, pair, [a, b])
    assert pair.usage() == pair.baseline


@pytest.mark.parametrize("draft_kv", FORMS)
@pytest.mark.parametrize("budget_mib", [4, 16])
def test_s44_target_and_draft_pools_together_stay_inside_the_budget(
    models: Models, monkeypatch: pytest.MonkeyPatch, draft_kv: DraftKv, budget_mib: int
) -> None:
    """Half of what is free, for both: not half for each, and draft layers are counted once."""
    monkeypatch.setattr(memory_module, "free_memory_bytes", lambda: 2 * budget_mib * MIB)
    asked = msgspec.structs.replace(
        config("aggregated", draft_kv=draft_kv, max_batch=2), kv=MemoryFraction(fraction=0.5), max_seq_len=128
    )
    ledger = build(asked, models).engine.ledger
    assert ledger.draft is not None
    target, draft = ledger.target, ledger.draft
    if draft_kv == "unified":
        page_bytes = target.geometry.page_bytes + draft.geometry.page_bytes
        total = target.num_pages * page_bytes
    else:
        assert draft.num_pages == target.num_pages
        total = target.num_pages * target.geometry.page_bytes + draft.num_pages * draft.geometry.page_bytes
    tables = target.page_table.nbytes * (1 if draft_kv == "unified" else 2)
    assert total + tables <= budget_mib * MIB
    assert total + tables > budget_mib * MIB - 2 * (target.geometry.page_bytes + draft.geometry.page_bytes)


def test_s44_a_budget_that_cannot_start_says_so_with_its_numbers(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "free_memory_bytes", lambda: 64 * 1024)
    asked = msgspec.structs.replace(config("aggregated"), kv=MemoryFraction(fraction=0.5))
    with pytest.raises(ModelMismatch, match="the KV budget is 32768 B") as caught:
        build(asked, models)
    assert caught.value.field == "kv"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": 900, "memory.current": 500, "memory.stat": "anon 7\ninactive_file 100"}, 500),
        ({"memory.max": "max", "memory.current": 500, "memory.stat": "inactive_file 100"}, 2048),
        ({"memory.max": 9000, "memory.current": 500, "memory.stat": ""}, 2048),  # more than the host has
        ({"memory.max": 900, "memory.current": 901, "memory.stat": ""}, 0),
        (
            {
                "memory/memory.limit_in_bytes": 900,
                "memory/memory.usage_in_bytes": 500,
                "memory/memory.stat": "inactive_file 3\ntotal_inactive_file 50",
            },
            450,
        ),
        ({}, 2048),
    ],
    ids=["version 2", "no limit", "a high limit", "over the limit", "version 1", "no container"],
)
def test_a_container_s_limit_bounds_what_is_free(tmp_path: Path, files: dict[str, object], left: int) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 4 kB\nMemAvailable: 2 kB\n")
    (tmp_path / "memory").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(f"{content}\n")
    assert memory_module.free_memory_bytes(tmp_path / "meminfo", tmp_path) == left


@pytest.mark.parametrize("draft_kv", FORMS)
@pytest.mark.parametrize(
    ("kv", "remedy"),
    [
        (FixedPages(num_target_pages=1000), r"lower num_kv_pages \(--kv-pages\), which is 1000$"),
        (EveryRequestFits(), "lower max_batch or max_seq_len, or give num_kv_pages or memory_fraction$"),
    ],
    ids=["pages", "every request fits"],
)
def test_pools_beyond_memory_are_refused_with_their_size_and_what_to_lower(
    models: Models, monkeypatch: pytest.MonkeyPatch, draft_kv: DraftKv, kv: KvBudget, remedy: str
) -> None:
    asked = msgspec.structs.replace(config("aggregated", draft_kv=draft_kv, max_batch=4), kv=kv)
    ground = lay_ground(asked, models)
    need = ground.plan.total_bytes
    monkeypatch.setattr(memory_module, "free_memory_bytes", lambda: need)
    lay_ground(asked, models)  # just fits
    monkeypatch.setattr(memory_module, "free_memory_bytes", lambda: need - 1)
    said = rf"the KV pools need {need / GIB:.2f} GiB .* target pages.* {(need - 1) / GIB:.2f} GiB are free: "
    with pytest.raises(ModelMismatch, match=said + remedy) as caught:
        lay_ground(asked, models)
    assert caught.value.field == "kv"


def test_memory_that_is_free_and_not_given_is_refused_alike(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "free_memory_bytes", lambda: 1 << 60)
    asked = msgspec.structs.replace(config("aggregated"), kv=FixedPages(num_target_pages=1 << 36))
    with pytest.raises(ModelMismatch, match=r"may not have so much: lower num_kv_pages") as caught:
        lay_ground(asked, models)
    assert "allocate" in str(caught.value.__cause__)
