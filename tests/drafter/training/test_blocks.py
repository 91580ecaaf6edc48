"""What a block may see and what it is scored on."""

from __future__ import annotations

import math

import pytest
import torch

from drafter.config import DrafterConfig
from drafter.training.blocks import context_mask, cut_blocks, sample_anchors
from drafter.training.checkpoint import drafter_config
from drafter.training.copycat import END, MASK, SHAPE
from drafter.training.network import DraftNetwork, weighted_cross_entropy


@pytest.fixture(scope="module")
def network() -> DraftNetwork:
    config = drafter_config(
        SHAPE,
        num_layers=2,
        block_size=4,
        tap_layer_ids=(0, 1),
        mask_token_id=MASK,
        bos_token_id=END,
        eos_token_id=END,
        target_fingerprint="test",
    )
    torch.manual_seed(1)
    made = DraftNetwork(DrafterConfig.from_dict(config), SHAPE.hidden_size)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def _slots(
    network: DraftNetwork, taps: torch.Tensor, anchors: list[int], first_visible: int = 0
) -> torch.Tensor:
    torch.manual_seed(2)
    embedding = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size)
    ids = torch.arange(len(anchors))[None] + 60
    with torch.no_grad():
        return network(taps, torch.tensor([anchors]), ids, torch.tensor([first_visible]), embedding)


def test_a_block_sees_context_strictly_before_its_anchor(network: DraftNetwork) -> None:
    taps = torch.randn(1, 12, 2 * SHAPE.hidden_size)
    before = _slots(network, taps, [7])
    for position in range(12):
        changed = taps.clone()
        changed[0, position] += 1.0
        differs = not torch.equal(_slots(network, changed, [7]), before)
        assert differs == (position < 7), position


def test_hidden_context_changes_nothing_and_is_really_hidden(network: DraftNetwork) -> None:
    taps = torch.randn(1, 12, 2 * SHAPE.hidden_size)
    changed = taps.clone()
    changed[0, :4] += 1.0
    assert torch.equal(_slots(network, taps, [7], 4), _slots(network, changed, [7], 4))
    assert not torch.allclose(_slots(network, taps, [7], 4), _slots(network, taps, [7], 0))


def test_blocks_do_not_see_each_other_but_their_own_slots_do(network: DraftNetwork) -> None:
    taps = torch.randn(1, 12, 2 * SHAPE.hidden_size)
    alone = _slots(network, taps, [5])
    beside_another = _slots(network, taps, [5, 8])
    torch.testing.assert_close(beside_another[:, :1], alone)
    torch.manual_seed(2)
    embedding = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size)
    other_anchor = network(taps, torch.tensor([[5]]), torch.tensor([[99]]), torch.zeros(1), embedding)
    assert not torch.allclose(other_anchor[0, 0, 3], alone[0, 0, 3])  # the last slot sees the first


def test_context_mask_counts_positions() -> None:
    mask = context_mask(torch.tensor([[0, 3]]), torch.tensor([1]), 5)
    assert mask.tolist() == [[[False] * 5, [False, True, True, False, False]]]


def test_labels_are_the_following_tokens_and_weights_decay_by_slot() -> None:
    tokens = torch.arange(100, 110)[None]
    blocks = cut_blocks(tokens, torch.tensor([8]), torch.tensor([[2, 6]]), 4)
    assert blocks.labels_BAK.tolist() == [[[0, 103, 104, 105], [0, 107, 0, 0]]]
    decay = [1.0, math.exp(-1 / 4), math.exp(-2 / 4)]
    assert blocks.weights_BAK[0, 0].tolist() == pytest.approx([0.0, *decay])
    assert blocks.weights_BAK[0, 1].tolist() == pytest.approx([0.0, 1.0, 0.0, 0.0])


def test_shifted_slots_predict_one_position_later_from_the_token_before() -> None:
    tokens = torch.arange(100, 110)[None]
    blocks = cut_blocks(tokens, torch.tensor([8]), torch.tensor([[2, 6]]), 3, first_slot=0)
    assert blocks.labels_BAK.tolist() == [[[103, 104, 105], [107, 0, 0]]]
    assert blocks.previous_BAK[0, 0].tolist() == [102, 103, 104]
    assert blocks.previous_BAK[0, 1, 0] == 106
    decay = [1.0, math.exp(-1 / 4), math.exp(-2 / 4)]
    assert blocks.weights_BAK[0, 0].tolist() == pytest.approx(decay)
    assert blocks.weights_BAK[0, 1].tolist() == pytest.approx([1.0, 0.0, 0.0])


def test_anchors_lie_in_the_answer_and_leave_a_label() -> None:
    generator = torch.Generator().manual_seed(3)
    anchors = sample_anchors(torch.tensor([4, 10]), torch.tensor([6, 30]), 500, generator)
    assert anchors[0].unique().tolist() == [4]
    assert anchors[1].unique().tolist() == list(range(10, 29))


def test_chunked_loss_and_its_gradient_equal_plain_cross_entropy() -> None:
    torch.manual_seed(4)
    hidden = torch.randn(10, 16, requires_grad=True)
    weight, labels, weights = torch.randn(30, 16), torch.randint(0, 30, (10,)), torch.rand(10)
    loss = weighted_cross_entropy(hidden, weight, labels, weights, chunk=4)
    (gradient,) = torch.autograd.grad(loss, hidden)
    plain = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="none")
    expected = (plain * weights).sum() / weights.sum()
    (expected_gradient,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
