"""Faults of drafting that leave every token right, planted into engines that run in this process.

No configuration reaches them: a plant exchanges a part of the loaded models, or bends a method of a running worker.
What goes wrong in code that both kinds of workers share is planted into the aggregated worker too, so that comparing
split with aggregated cannot see it.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter.attention import AttentionPlan, PagedAttention
from drafter.checkpoint import save_drafter
from drafter.config import DrafterConfig
from drafter.dflash import BlockDrafter
from drafter.dspark import DSparkHead, Markov
from drafter.layers import rms_norm
from kvmanager.ids import DUMMY_PAGE, RequestId
from kvmanager.slots import PageTable
from tests.workers.replaying_pair import ReplayingPair
from workers.assembly import Models, load_models
from workers.attention.torch import TorchPagedAttention
from workers.config import PairSpec, WorkerConfig
from workers.faults import Fault
from workers.models.decoder import Decoder, DecoderOutput
from workers.sequence import Sequence

PairName = Literal["tiny", "tiny, DSpark", "successor, DSpark"]
ScenarioName = Literal["as evaluated", "asked twice", "preempted"]


def _as_they_are(models: Models) -> Models:
    return models


def _nothing(pair: ReplayingPair) -> None:
    pass


@dataclass(frozen=True)
class Plant:
    """One fault. `models` is what every worker loads instead, or the context worker alone where it is `one_sided`;
    `bend` is done to a running split pair.
    """

    name: str
    pair: PairName = "tiny"
    scenario: ScenarioName = "as evaluated"
    models: Callable[[Models], Models] = _as_they_are
    bend: Callable[[ReplayingPair], None] = _nothing
    one_sided: bool = False

    @property
    def shared(self) -> bool:
        """Whether an aggregated worker has it too."""
        return self.models is not _as_they_are and not self.one_sided


def _with_config(change: Callable[[DrafterConfig], Mapping[str, Any]]) -> Callable[[Models], Models]:
    """Models whose drafter reads its config wrongly."""

    def models(clean: Models) -> Models:
        drafter = _copied(clean)
        drafter.config = replace(drafter.config, **change(drafter.config))
        return replace(clean, drafter=drafter)

    return models


def _copied(models: Models) -> BlockDrafter:
    assert models.drafter is not None
    return copy.copy(models.drafter)


class _NormedTap(Decoder):
    """Gives its last tap as Hugging Face gives the last hidden state: after the final norm."""

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        attention: PagedAttention,
        plan: AttentionPlan,
        tap_layer_ids: Items[int] = (),
        rows_by_rank: Items[int] = (),
    ) -> DecoderOutput:
        output = super().forward(token_ids_T, positions_T, attention, plan, tap_layer_ids, rows_by_rank)
        if output.taps_TX is None:
            return output
        hidden = self.config.hidden_size
        first_TX, last_TH = output.taps_TX[:, :-hidden], output.taps_TX[:, -hidden:]
        normed_TH = rms_norm(last_TH, self._final_norm, self.config.rms_norm_eps)
        return DecoderOutput(output.hidden_TH, torch.cat((first_TX, normed_TH), dim=-1))


def _normed_tap(clean: Models) -> Models:
    decoder = copy.copy(clean.decoder)
    decoder.__class__ = _NormedTap
    return replace(clean, decoder=decoder)


class _ShiftedContext(BlockDrafter):
    def append_context(
        self, taps_TX: Tensor, positions_T: Tensor, attention: PagedAttention, plan: AttentionPlan
    ) -> None:
        super().append_context(taps_TX, positions_T + 1, attention, plan)


def _shifted_context(clean: Models) -> Models:
    drafter = _copied(clean)
    drafter.__class__ = _ShiftedContext
    return replace(clean, drafter=drafter)


@dataclass(frozen=True, slots=True)
class _LateMarkov:
    """Sees the token before the one before."""

    inner: Markov

    @property
    def w1_VR(self) -> Tensor:
        return self.inner.w1_VR

    def start(self, num_requests: int) -> tuple[Tensor, Tensor | None]:
        return self.inner.start(num_requests), None

    def step(
        self, state: tuple[Tensor, Tensor | None], previous_B: Tensor, hidden_BH: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        state_BR, before_B = state
        seen_B = previous_B if before_B is None else before_B
        bias_BV, state_BR = self.inner.step(state_BR, seen_B, hidden_BH)
        return bias_BV, (state_BR, previous_B)


def _late_markov(clean: Models) -> Models:
    drafter = _copied(clean)
    head = drafter._head
    assert isinstance(head, DSparkHead)
    assert head.markov is not None
    drafter._head = DSparkHead(_LateMarkov(head.markov), head.confidence)  # type: ignore[arg-type]
    return replace(clean, drafter=drafter)


def write_stranger(directory: Path, drafter: Path, target_fingerprint: str | None) -> None:
    """Write a drafter for another target: for ours with its hidden units in another order.

    That target says what ours says, and this drafter drafts with it what the given one drafts with ours. It fits ours
    in every shape.
    """
    tensors = load_file(drafter / "model.safetensors")
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    config["target_fingerprint"] = target_fingerprint
    order = torch.randperm(config["hidden_size"], generator=torch.Generator().manual_seed(0))
    num_taps = tensors["fc.weight"].shape[1] // len(order)
    taps = torch.cat([order + tap * len(order) for tap in range(num_taps)])
    moved = {}
    for name, tensor in tensors.items():
        if name == "fc.weight":
            moved[name] = tensor[order][:, taps]
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            moved[name] = tensor[order]
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            moved[name] = tensor
        else:
            moved[name] = tensor[..., order]
    save_drafter(directory, config, moved)


def _stranger(clean: Models) -> Models:
    """Loaded with our target; its checkpoint does not say whose it is, or it would be refused."""
    assert clean.pair.drafter_path is not None
    with tempfile.TemporaryDirectory() as directory:
        write_stranger(Path(directory), clean.pair.drafter_path, target_fingerprint=None)
        spec = PairSpec(name="stranger", target=str(clean.pair.target_path), drafter=directory)
        return load_models(WorkerConfig(role="aggregated", pair=spec))


def _inject(fault: Fault) -> Callable[[ReplayingPair], None]:
    def bend(pair: ReplayingPair) -> None:
        pair.context.inject(fault)
        pair.generation.inject(fault)

    return bend


Rows = Callable[[Items[Sequence]], PageTable]


def _bend_rows(pair: ReplayingPair, bent: Callable[[Items[Sequence], PageTable], PageTable]) -> None:
    """Let the generation worker read another page table of the drafter's than its ledger's."""
    runner = pair.generation._runner
    right: Rows = runner.draft_rows
    runner.draft_rows = lambda sequences: bent(sequences, right(sequences))  # type: ignore[method-assign]


def _anothers_context(pair: ReplayingPair) -> None:
    """Each request of a step has the next one's row."""
    _bend_rows(pair, lambda _, rows: np.roll(rows, 1, axis=0))


def _dropped_on_a_hit(pair: ReplayingPair) -> None:
    """The pages that a request found in the prefix cache are the target's alone."""

    def bent(sequences: Items[Sequence], rows: PageTable) -> PageTable:
        for row, sequence in zip(rows, sequences, strict=True):
            reservation = pair.outcomes[sequence.request_id].reservation
            assert reservation is not None
            row[: reservation.first_position // pair.generation._limits.page_size] = DUMMY_PAGE
        return rows

    _bend_rows(pair, bent)


def _stale_after_preemption(pair: ReplayingPair) -> None:
    """A request that comes back is given the row that it had before it went, whoever has those pages now."""
    before: dict[RequestId, PageTable] = {}

    def bent(sequences: Items[Sequence], rows: PageTable) -> PageTable:
        first_runs = {answer.runs[-1]: answer.runs[0] for answer in pair.answers}
        for row, sequence in zip(rows, sequences, strict=True):
            first_run = first_runs[sequence.request_id]
            if first_run == sequence.request_id:
                before[first_run] = row.copy()
            else:
                stale = before[first_run]
                row[stale != DUMMY_PAGE] = stale[stale != DUMMY_PAGE]
        return rows

    _bend_rows(pair, bent)


def _wrong_page_factor(pair: ReplayingPair) -> None:
    """The generation worker takes page ids for entries of a table that counts layers."""
    attention = pair.generation._runner._draft_attention
    assert isinstance(attention, TorchPagedAttention)
    attention._rows_per_page //= attention._geometry.num_layers


SWAPPED_SLOTS = Plant(
    "slot convention swapped",
    models=_with_config(lambda config: {"sample_from_anchor": not config.sample_from_anchor}),
)
ANOTHERS_CONTEXT = Plant("another request's context", bend=_anothers_context)
MISSING_CONTEXT = Plant("context missing", bend=_inject(Fault.EMPTY_CONTEXT))

PLANTS = (
    SWAPPED_SLOTS,
    replace(SWAPPED_SLOTS, pair="tiny, DSpark"),
    Plant(
        "taps off by one",
        models=_with_config(lambda config: {"tap_layer_ids": tuple(t + 1 for t in config.tap_layer_ids)}),
    ),
    Plant("last tap taken after the final norm", models=_normed_tap),
    Plant("context positions + 1", models=_shifted_context),
    MISSING_CONTEXT,
    Plant("all requests on the dummy slot", bend=_inject(Fault.DUMMY_SLOT)),
    ANOTHERS_CONTEXT,
    Plant("wrong page factor", bend=_wrong_page_factor),
    Plant("context stale after preemption", scenario="preempted", bend=_stale_after_preemption),
    Plant("draft pages dropped on a prefix hit", scenario="asked twice", bend=_dropped_on_a_hit),
    Plant(
        "mask token wrong",
        models=_with_config(lambda config: {"mask_token_id": config.mask_token_id - 1}),
    ),
    Plant("Markov head off by one", pair="successor, DSpark", models=_late_markov),
    Plant("drafter of another target", models=_stranger),
    Plant("drafter of another target, on the context worker alone", models=_stranger, one_sided=True),
)
