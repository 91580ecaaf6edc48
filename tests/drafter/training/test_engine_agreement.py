"""The forms that train and generate agree with the forms that serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter.checkpoint import TargetFacts, load_drafter
from drafter.config import DrafterConfig
from drafter.training.checkpoint import drafter_config, read_network, save_network
from drafter.training.copycat import END, MASK, SHAPE, save_copycat
from drafter.training.llama import Llama
from drafter.training.network import DraftNetwork
from drafter.training.targets import load_target
from drafter.training.teacher import Teacher
from kvmanager.layout import KvGeometry
from workers.attention.torch import TorchPagedAttention
from workers.models.load import load_decoder
from workers.storage import KvStorage

_TAPS = (0, 2)
_PAGES = 8


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("pair") / "target"
    save_copycat(path, Llama(SHAPE))
    return path


def _attention(num_layers: int) -> TorchPagedAttention:
    geometry = KvGeometry(
        num_layers=num_layers,
        num_kv_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        page_size=16,
        element_bytes=4,
    )
    return TorchPagedAttention(KvStorage(geometry, _PAGES, torch.float32, torch.device("cpu")))


def test_hidden_states_taps_and_proposals_equal_the_serving_engines(
    target_path: Path, tmp_path: Path
) -> None:
    model, fingerprint = load_target(target_path, torch.float32, torch.device("cpu"))
    config = drafter_config(
        SHAPE,
        num_layers=2,
        block_size=8,
        tap_layer_ids=_TAPS,
        mask_token_id=MASK,
        bos_token_id=END,
        eos_token_id=END,
        target_fingerprint=fingerprint,
    )
    network = DraftNetwork(DrafterConfig.from_dict(config), SHAPE.hidden_size)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save_network(tmp_path / "drafter", network, config)
    network = read_network(tmp_path / "drafter", SHAPE.hidden_size)

    decoder = load_decoder(target_path, torch.float32)
    served = load_drafter(
        tmp_path / "drafter",
        TargetFacts(
            hidden_size=SHAPE.hidden_size,
            vocab_size=SHAPE.vocab_size,
            num_layers=SHAPE.num_layers,
            embed_weight=decoder.embed_weight,
            lm_head_weight=decoder.lm_head_weight,
            fingerprint=decoder.fingerprint,
        ),
    )
    tokens = torch.randint(0, 256, (1, 41))
    anchor = 40
    rows = torch.arange(1, 5, dtype=torch.int32)[None]
    positions = torch.arange(anchor)
    target_attention = _attention(SHAPE.num_layers)
    plan = target_attention.plan(rows, [anchor], [anchor], causal=True)
    out = decoder.forward(tokens[0, :anchor], positions, target_attention, plan, _TAPS)
    torch.testing.assert_close(model(tokens[:, :anchor])[0], out.hidden_TH, atol=1e-4, rtol=1e-4)
    taps = model.taps(tokens, _TAPS)
    assert out.taps_TX is not None
    torch.testing.assert_close(taps[0, :anchor], out.taps_TX, atol=1e-4, rtol=1e-4)

    draft_attention = _attention(2)
    context_plan = draft_attention.plan(rows, [anchor], [anchor], causal=True)
    served.append_context(out.taps_TX, positions, draft_attention, context_plan)
    block_plan = draft_attention.plan(rows, [8], [anchor + 8], causal=False)
    block_positions = torch.arange(anchor, anchor + 8)
    theirs = served.block(tokens[:, anchor], block_positions, 7, draft_attention, block_plan).logits_BKV
    hidden = network(taps, torch.tensor([[anchor]]), tokens[:, anchor:], torch.zeros(1), model.embedding_VH)
    ours = hidden[0, :, 1:] @ model.embedding_VH.T
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_lockstep_greedy_answers_are_the_models_own_argmax(target_path: Path) -> None:
    model, _ = load_target(target_path, torch.float32, torch.device("cpu"))
    teacher = Teacher(model, max_rows=3, capacity=100, stop_ids=[END], seed=1)
    prompts = [[1, 2, 3], [200, 7, 9, 40, 41], [65] * 70]
    for answer in teacher.answer(prompts, max_new_tokens=20):
        ids = torch.tensor([answer.token_ids])
        best = (model(ids[:, :-1]) @ model.embedding_VH.T).argmax(-1)[0]
        assert answer.token_ids[answer.prompt_length :] == best[answer.prompt_length - 1 :].tolist()
        assert answer.token_ids[-1] == END or len(answer.token_ids) == answer.prompt_length + 20
