"""DSpark's loss against plain autograd, its trained form against the served one, and a run that learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from drafter.checkpoint import TargetFacts, load_drafter
from drafter.choice import ChoiceRule
from drafter.config import DrafterConfig, MarkovKind
from drafter.proposal import KeyedChoice
from drafter.training.checkpoint import HeadPlan, drafter_config, read_network, save_network
from drafter.training.copycat import END, MASK, SHAPE
from drafter.training.corpus import Corpus
from drafter.training.fit import Recipe, batch_loss, fit
from drafter.training.llama import Llama
from drafter.training.measure import confidence_records
from drafter.training.network import DraftNetwork
from drafter.training.plan import plan_of
from drafter.training.sequential_loss import PUBLISHED, Mixture, Slots, dspark_loss, mixture
from drafter.training.teacher import Answer
from tests.drafter.plain import Paged

KINDS: list[MarkovKind] = ["vanilla", "gated", "rnn"]
TAPS = (0, 1)


def config_of(kind: MarkovKind = "vanilla", rank: int = 5) -> dict[str, object]:
    return drafter_config(
        SHAPE,
        num_layers=1,
        block_size=4,
        tap_layer_ids=TAPS,
        mask_token_id=MASK,
        bos_token_id=END,
        eos_token_id=END,
        target_fingerprint="test",
        heads=HeadPlan(rank, kind),
    )


def network_of(kind: MarkovKind = "vanilla", rank: int = 5, std: float | None = None) -> DraftNetwork:
    torch.manual_seed(1)
    network = DraftNetwork(DrafterConfig.from_dict(config_of(kind, rank)), SHAPE.hidden_size)
    if std is not None:
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=std)
    return network


def test_the_chunked_loss_and_its_gradients_equal_plain_autograd() -> None:
    torch.manual_seed(4)
    hidden, latents = torch.randn(10, 8, requires_grad=True), torch.randn(10, 3, requires_grad=True)
    w2, confidence = torch.randn(30, 3, requires_grad=True), torch.randn(10, requires_grad=True)
    embedding, target = torch.randn(30, 8), torch.randn(10, 8)
    labels, weights = torch.randint(0, 30, (10,)), torch.rand(10)
    leaves = (hidden, latents, w2, confidence)
    loss = dspark_loss(
        Slots(hidden, latents, confidence, target, labels, weights), embedding, w2, PUBLISHED, chunk=4
    )
    found = torch.autograd.grad(loss, leaves)

    drafted = hidden @ embedding.T + latents @ w2.T
    distance = (drafted.softmax(-1) - (target @ embedding.T).softmax(-1)).abs().sum(-1)
    each = 0.1 * F.cross_entropy(drafted, labels, reduction="none") + 0.9 * distance
    foretold = (1 - distance / 2).detach()
    each = each + F.binary_cross_entropy_with_logits(confidence, foretold, reduction="none")
    expected = (each * weights).sum() / weights.sum()
    torch.testing.assert_close(loss, expected)
    for ours, plain in zip(found, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_run_begins_with_cross_entropy_and_ends_with_the_published_mixture() -> None:
    assert mixture(0.0) == Mixture(1.0, 0.0, 1.0)
    last = mixture(1.0)
    assert (last.ce, last.l1, last.confidence) == pytest.approx((0.1, 0.9, 1.0))
    assert mixture(0.2).ce > mixture(0.3).ce > PUBLISHED.ce


def test_the_target_is_compared_at_the_position_that_predicts_the_slots_token() -> None:
    """A drafter that is the target's own last step has no distance to it: planted by an embedding that says so."""
    torch.manual_seed(0)
    target = Llama(SHAPE).requires_grad_(False)
    corpus = Corpus.of([Answer(list(range(60, 100)), 20)] * 2)
    batch = next(corpus.batches(128, seed=1))
    network = network_of(rank=1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    final = target(batch.tokens_BS)
    seen: list[torch.Tensor] = []

    def planted(
        taps: torch.Tensor,
        anchors: torch.Tensor,
        ids: torch.Tensor,
        first: torch.Tensor,
        embedding: torch.Tensor,
    ) -> torch.Tensor:
        rows = (anchors[..., None] + torch.arange(4)).clamp(max=final.shape[1] - 1)
        seen.append(rows)
        return torch.stack([final[b][rows[b]] for b in range(len(rows))])

    network.forward = planted  # type: ignore[method-assign, assignment]
    loss = batch_loss(network, target, batch, 0.2, torch.Generator().manual_seed(1), Mixture(0.0, 1.0, 0.0))
    assert seen
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_trained_form_drafts_what_the_served_one_does(tmp_path: Path, kind: MarkovKind) -> None:
    save_network(tmp_path, network_of(kind, std=0.2), config_of(kind))
    network = read_network(tmp_path, SHAPE.hidden_size)
    torch.manual_seed(2)
    embedding = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size)
    facts = TargetFacts(
        hidden_size=SHAPE.hidden_size,
        vocab_size=SHAPE.vocab_size,
        num_layers=SHAPE.num_layers,
        embed_weight=embedding,
        lm_head_weight=embedding,
        fingerprint="test",
    )
    paged = Paged(load_drafter(tmp_path, facts), torch.float32)
    taps = torch.randn(1, 21, len(TAPS) * SHAPE.hidden_size)
    paged.append(0, taps[0, :20], 0)
    anchors, ids = torch.tensor([[20]]), torch.tensor([[65]])
    with torch.no_grad():
        hidden = network(taps, anchors, ids, torch.zeros(1), embedding)
        ours = network.draft(hidden, ids, embedding)
        assert network.markov_head is not None
        assert network.confidence_head is not None
        previous = torch.cat((ids[..., None], ours[..., :-1]), dim=-1)
        confidences = network.confidence_head(hidden, network.markov_head.markov_w1(previous)).sigmoid()
    proposal = paged.choose([0], [65], [20], 4, KeyedChoice([ChoiceRule()], [21]))
    assert ours[0, 0].tolist() == proposal.tokens_BK[0].tolist()
    assert proposal.confidences_BK is not None
    torch.testing.assert_close(proposal.confidences_BK[0], confidences[0, 0], atol=1e-4, rtol=1e-4)


def test_latents_of_whole_blocks_are_the_steps_latents() -> None:
    network = network_of("rnn", std=0.3)
    assert network.markov_head is not None
    hidden, previous = torch.randn(2, 3, 4, SHAPE.hidden_size), torch.randint(0, 200, (2, 3, 4))
    state = network.markov_head.start(hidden[:, :, 0])
    whole = network.markov_head.latents(previous, hidden)
    for slot in range(4):
        latent, state = network.markov_head.step(state, previous[..., slot], hidden[:, :, slot])
        torch.testing.assert_close(whole[:, :, slot], latent)


def test_a_short_run_learns_and_its_heads_with_it() -> None:
    """With cross-entropy alone: the target is random and what is taught is not its own."""
    torch.manual_seed(0)
    target = Llama(SHAPE).requires_grad_(False)
    answers = [Answer([*range(40 + i, 60 + i), *[65, 66, 67, 68] * 4], 20) for i in range(4)]
    batch = next(Corpus.of(answers).batches(256, seed=1))
    network = network_of("gated")
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(30):
        loss = batch_loss(network, target, batch, 0.2, generator, Mixture(1.0, 0.0, 1.0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    for name, parameter in network.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_training_passes_the_mixture_of_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Llama(SHAPE).requires_grad_(False)
    corpus = Corpus.of([Answer(list(range(60, 90)), 20)] * 2)
    recipe = Recipe(steps=3, positions=64, anchor_share=0.1, learning_rate=1e-3, warmup_steps=1)
    seen: list[float] = []

    def note(progress: float) -> Mixture:
        seen.append(progress)
        return PUBLISHED

    monkeypatch.setattr("drafter.training.fit.mixture", note)
    fit(network_of(), target, corpus, recipe, lambda _: None)
    assert seen == pytest.approx([0.0, 1 / 3, 2 / 3])


def test_confidences_are_recorded_with_what_became_of_their_blocks() -> None:
    torch.manual_seed(0)
    target = Llama(SHAPE).requires_grad_(False)
    answers = [Answer(list(range(60, 60 + length)), 20) for length in (24, 25, 50)]
    network = network_of("rnn", std=0.3)
    corpus = Corpus.of(answers)
    logits, accepted = confidence_records(network, target, corpus, rows=2, anchors_each=6)
    assert logits.shape == (12, 4)  # the first answer has no anchor with 4 tokens behind it
    assert set(accepted.tolist()) <= set(range(5))
    taps = target.taps(torch.tensor([answers[1].token_ids]), TAPS)
    anchors, ids = torch.tensor([[20]]), torch.tensor([[80]])
    with torch.no_grad():
        hidden = network(taps, anchors, ids, torch.zeros(1), target.embedding_VH)
        drafts = network.draft(hidden, ids, target.embedding_VH)
        said = network.confidence_logits(hidden, ids, drafts)
    assert said is not None
    assert logits[0] == pytest.approx(said[0, 0].tolist(), abs=1e-4)
    truth = [81, 82, 83, 84]
    right = 0
    while right < 4 and drafts[0, 0, right] == truth[right]:
        right += 1
    assert accepted[0] == right


def test_a_sample_of_a_corpus_has_whole_sequences() -> None:
    corpus = Corpus.of([Answer([i] * (i + 3), 2) for i in range(1, 10)])
    some = corpus.sample(4, seed=1)
    assert len(some) == 4
    for i in range(4):
        ids = some.token_ids[some.starts[i] : some.starts[i + 1]]
        assert ids.tolist() == [ids[0]] * (int(ids[0]) + 3)
    assert len(corpus.sample(99, seed=1)) == 9


def test_the_smollm2_plan_stays_within_sixteen_megabytes() -> None:
    plan = plan_of("smollm2", "dspark")
    smollm2 = replace(
        SHAPE,
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
    )
    config = drafter_config(
        replace(smollm2, head_dim=64),
        num_layers=plan.num_layers,
        block_size=plan.block_size,
        tap_layer_ids=plan.tap_layer_ids,
        mask_token_id=plan.mask_token_id,
        bos_token_id=1,
        eos_token_id=2,
        target_fingerprint="",
        heads=plan.heads,
        intermediate_size=plan.intermediate_size,
    )
    with torch.device("meta"):
        network = DraftNetwork(DrafterConfig.from_dict(config), 576)
    size = sum(2 * parameter.numel() for parameter in network.parameters())
    assert 15e6 < size < 16e6
    assert network.config.max_draft_tokens == plan_of("smollm2", "dflash").block_size - 1
