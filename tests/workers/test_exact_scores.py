"""A token's score does not depend on what shares its step: the ground under "drafting on = drafting off"."""

from __future__ import annotations

import pytest
import torch

from tests.workers.paged import PagedDecoder
from tests.workers.tiny_checkpoints import config_of, random_tensors, write_directory
from workers.models.decoder import Decoder
from workers.models.load import load_decoder

exact = pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()),
    reason="exactness is established for MKL and oneDNN; elsewhere scores agree to rounding",
)
LENGTHS = [1, 9, 31, 100, 185, 190, 193, 260, 379, 384, 570]


MIXTURE = {"moe_intermediate_size": 300, "num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 2}


@pytest.fixture(
    scope="module",
    params=[("llama", 4, {}), ("llama", 2, {}), ("llama", 1, {}), ("qwen3_moe", 2, MIXTURE)],
    ids=lambda case: f"{case[0]}, {case[1]} kv heads",
)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A float32 decoder wide enough for the kernels real models use; 4 heads share 4, 2 or 1 kv heads."""
    family, kv_heads, changes = request.param
    config = config_of(
        family, hidden_size=256, intermediate_size=1100, num_key_value_heads=kv_heads, head_dim=64,
        max_position_embeddings=1024, **changes,
    )  # fmt: skip
    return load_decoder(
        write_directory(tmp_path_factory.mktemp("wide"), config, random_tensors(config)), torch.float32
    )


def filled(decoder: Decoder) -> tuple[PagedDecoder, list[list[int]]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 61, (len(LENGTHS), 600), generator=generator).tolist()
    paged = PagedDecoder(decoder, page_size=16, max_positions=600, num_requests=len(LENGTHS))
    for request, length in enumerate(LENGTHS):
        paged.step({request: tokens[request][:length]})
    return paged, [tokens[request][length : length + 8] for request, length in enumerate(LENGTHS)]


@exact
def test_verified_tokens_score_as_decoded_ones_bit_for_bit(decoder: Decoder) -> None:
    paged, following = filled(decoder)
    verified = [paged.logits({request: tokens}, commit=False) for request, tokens in enumerate(following)]
    for request, tokens in enumerate(following):
        decoded = torch.cat([paged.logits({request: [token]}) for token in tokens])
        assert torch.equal(decoded, verified[request]), f"after {LENGTHS[request]} tokens"


@exact
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_batched_requests_score_as_alone_bit_for_bit(decoder: Decoder, width: int) -> None:
    paged, following = filled(decoder)
    together = paged.logits(
        {request: tokens[:width] for request, tokens in enumerate(following)}, commit=False
    ).split(width)
    for request, tokens in enumerate(following):
        alone = paged.logits({request: tokens[:width]}, commit=False)
        assert torch.equal(alone, together[request]), f"after {LENGTHS[request]} tokens"


@exact
def test_requests_that_verify_different_numbers_score_as_alone_bit_for_bit(decoder: Decoder) -> None:
    paged, following = filled(decoder)
    widths = [1 + request * 3 % 8 for request in range(len(LENGTHS))]
    step = {request: tokens[: widths[request]] for request, tokens in enumerate(following)}
    together = paged.logits(step, commit=False).split(widths)
    for request, tokens in step.items():
        alone = paged.logits({request: tokens}, commit=False)
        assert torch.equal(alone, together[request]), f"after {LENGTHS[request]} tokens"
