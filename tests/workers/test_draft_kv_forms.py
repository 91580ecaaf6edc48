"""The drafter's KV in a pool of its own or in the target's pages, read through either view: nobody can tell.

Nobody but the bytes' owner: the factor from page id to table entry is derived from the view, and a wrong one
leaves every token right and costs acceptance alone.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from kvmanager.errors import LayoutRefused
from kvmanager.layout import DraftKv, KvGeometry, PoolLayout
from tests.workers.split_pair import Outcome, SplitPair, config, run_aggregated
from transceiver.errors import HandshakeRefused
from workers.assembly import Models
from workers.attention.torch import TorchPagedAttention
from workers.faults import Fault
from workers.request import SamplingParams
from workers.storage import KvStorage, layer_buffer

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, top_k=40, top_p=0.95, seed=11)
FORMS = [("mirrored", "dense"), ("unified", "strided"), ("unified", "dense")]


def texts(outcomes: list[Outcome]) -> list[list[int]]:
    return [outcome.tokens for outcome in outcomes]


def steps(outcomes: list[Outcome]) -> list[int]:
    return [outcome.stats.decode_steps for outcome in outcomes if outcome.stats is not None]


def pair_of(models: Models, draft_kv: DraftKv, layout: PoolLayout = "strided") -> SplitPair:
    form = {"draft_kv": draft_kv, "pool_layout": layout}
    return SplitPair(models, context=config("context", **form), generation=config("generation", **form))


def run_split(pair: SplitPair, prompts: list[list[int]], sampling: SamplingParams) -> list[Outcome]:
    ids = [pair.ask(prompt, sampling) for prompt in prompts]
    pair.run()
    return [pair.outcomes[request_id] for request_id in ids]


# Equal in every form


@pytest.mark.parametrize(("draft_kv", "layout"), FORMS)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_and_decode_steps_are_the_same_in_every_form_aggregated_and_split(
    models: Models,
    prompts: list[list[int]],
    draft_kv: DraftKv,
    layout: PoolLayout,
    sampling: SamplingParams,
) -> None:
    golden = run_aggregated(models, prompts, sampling)
    aggregated = run_aggregated(models, prompts, sampling, draft_kv=draft_kv, pool_layout=layout)
    split = run_split(pair_of(models, draft_kv, layout), prompts, sampling)
    assert texts(aggregated) == texts(split) == texts(golden)
    assert steps(aggregated) == steps(split) == steps(golden)


def test_the_two_views_of_one_form_may_differ_between_roles(models: Models, prompts: list[list[int]]) -> None:
    """A view is how a worker reads its own memory; what travels is pages."""
    golden = run_aggregated(models, prompts[:2], GREEDY)
    pair = SplitPair(
        models,
        context=config("context", draft_kv="unified", pool_layout="dense"),
        generation=config("generation", draft_kv="unified"),
    )
    split = run_split(pair, prompts[:2], GREEDY)
    assert (texts(split), steps(split)) == (texts(golden), steps(golden))


# What travels


def test_unified_pages_travel_in_one_descriptor_and_their_bytes_are_told_apart(
    models: Models, prompts: list[list[int]]
) -> None:
    mirrored, unified = pair_of(models, "mirrored"), pair_of(models, "unified")
    one, two = run_split(mirrored, prompts[:2], GREEDY), run_split(unified, prompts[:2], GREEDY)
    for first, second in zip(one, two, strict=True):
        assert first.stats is not None
        assert second.stats is not None
        assert second.stats.kv_bytes_target == first.stats.kv_bytes_target > 0
        assert second.stats.kv_bytes_draft == first.stats.kv_bytes_draft > 0
        assert second.reservation is not None
        assert second.reservation.draft_pages == ()
    sent, counters = unified.context._port.stats(), unified.context.counters
    assert (sent.bytes_target, sent.bytes_draft) == (counters.kv_bytes_target, counters.kv_bytes_draft)
    assert counters.kv_bytes_draft == mirrored.context.counters.kv_bytes_draft


def test_s61_roles_with_different_forms_refuse_each_other_with_both_values(models: Models) -> None:
    with pytest.raises(HandshakeRefused, match="draft mode differs: 'mirrored' here, 'unified' at the peer"):
        SplitPair(models, generation=config("generation", draft_kv="unified"))


def test_a_unified_worker_without_a_drafter_is_a_plain_one(models: Models, prompts: list[list[int]]) -> None:
    alone = msgspec.structs.replace(GREEDY, draft_tokens=0)
    bare = Models(models.pair, models.decoder, None, None)
    golden = run_aggregated(bare, prompts[:1], alone)
    assert texts(run_aggregated(bare, prompts[:1], alone, draft_kv="unified")) == texts(golden)


# Ablations still cost what they did


@pytest.mark.parametrize("fault", [Fault.EMPTY_CONTEXT, Fault.DUMMY_SLOT])
def test_injected_faults_cost_steps_and_no_token_in_unified_form_too(
    models: Models, prompts: list[list[int]], fault: Fault
) -> None:
    golden = run_aggregated(models, prompts, GREEDY)
    pair = pair_of(models, "unified")
    for engine in (pair.context, pair.generation):
        engine.inject(fault)
    faulty = run_split(pair, prompts, GREEDY)
    assert texts(faulty) == texts(golden)
    assert sum(steps(faulty)) > 1.25 * sum(steps(golden))
    if fault is Fault.EMPTY_CONTEXT:
        assert all(o.stats.kv_bytes_draft == 0 for o in faulty if o.stats is not None)


# The factor


class GuessedFactor(TorchPagedAttention):
    """Reads a dense view as if a page were one entry of it."""

    def _entries_per_page(self, buffer: Tensor, pool: Tensor) -> int:
        assert super()._entries_per_page(buffer, pool) > 1
        return 1


def test_a_wrong_factor_for_the_draft_pool_costs_acceptance_and_no_token(
    models: Models, prompts: list[list[int]]
) -> None:
    """In unified pages the same guess would write over the target's layers, which any accuracy test sees."""
    golden = run_aggregated(models, prompts, GREEDY)
    pair = pair_of(models, "mirrored", "dense")
    runner = pair.generation._runner
    planted = runner._draft_attention
    assert isinstance(planted, TorchPagedAttention)
    runner._draft_attention = GuessedFactor(planted.storage, "dense")
    faulty = run_split(pair, prompts, GREEDY)
    assert texts(faulty) == texts(golden)
    assert sum(steps(faulty)) > 1.1 * sum(steps(golden))


# The memory


def test_every_layer_of_both_models_is_its_own_memory_in_unified_pages() -> None:
    """Fill each layer through one view, read it back through the other: nothing overlaps, nothing is left over."""
    target = KvGeometry(num_layers=3, num_kv_heads=2, head_dim=4, page_size=2, element_bytes=4)
    draft = KvGeometry(num_layers=2, num_kv_heads=2, head_dim=4, page_size=2, element_bytes=4)
    storage = KvStorage(target, 5, torch.float32, appended=draft)
    assert storage.appended is not None
    pools = [storage.pool, storage.appended.pool]
    assert storage.page_bytes == target.page_bytes + draft.page_bytes
    assert storage.address % 4096 == 0
    value = 0.0
    for page in range(5):
        for pool, geometry in zip(pools, (target, draft), strict=True):
            for layer in range(geometry.num_layers):
                value += 1
                layer_buffer(pool, layer, "strided")[page] = value
    seen = []
    for page in range(5):
        for pool, geometry in zip(pools, (target, draft), strict=True):
            for layer in range(geometry.num_layers):
                entry = layer_buffer(pool, layer, "dense")[page * 5]
                seen.append(float(entry.flatten()[0]))
                assert (entry == seen[-1]).all()
    assert seen == [float(number) for number in range(1, 26)]
    flat = storage.pool.as_strided((5 * storage.page_bytes // 4,), (1,))
    assert (flat > 0).all()


def test_rows_of_another_width_that_do_not_tile_the_page_are_refused() -> None:
    target = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=4, page_size=1, element_bytes=4)
    draft = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=6, page_size=1, element_bytes=4)
    storage = KvStorage(target, 2, torch.float32, appended=draft)
    assert storage.appended is not None
    TorchPagedAttention(storage)
    with pytest.raises(LayoutRefused, match="no whole number of rows of head_dim 6"):
        TorchPagedAttention(storage.appended)
    with pytest.raises(LayoutRefused, match="tile"):
        TorchPagedAttention(storage, "dense")
