"""The settings of a drafter, parsed once from any dialect of config.json (`drafter.dialects`) and then frozen.

A feature that changes the draft model's mathematics and is not built here is refused by name, because ignoring
it would leave the text right and only the acceptance low.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from drafter.attention import LayerMask
from drafter.dialects import Dialect, Family, embedded_dialect, read_dialect
from drafter.errors import DrafterConfigError
from drafter.layers import RopeError, RopeParameters

MarkovKind = Literal["vanilla", "gated", "rnn"]

# Fields that leave the mathematics alone only at these values.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
    "use_aux_hidden_state": (None, True),
    "input_embedding_scale": (None, 1, 1.0),
    "output_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None, 0, 0.0, False),
    "shift_label": (None, False),
    "pure_draft_prefix_len": (None, 0),
    "kv_lora_rank": (None,),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
}


@dataclass(frozen=True, slots=True)
class MarkovShape:
    """A sequential head: each slot's logits get a low-rank bias that depends on the token drafted before."""

    kind: MarkovKind
    rank: int


@dataclass(frozen=True, slots=True)
class ConfidenceShape:
    """A confidence head over a slot's hidden state, and with `with_markov` the embedding of the token before too.

    `temperatures` divide the logits of drafts 1, 2, ... (`drafter.calibration`); none leave them as they are.
    """

    with_markov: bool
    temperatures: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DFlash2Shape:
    """Convolutions over `kernel_size` slots with a kernel for each `group_size` channels, and a selector of rank `rank`
    over the `top_k` best candidates of a slot (`drafter.dflash2`).
    """

    kernel_size: int
    group_size: int
    rank: int
    top_k: int


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape of a block drafter. Its attention is not causal inside the block, and sees all positions.

    `window`: how many positions of context before the block it sees, and keeps; None: all of them. `masks`: where some
    layers see less than that, what each of them does; none of what they do not see is given up.
    `num_target_layers` is None in dialects that do not say. `draft_vocab_size` is smaller than `vocab_size` when
    the drafter can say only some of the target's tokens.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeParameters
    block_size: int
    mask_token_id: int
    tap_layer_ids: tuple[int, ...]  # 0-based target decoder layers whose outputs are read, -1 the embedding's
    num_target_layers: int | None
    target_hidden_size: int
    draft_vocab_size: int
    target_fingerprint: str | None = None
    family: Family = "dflash"
    sample_from_anchor: bool = (
        False  # slot j predicts the token at anchor + j + 1 (DSpark), not at anchor + j
    )
    markov: MarkovShape | None = None
    confidence: ConfidenceShape | None = None
    dflash2: DFlash2Shape | None = None
    window: int | None = None
    masks: tuple[LayerMask, ...] = ()

    @property
    def first_slot(self) -> int:
        """The slot that drafts the token behind the anchor: the anchor's own, or the one after it."""
        return 0 if self.sample_from_anchor else 1

    @property
    def max_draft_tokens(self) -> int:
        return self.block_size - self.first_slot

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """Parse a drafter's config.json. Raises DrafterConfigError naming the field."""
        return cls._parse(read_dialect(config))

    @classmethod
    def embedded(cls, config: Mapping[str, Any], tensor_names: Collection[str], stages: int) -> DrafterConfig:
        """Parse the config.json of a target with a drafter of so many stages inside. Raises DrafterConfigError."""
        return cls._parse(embedded_dialect(config, tensor_names, stages))

    @classmethod
    def _parse(cls, dialect: Dialect) -> DrafterConfig:
        fields = _Fields(dialect)
        _refuse_unsupported(fields)
        num_layers = fields.positive("num_hidden_layers")
        num_heads = fields.positive("num_attention_heads")
        num_kv_heads = fields.positive("num_key_value_heads", default=num_heads)
        if num_heads % num_kv_heads:
            raise DrafterConfigError(
                "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}"
            )
        hidden_size = fields.positive("hidden_size")
        vocab_size = fields.positive("vocab_size")
        num_target_layers = _num_target_layers(fields)
        try:
            rope = RopeParameters.from_config(dialect.fields)
        except RopeError as error:
            raise DrafterConfigError("rope_parameters", str(error)) from error
        sample_from_anchor = fields.flag("sample_from_anchor")
        markov = _markov(fields, sample_from_anchor)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=fields.positive("head_dim", default=hidden_size // num_heads),
            vocab_size=vocab_size,
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope=rope,
            block_size=_block_size(fields, sample_from_anchor),
            mask_token_id=_mask_token_id(fields, vocab_size),
            tap_layer_ids=_tap_layer_ids(fields, num_layers, num_target_layers),
            num_target_layers=num_target_layers,
            target_hidden_size=fields.positive("target_hidden_size", default=hidden_size),
            draft_vocab_size=_draft_vocab_size(fields, vocab_size),
            target_fingerprint=fields.text("target_fingerprint"),
            family=dialect.family,
            sample_from_anchor=sample_from_anchor,
            markov=markov,
            confidence=_confidence(fields, markov, sample_from_anchor),
            dflash2=_dflash2(fields, hidden_size, vocab_size),
            window=_window(fields),
            masks=_masks(fields, num_layers),
        )


class _Fields:
    """Typed access to the flat fields of a config.json."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    def get(self, field: str) -> Any:
        return self.dialect.fields.get(field)

    def placed(self, field: str) -> str:
        """The name of a drafting field where this dialect keeps it."""
        return self.dialect.names.get(field, self.dialect.place + field)

    def flag(self, field: str) -> bool:
        value = self.get(field)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise DrafterConfigError(field, f"expected true or false, got {value!r}")

    def positive(self, field: str, default: int | None = None) -> int:
        value = self.get(field)
        value = default if value is None else value
        if value is None:
            raise DrafterConfigError(self.dialect.names.get(field, field), "missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            field = self.dialect.names.get(field, field)
            raise DrafterConfigError(field, f"expected a positive integer, got {value!r}")
        return value

    def number(self, field: str) -> float:
        value = self.get(field)
        if value is None:
            raise DrafterConfigError(field, "missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DrafterConfigError(field, f"expected a number, got {value!r}")
        return float(value)

    def text(self, field: str) -> str | None:
        value = self.get(field)
        if value is None or isinstance(value, str):
            return value
        raise DrafterConfigError(field, f"expected a string, got {value!r}")


def default_tap_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Taps of z-lab's drafters: evenly spaced from layer 1 to the third last; one layer taps the middle."""
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers))


def _refuse_unsupported(fields: _Fields) -> None:
    for field, neutral in _NEUTRAL.items():
        if fields.get(field) not in neutral:
            raise DrafterConfigError(
                field,
                f"{fields.get(field)!r} is not supported; only drafters trained without it can be served",
            )


def _num_target_layers(fields: _Fields) -> int | None:
    if fields.dialect.name == "speculators" and fields.get("num_target_layers") is None:
        return None
    return fields.positive("num_target_layers")


def _window(fields: _Fields) -> int | None:
    if fields.dialect.family != "dspark_embedded":
        return None
    return fields.positive("window_size")


def _draft_vocab_size(fields: _Fields, vocab_size: int) -> int:
    size = fields.positive("draft_vocab_size", default=vocab_size)
    if size > vocab_size:
        raise DrafterConfigError("draft_vocab_size", f"{size} exceeds vocab_size {vocab_size}")
    return size


def _markov(fields: _Fields, sample_from_anchor: bool) -> MarkovShape | None:
    rank = fields.get("markov_rank") or 0
    if rank == 0:
        return None
    if not fields.dialect.family.startswith("dspark"):
        raise DrafterConfigError("markov_rank", f"{rank!r}: a DFlash drafter has no Markov head")
    kind = fields.get("markov_head_type")
    if kind not in get_args(MarkovKind):
        raise DrafterConfigError(
            fields.placed("markov_head_type"), f"{kind!r} is none of {', '.join(get_args(MarkovKind))}"
        )
    if kind == "rnn" and not sample_from_anchor:
        raise DrafterConfigError(
            "sample_from_anchor",
            "an rnn head whose state starts in a slot that drafts nothing is not supported",
        )
    return MarkovShape(kind, fields.positive("markov_rank"))


def _confidence(
    fields: _Fields, markov: MarkovShape | None, sample_from_anchor: bool
) -> ConfidenceShape | None:
    if not fields.flag("enable_confidence_head"):
        return None
    with_markov = fields.flag("confidence_head_with_markov")
    if with_markov and markov is None:
        raise DrafterConfigError(fields.placed("confidence_head_with_markov"), "needs a markov_rank above 0")
    temperatures = fields.get("confidence_temperatures") or ()
    count = _block_size(fields, sample_from_anchor) - (not sample_from_anchor)
    if temperatures and (
        len(temperatures) != count or not all(isinstance(t, int | float) and t > 0 for t in temperatures)
    ):
        raise DrafterConfigError(
            "confidence_temperatures", f"{temperatures!r}: one above 0 is needed for each of {count} drafts"
        )
    return ConfidenceShape(with_markov, tuple(map(float, temperatures)))


_DFLASH2_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def _dflash2(fields: _Fields, hidden_size: int, vocab_size: int) -> DFlash2Shape | None:
    if fields.dialect.family != "dflash2":
        for field in _DFLASH2_FIELDS:
            if fields.get(field) not in (None, 0):
                raise DrafterConfigError(
                    fields.placed(field), f"{fields.get(field)!r}: only a DFlash2DraftModel has it"
                )
        return None
    for field in ("sample_from_anchor", "enable_confidence_head"):
        if fields.flag(field):
            raise DrafterConfigError(field, "not supported in a DFlash 2 drafter")
    if _draft_vocab_size(fields, vocab_size) != vocab_size:
        raise DrafterConfigError(
            "draft_vocab_size",
            "a DFlash 2 drafter needs the whole vocabulary: its selector goes by the target's ids",
        )
    shape = DFlash2Shape(*(fields.positive(field) for field in _DFLASH2_FIELDS))
    if hidden_size % shape.group_size:
        raise DrafterConfigError(
            fields.placed("conv_group_size"), f"{shape.group_size} does not divide hidden_size {hidden_size}"
        )
    if shape.top_k > vocab_size:
        raise DrafterConfigError(
            fields.placed("selector_top_k"), f"{shape.top_k} exceeds vocab_size {vocab_size}"
        )
    return shape


def _masks(fields: _Fields, num_layers: int) -> tuple[LayerMask, ...]:
    """Of DFlash's layers. Those of `sliding_attention` are causal unless `is_causal` says what all of them are.

    (PyPI `dflash` 0.1.0, `Qwen3DFlashAttention`; transformers drops a `sliding_window` unless `use_sliding_window` says
    that it counts.)
    """
    layer_types = fields.get("layer_types") or ["full_attention"] * num_layers
    if len(layer_types) != num_layers:
        raise DrafterConfigError(
            "layer_types", f"{len(layer_types)} entries for num_hidden_layers {num_layers}"
        )
    masks = fields.dialect.family in ("dflash", "dflash2")
    for index, layer_type in enumerate(layer_types):
        if layer_type != "full_attention" and not (masks and layer_type == "sliding_attention"):
            raise DrafterConfigError(f"layer_types[{index}]", f"{layer_type} is not supported")
    causal = _causal(fields)
    if causal and not masks:
        raise DrafterConfigError("is_causal", "a causal draft block is supported in DFlash drafters only")
    sliding, used = "sliding_attention" in layer_types, fields.flag("use_sliding_window")
    if sliding != used:
        raise DrafterConfigError(
            "use_sliding_window", f"{used}, but {'some' if sliding else 'no'} layers are sliding_attention"
        )
    window = fields.positive("sliding_window") if sliding else None
    found = tuple(
        LayerMask(window, causal is not False)
        if kind == "sliding_attention"
        else LayerMask(None, bool(causal))
        for kind in layer_types
    )
    return found if any(mask != LayerMask() for mask in found) else ()


def _causal(fields: _Fields) -> bool | None:
    """What the configuration says of all layers; None where it says nothing."""
    said = {field: fields.flag(field) for field in ("is_causal", "causal") if fields.get(field) is not None}
    if len({*said.values()}) > 1:
        raise DrafterConfigError("is_causal", f"{said['is_causal']}, but causal is {said['causal']}")
    return next(iter(said.values()), None)


def _block_size(fields: _Fields, sample_from_anchor: bool) -> int:
    block_size = fields.positive("block_size")
    if block_size < 2 and not sample_from_anchor:
        raise DrafterConfigError(
            "block_size", f"{block_size} drafts nothing; at least 2 is needed (anchor + 1 draft)"
        )
    return block_size


def _mask_token_id(fields: _Fields, vocab_size: int) -> int:
    field, value = fields.placed("mask_token_id"), fields.get("mask_token_id")
    if value is None:
        raise DrafterConfigError(field, "missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise DrafterConfigError(field, f"{value!r} is outside 0 .. vocab_size-1 = {vocab_size - 1}")
    return value


def _tap_layer_ids(fields: _Fields, num_layers: int, num_target_layers: int | None) -> tuple[int, ...]:
    field, value = fields.placed("target_layer_ids"), fields.get("target_layer_ids")
    if value is not None:
        taps = tuple(value)
    elif num_target_layers is not None:
        taps = default_tap_layer_ids(num_target_layers, num_layers)
    else:
        raise DrafterConfigError(field, "missing")
    if not taps:
        raise DrafterConfigError(field, "empty")
    first = 0 if fields.dialect.family.startswith("dflash") else -1
    for tap in taps:
        if isinstance(tap, bool) or not isinstance(tap, int) or tap < first:
            raise DrafterConfigError(field, f"{tap!r} is no layer: ids start at {first}")
        if num_target_layers is not None:
            check_tap(tap, num_target_layers, field)
    return taps


def check_tap(tap: int, num_target_layers: int, field: str = "target_layer_ids") -> None:
    """Raise DrafterConfigError for a tap that a target of so many layers does not have, or that is ambiguous."""
    if tap >= num_target_layers:
        raise DrafterConfigError(
            field, f"{tap} is outside 0 .. num_target_layers-1 = {num_target_layers - 1}"
        )
    if tap == num_target_layers - 1:
        raise DrafterConfigError(
            field,
            f"{tap} is the target's last layer; trainers disagree whether its tap comes before or "
            "after the final norm, so it is refused: train with earlier taps",
        )
