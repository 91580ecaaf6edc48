"""The peer of that bench gets the checkpoint's own weights."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from tests.bench.gpu.against_transformers import their_tensors
from workers.assembly import load_models
from workers.config import PairSpec, WorkerConfig


def test_our_weights_by_their_names_are_those_of_the_checkpoint() -> None:
    models = load_models(WorkerConfig(role="aggregated", pair=PairSpec(name="tiny"), drafting=False))
    found = their_tensors(models.decoder)
    wanted = load_file(models.pair.target_path / "model.safetensors")
    wanted.pop("lm_head.weight", None)  # tied, or told apart by the bench
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
