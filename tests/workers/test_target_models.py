from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tests.workers.paged import PagedDecoder
from tests.workers.tiny_checkpoints import (
    config_of,
    dense_forward,
    random_tensors,
    write_directory,
    write_gguf,
)
from workers.models.load import load_decoder

FAMILIES = ["llama", "qwen2", "qwen3"]
ALL_FAMILIES = [*FAMILIES, "qwen3_moe"]
TOKENS = [
    3,
    14,
    15,
    9,
    2,
    6,
    5,
    35,
    8,
    9,
    7,
    9,
    32,
    38,
    46,
    2,
    60,
    43,
    38,
    32,
    7,
    9,
    50,
    28,
    8,
    41,
    9,
    7,
    16,
    9,
    39,
]


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_logits_of_a_directory_equal_the_dense_definition(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    tensors = random_tensors(config)
    decoder = load_decoder(write_directory(tmp_path, config, tensors), torch.float64)
    expected, _ = dense_forward(config, tensors, TOKENS)
    torch.testing.assert_close(PagedDecoder(decoder).logits({0: TOKENS}), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_gguf_file_equal_the_dense_definition(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    tensors = random_tensors(config)
    decoder = load_decoder(write_gguf(tmp_path / "m.gguf", config, tensors), torch.float64)
    # GGUF keeps eps and theta in float32
    expected, _ = dense_forward(config | {"rms_norm_eps": decoder.config.rms_norm_eps}, tensors, TOKENS)
    torch.testing.assert_close(PagedDecoder(decoder).logits({0: TOKENS}), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16]
)
def test_a_quantized_gguf_file_computes_with_its_dequantized_weights(
    kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    config = config_of("llama")
    tensors = random_tensors(config)
    decoder = load_decoder(write_gguf(tmp_path / "m.gguf", config, tensors, kind), torch.float64)
    rounded = {
        name: torch.from_numpy(dequantize(quantize(tensor.numpy(), kind), kind))
        if tensor.ndim == 2
        else tensor
        for name, tensor in tensors.items()
    }
    expected, _ = dense_forward(config | {"rms_norm_eps": decoder.config.rms_norm_eps}, rounded, TOKENS)
    torch.testing.assert_close(PagedDecoder(decoder).logits({0: TOKENS}), expected, rtol=0, atol=1e-11)


def test_shards_and_one_file_hold_the_same_model(tmp_path: Path) -> None:
    config = config_of("qwen3")
    tensors = random_tensors(config)
    one = load_decoder(write_directory(tmp_path / "one", config, tensors), torch.float64)
    three = load_decoder(write_directory(tmp_path / "three", config, tensors, num_shards=3), torch.float64)
    assert torch.equal(PagedDecoder(one).logits({0: TOKENS}), PagedDecoder(three).logits({0: TOKENS}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tied_head_is_the_embedding(dtype: torch.dtype, tmp_path: Path) -> None:
    config = config_of("llama", tie_word_embeddings=True)
    tensors = random_tensors(config)
    decoder = load_decoder(write_directory(tmp_path, config, tensors), dtype)
    assert decoder.lm_head_weight is decoder.embed_weight
    expected, _ = dense_forward(config, tensors, TOKENS)
    found = PagedDecoder(decoder).logits({0: TOKENS}).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-11)


def test_an_untied_head_weight_reads_back_as_it_was_stored(tmp_path: Path) -> None:
    config = config_of("llama")
    tensors = random_tensors(config)
    decoder = load_decoder(write_directory(tmp_path, config, tensors), torch.float32)
    assert torch.equal(decoder.lm_head_weight, tensors["lm_head.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_the_dense_definition(dtype: torch.dtype, tmp_path: Path) -> None:
    config = config_of("qwen3")
    tensors = random_tensors(config)
    decoder = load_decoder(write_directory(tmp_path, config, tensors), dtype)
    expected, _ = dense_forward(config, tensors, TOKENS)
    found = PagedDecoder(decoder).logits({0: TOKENS})
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.15)


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("cuts", [[1, 2, 31], [4, 8, 31], [15, 16, 17, 31], [30, 31]])
def test_a_prompt_in_chunks_scores_as_in_one_piece(family: str, cuts: list[int], tmp_path: Path) -> None:
    config = config_of(family)
    tensors = random_tensors(config)
    decoder = load_decoder(write_directory(tmp_path, config, tensors), torch.float64)
    paged = PagedDecoder(decoder, page_size=4)
    pieces = [paged.logits({0: TOKENS[a:b]}) for a, b in zip([0, *cuts], cuts, strict=False)]
    expected, _ = dense_forward(config, tensors, TOKENS)
    torch.testing.assert_close(torch.cat(pieces), expected, rtol=0, atol=1e-11)


def test_requests_of_a_mixed_step_do_not_see_each_other(tmp_path: Path) -> None:
    config = config_of("llama")
    tensors = random_tensors(config)
    decoder = load_decoder(write_directory(tmp_path, config, tensors), torch.float64)
    paged = PagedDecoder(decoder, num_requests=4)
    prompts = {0: TOKENS[:7], 1: TOKENS[5:28], 2: TOKENS[3:4], 3: TOKENS[10:17]}
    paged.step(prompts)
    step = {
        0: [4],
        3: [11, 12, 13],
        1: [5],
        2: [8, 9, 10, 11, 12],
    }  # decode, verify and a chunk, out of order
    found = paged.logits(step).split([len(tokens) for tokens in step.values()])
    for request, logits in zip(step, found, strict=True):
        expected, _ = dense_forward(config, tensors, [*prompts[request], *step[request]])
        torch.testing.assert_close(logits, expected[-len(step[request]) :], rtol=0, atol=1e-11)


def test_taps_are_the_outputs_of_the_layers_asked_for_in_that_order(tmp_path: Path) -> None:
    config = config_of("qwen2")
    tensors = random_tensors(config)
    decoder = load_decoder(write_directory(tmp_path, config, tensors), torch.float64)
    _, outputs = dense_forward(config, tensors, TOKENS)
    taps = PagedDecoder(decoder).step({0: TOKENS}, taps=(2, -1, 0)).taps_TX
    embedded = decoder.embed_weight[TOKENS]
    torch.testing.assert_close(
        taps, torch.cat([outputs[2], embedded, outputs[0]], dim=-1), rtol=0, atol=1e-11
    )


def test_without_taps_none_are_kept(tmp_path: Path) -> None:
    config = config_of("llama")
    decoder = load_decoder(write_directory(tmp_path, config, random_tensors(config)), torch.float32)
    assert PagedDecoder(decoder).step({0: [1]}).taps_TX is None


def test_a_tap_past_the_last_layer_is_refused(tmp_path: Path) -> None:
    config = config_of("llama")
    decoder = load_decoder(write_directory(tmp_path, config, random_tensors(config)), torch.float32)
    with pytest.raises(ValueError, match=r"tap layer 3 is outside -1 \.\. 2"):
        PagedDecoder(decoder).step({0: [1]}, taps=(3,))


def test_the_fingerprint_tells_checkpoints_apart_and_not_their_place_or_dtype(tmp_path: Path) -> None:
    config = config_of("llama")
    tensors = random_tensors(config)
    here = load_decoder(write_directory(tmp_path / "here", config, tensors), torch.float32)
    there = load_decoder(write_directory(tmp_path / "there", config, tensors), torch.float64)
    assert here.fingerprint == there.fingerprint
    other = random_tensors(config, seed=1)
    assert (
        load_decoder(write_directory(tmp_path / "b", config, other), torch.float32).fingerprint
        != here.fingerprint
    )
    scaled = config | {"rope_theta": 20000.0}
    assert (
        load_decoder(write_directory(tmp_path / "c", scaled, tensors), torch.float32).fingerprint
        != here.fingerprint
    )
    first = load_decoder(write_gguf(tmp_path / "a.gguf", config, tensors), torch.float32)
    second = load_decoder(write_gguf(tmp_path / "b.gguf", config, other), torch.float32)
    assert first.fingerprint != second.fingerprint


def test_logits_pass_gradients_to_the_hidden_states(tmp_path: Path) -> None:
    """A drafter is trained through the frozen head."""
    config = config_of("llama")
    tensors = random_tensors(config)
    decoder = load_decoder(write_directory(tmp_path, config, tensors), torch.float32)
    hidden = torch.randn(2, 64, requires_grad=True)
    decoder.logits(hidden).sum().backward()
    expected = tensors["lm_head.weight"].sum(0).expand(2, -1)
    torch.testing.assert_close(hidden.grad, expected)
