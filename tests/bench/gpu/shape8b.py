"""A target of an 8B model's shape and a five-layer drafter of blocks of 16, random weights, made on the device.

What a step costs depends on shapes alone. The vocabulary is an argument: the output head is a twelfth of the target's
weights and more than a third of the drafter's when it has 151,936 tokens, as Qwen3-8B has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafter.config import DrafterConfig
from drafter.dflash import BlockDrafter, DraftLayerWeights, DraftWeights
from drafter.layers import RopeParameters
from drafter.linear import Linear
from workers.assembly import Models
from workers.backend import Backend, make_backend
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder, DecoderWeights, LayerWeights
from workers.models.mlp import DenseMlp
from workers.pairs import ModelPair

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 4096, 32, 8, 128, 12288
LAYERS, DRAFT_LAYERS, BLOCK = 36, 5, 16
NUM_TAPS = 5
VOCAB = 151936


@dataclass(frozen=True)
class Shape:
    """Sizes that floors are computed from. Weights counted are those that a step reads in whole."""

    num_layers: int = LAYERS
    draft_layers: int = DRAFT_LAYERS
    vocab_size: int = VOCAB

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers 1, 9, 17, 25 and 33 of 36."""
        return tuple(1 + index * (self.num_layers - 4) // (NUM_TAPS - 1) for index in range(NUM_TAPS))

    @property
    def layer_weights(self) -> int:
        return HIDDEN * (HEADS + 2 * KV_HEADS) * HEAD_DIM + HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * INNER

    @property
    def head_weights(self) -> int:
        return self.vocab_size * HIDDEN

    @property
    def context_weights(self) -> int:
        """What turns taps into the drafter's context: part of every verification."""
        return NUM_TAPS * HIDDEN * HIDDEN + self.draft_layers * 2 * KV_HEADS * HEAD_DIM * HIDDEN

    @property
    def target_weights(self) -> int:
        return self.num_layers * self.layer_weights + self.head_weights

    @property
    def draft_weights(self) -> int:
        return self.draft_layers * self.layer_weights + self.head_weights

    def kv_bytes_per_token(self, num_layers: int) -> int:
        return num_layers * 2 * KV_HEADS * HEAD_DIM * 2


def models(shape: Shape = Shape(), *, drafting: bool = True, dtype: torch.dtype = torch.bfloat16) -> Models:
    """Target and drafter on the first GPU, with the back end that serves them there."""
    device = torch.device("cuda", 0)
    backend = make_backend(device, dtype, [HEAD_DIM])
    generator = torch.Generator(device).manual_seed(1)

    def random(*size: int) -> Tensor:
        tensor = torch.empty(size, dtype=dtype, device=device)
        return tensor.normal_(0.0, size[-1] ** -0.5, generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    qkv_rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    embed = random(shape.vocab_size, HIDDEN)
    head = Linear(random(shape.vocab_size, HIDDEN))
    layers = tuple(
        LayerWeights(
            input_norm=ones(HIDDEN),
            qkv=Linear(random(qkv_rows, HIDDEN)),
            q_norm=ones(HEAD_DIM),
            k_norm=ones(HEAD_DIM),
            output=Linear(random(HIDDEN, HEADS * HEAD_DIM)),
            post_attention_norm=ones(HIDDEN),
            mlp=DenseMlp(Linear(random(2 * INNER, HIDDEN)), Linear(random(HIDDEN, INNER)), backend.ops),
        )
        for _ in range(shape.num_layers)
    )
    weights = DecoderWeights(embed=embed, layers=layers, final_norm=ones(HIDDEN), lm_head=head, tied=False)
    decoder = Decoder(_target_config(shape), weights, "random 8B", backend.ops)
    pair = ModelPair("random-8b", Path(), None)
    if not drafting:
        return Models(pair, decoder, None, None, backend)
    drafter = _drafter(shape, random, ones, embed, head, backend)
    return Models(pair, decoder, drafter, "random drafter", backend)


def _drafter(  # type: ignore[no-untyped-def]
    shape: Shape, random, ones, embed: Tensor, head: Linear, backend: Backend
) -> BlockDrafter:
    layers = tuple(
        DraftLayerWeights(
            input_norm_H=ones(HIDDEN),
            qkv=Linear(random((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)),
            q_norm_D=ones(HEAD_DIM),
            k_norm_D=ones(HEAD_DIM),
            o=Linear(random(HIDDEN, HEADS * HEAD_DIM)),
            post_norm_H=ones(HIDDEN),
            gate_up=Linear(random(2 * INNER, HIDDEN)),
            down=Linear(random(HIDDEN, INNER)),
        )
        for _ in range(shape.draft_layers)
    )
    weights = DraftWeights(
        fc_HX=random(HIDDEN, NUM_TAPS * HIDDEN),
        hidden_norm_H=ones(HIDDEN),
        norm_H=ones(HIDDEN),
        layers=layers,
        embed_VH=embed,
        lm_head=head,
    )
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": shape.draft_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * shape.draft_layers,
        "num_target_layers": shape.num_layers,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": list(shape.taps)},
    }
    return BlockDrafter(DrafterConfig.from_dict(raw), weights, ops=backend.ops)


def _target_config(shape: Shape) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=shape.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=shape.num_layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        rope=RopeParameters(1e6),
        max_position_embeddings=40960,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(2,),
    )
