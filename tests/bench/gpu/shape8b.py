"""A target of an 8B model's shape and a five-layer drafter of blocks of 16, random weights, made on the device.

A rank of several makes its own share and nothing else. Shapes of other sizes are for trying a bench on a CPU.

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
from drafter.ranks import ALONE, Ranks, share_of, share_of_heads, summed, vocabulary_head
from workers.assembly import Models
from workers.backend import Backend, make_backend
from workers.group.ranks import GroupRanks
from workers.models.config import ModelConfig
from workers.models.decoder import Decoder, DecoderWeights, LayerWeights
from workers.models.division import divide
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
    draft_vocab: int = 0  # how many tokens the drafter says, the first; 0 for all
    hidden_size: int = HIDDEN
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    inner: int = INNER

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers 1, 9, 17, 25 and 33 of 36."""
        return tuple(1 + index * (self.num_layers - 4) // (NUM_TAPS - 1) for index in range(NUM_TAPS))

    @property
    def layer_weights(self) -> int:
        attention = self.hidden_size * (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden_size * self.inner

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def context_weights(self) -> int:
        """What turns taps into the drafter's context: part of every verification."""
        kv_rows = self.draft_layers * 2 * self.kv_heads * self.head_dim
        return NUM_TAPS * self.hidden_size * self.hidden_size + kv_rows * self.hidden_size

    @property
    def target_weights(self) -> int:
        return self.num_layers * self.layer_weights + self.head_weights

    @property
    def draft_weights(self) -> int:
        head = (self.draft_vocab or self.vocab_size) * self.hidden_size
        return self.draft_layers * self.layer_weights + head

    def kv_bytes_per_token(self, num_layers: int) -> int:
        return num_layers * 2 * self.kv_heads * self.head_dim * 2


FIRST_GPU = torch.device("cuda", 0)


def models(
    shape: Shape = Shape(),
    *,
    drafting: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = FIRST_GPU,
    ranks: GroupRanks | None = None,
) -> Models:
    """Target and drafter, or the share of `ranks` in them, with the back end that serves them on `device`."""
    among: Ranks = ranks or ALONE
    backend = make_backend(device, dtype, [shape.head_dim])
    make = _Weights(shape, dtype, device, among, backend)
    hidden = shape.hidden_size
    embed = make.own(make.vocabulary, hidden)
    head = vocabulary_head(make.own(make.vocabulary, hidden), shape.vocab_size, among)
    layers = tuple(
        LayerWeights(
            input_norm=make.ones(hidden),
            qkv=make.qkv(),
            q_norm=make.ones(shape.head_dim),
            k_norm=make.ones(shape.head_dim),
            output=make.output(),
            post_attention_norm=make.ones(hidden),
            mlp=DenseMlp(make.gate_up(), make.down(), backend.ops),
        )
        for _ in range(shape.num_layers)
    )
    weights = DecoderWeights(
        embed=embed, layers=layers, final_norm=make.ones(hidden), lm_head=head, tied=False
    )
    division = divide(among, attention_dp=False)
    decoder = Decoder(_target_config(shape), weights, "random 8B", backend.ops, division)
    pair = ModelPair("random-8b", Path(), None)
    if not drafting:
        return Models(pair, decoder, None, None, backend, ranks)
    drafter = _drafter(shape, make, embed, head)
    return Models(pair, decoder, drafter, "random drafter", backend, ranks)


class _Weights:
    """Random weights of one rank. `vocabulary`: its rows of embedding and head."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, ranks: Ranks, backend: Backend
    ) -> None:
        self.ranks, self.backend = ranks, backend
        self._shape, self._dtype, self._device = shape, dtype, device
        self._own, self._common = (torch.Generator(device).manual_seed(seed) for seed in (2 + ranks.rank, 1))
        heads = share_of_heads(shape.heads, shape.kv_heads, ranks)
        self._q_rows, self._kv_rows = heads.num_heads * shape.head_dim, heads.num_kv_heads * shape.head_dim
        inner = share_of("intermediate_size", shape.inner, ranks)
        self._inner = inner.stop - inner.start
        self.vocabulary = -(-shape.vocab_size // ranks.size)

    def own(self, *size: int) -> Tensor:
        return self._random(self._own, size)

    def common(self, *size: int) -> Tensor:
        """The same on all ranks."""
        return self._random(self._common, size)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)

    def qkv(self) -> Linear:
        return Linear(self.own(self._q_rows + 2 * self._kv_rows, self._shape.hidden_size))

    def output(self) -> Linear:
        return summed(self.own(self._shape.hidden_size, self._q_rows), None, self.ranks)

    def gate_up(self) -> Linear:
        return Linear(self.own(2 * self._inner, self._shape.hidden_size))

    def down(self) -> Linear:
        return summed(self.own(self._shape.hidden_size, self._inner), None, self.ranks)

    def _random(self, generator: torch.Generator, size: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(size, dtype=self._dtype, device=self._device)
        return tensor.normal_(0.0, size[-1] ** -0.5, generator=generator)


def _drafter(shape: Shape, make: _Weights, embed: Tensor, head: Linear) -> BlockDrafter:
    hidden = shape.hidden_size
    layers = tuple(
        DraftLayerWeights(
            input_norm_H=make.ones(hidden),
            qkv=make.qkv(),
            q_norm_D=make.ones(shape.head_dim),
            k_norm_D=make.ones(shape.head_dim),
            o=make.output(),
            post_norm_H=make.ones(hidden),
            gate_up=make.gate_up(),
            down=make.down(),
        )
        for _ in range(shape.draft_layers)
    )
    token_ids = None
    if shape.draft_vocab:
        token_ids = torch.arange(shape.draft_vocab, device=embed.device)
        head = vocabulary_head(
            make.own(-(-shape.draft_vocab // make.ranks.size), hidden), shape.draft_vocab, make.ranks
        )
    weights = DraftWeights(
        fc_HX=make.common(hidden, NUM_TAPS * hidden),
        hidden_norm_H=make.ones(hidden),
        norm_H=make.ones(hidden),
        layers=layers,
        embed_VH=embed,
        lm_head=head,
        token_ids=token_ids,
    )
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.draft_layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab or shape.vocab_size,
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
    return BlockDrafter(DrafterConfig.from_dict(raw), weights, ops=make.backend.ops, ranks=make.ranks)


def _target_config(shape: Shape) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.inner,
        num_layers=shape.num_layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
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
