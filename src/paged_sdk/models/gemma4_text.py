"""Read Gemma 4's text decoder: layers with sliding windows, and layers with full attention that have other heads.

Of the variants, the dense one (31B) is the plainest; 26B-A4B has experts beside its MLPs; in E2B and E4B, the last
layers attend over the keys of earlier ones, and each layer adds something of a token besides its embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.layer_shape import LayerInputConfig, LayerShape
from paged_sdk.config.moe import MoeConfig
from paged_sdk.config.rope import RopeConfig
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.layers.activation import KERNEL_ACTIVATIONS
from paged_sdk.models.common_config import FULL, read_activation, read_common, read_layer_types, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.gemma2 import NORMS
from paged_sdk.models.rope_fields import read_rope
from paged_sdk.models.tensor_names import TensorNames

__all__ = ["FAMILY", "read_gemma4"]

_SEES_ALL: Final = "all"
_OF_LAYERS: Final = ("head_dim", "num_key_value_heads")


def _read(fields: ConfigFields) -> DecoderConfig:
    return read_gemma4(fields)


def read_gemma4(fields: ConfigFields, *, kv_elsewhere: bool = False) -> DecoderConfig:
    """Read a decoder of Gemma 4's layers.

    :param kv_elsewhere: whether all layers attend over another model's keys and values
    :raises CheckpointError: a value is missing or invalid
    """
    fields = fields.with_defaults(
        model_type="gemma4_text",
        vocab_size=262_144,
        num_key_value_heads=4,
        head_dim=256,
        max_position_embeddings=131_072,
    )
    types = list(read_layer_types(fields, lambda layer: (layer + 1) % 6 != 0))
    types[-1] = FULL  # as in transformers, whatever the config says
    bidirectional = fields.text("use_bidirectional_attention", "") == _SEES_ALL
    window = fields.positive("sliding_window", 512)
    # With bidirectional attention, transformers divides the window between both directions.
    window = window // 2 + 1 if bidirectional else window
    shapes = _read_shapes(fields, types, kv_elsewhere=kv_elsewhere)
    ropes = {
        (kind, size): _read_rope(fields, kind, size)
        for kind, size in dict.fromkeys((kind, shape.head_dim) for kind, shape in zip(types, shapes, strict=True))
    }
    shape = read_common(
        fields,
        ropes=tuple(ropes[kind, shape.head_dim] for kind, shape in zip(types, shapes, strict=True)),
        sliding_windows=read_windows(fields, tuple(types), window),
        activation=read_activation(fields, "hidden_activation", Activation.GELU_TANH),
        tie_embeddings=True,
    )
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        shape,
        layer_shapes=shapes,
        attention_scale=1.0,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
        embedding_scale=shape.hidden_size**0.5,
        norm_in_float32=True,
        qk_norm=True,
        value_norm=True,
        sandwich_norms=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        bidirectional=bidirectional,
        layer_scales=True,
        layer_inputs=_read_layer_inputs(fields, shape.vocab_size),
        moe=_read_experts(fields, shape) if fields.flag("enable_moe_block", False) else None,
    )


def _read_kv_layers(fields: ConfigFields, types: Sequence[str]) -> Sequence[int | None]:
    """Return over whose keys and values each layer attends: the last ones may share those of the last before them of
    their type.
    """
    num_layers = len(types)
    num_shared = fields.integer("num_kv_shared_layers", 0)
    if not 0 <= num_shared < num_layers:
        raise fields.error("num_kv_shared_layers", f"0 to {num_layers - 1}")
    own, shared = types[: num_layers - num_shared], types[num_layers - num_shared :]
    if not set(types) <= set(own):
        raise fields.error("num_kv_shared_layers", "fewer, so that a layer of each type has keys and values")
    last_of = {kind: layer for layer, kind in enumerate(own)}
    return (*[None] * len(own), *(last_of[kind] for kind in shared))


def _read_shapes(fields: ConfigFields, types: Sequence[str], *, kv_elsewhere: bool) -> tuple[LayerShape, ...]:
    """Return the sizes of each layer."""
    kv_layers = [None] * len(types) if kv_elsewhere else _read_kv_layers(fields, types)
    num_heads, size = fields.positive("num_attention_heads"), fields.positive("intermediate_size")
    keys_as_values = fields.flag("attention_k_eq_v", False)
    is_wide = fields.flag("use_double_wide_mlp", False)
    shapes: list[LayerShape] = []
    for layer, (kind, source) in enumerate(zip(types, kv_layers, strict=True)):
        of_layer = _of_layer(fields, layer, is_full=kind == FULL)
        if source is not None:
            heads = shapes[source].num_kv_heads, shapes[source].head_dim
        else:
            heads = of_layer.positive("num_key_value_heads"), of_layer.positive("head_dim")
        if num_heads % heads[0]:
            raise of_layer.error("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
        shapes.append(
            LayerShape(
                num_kv_heads=heads[0],
                head_dim=heads[1],
                intermediate_size=2 * size if is_wide and source is not None else size,
                kv_layer=source,
                kv_elsewhere=kv_elsewhere,
                keys_as_values=keys_as_values and kind == FULL and source is None and not kv_elsewhere,
            )
        )
    return tuple(shapes)


def _of_layer(fields: ConfigFields, layer: int, *, is_full: bool) -> ConfigFields:
    """Return the fields with what the config says of a layer. Checkpoints that recent versions of transformers have
    saved list the layers, others state the heads of layers with full attention.
    """
    if fields.is_set("per_layer_config"):
        listed = fields.section("per_layer_config")
        # transformers writes numbers with leading zeros.
        key = next((key for key in listed.values() if key.isdecimal() and int(key) == layer), str(layer))
        of_layer = listed.section(key)
        other = next((key for key in of_layer.values() if key not in _OF_LAYERS), None)
        if other is not None:
            raise UnsupportedArchitectureError(
                f"{of_layer.shown(other)} is not supported: layers differ in {' and '.join(_OF_LAYERS)} only",
                architecture=fields.text("model_type"),
            )
        return fields.updated(of_layer)
    if not is_full:
        return fields
    own = {"head_dim": fields.positive("global_head_dim", 512)}
    num_kv_heads = fields.optional_positive("num_global_key_value_heads")
    if num_kv_heads is not None and fields.flag("attention_k_eq_v", False):
        own["num_key_value_heads"] = num_kv_heads
    return fields.updated(ConfigFields(own))


def _read_rope(fields: ConfigFields, kind: str, head_dim: int) -> RopeConfig:
    """Return the rotary embedding of layers of one type, with heads of this size.

    In a proportional one, the frequencies are those of the whole head, but only the first ones rotate.
    """
    nested = fields.section("rope_parameters")
    section = nested.section(kind)
    theta = 1_000_000.0 if kind == FULL else 10_000.0
    if kind == FULL and not nested.values():
        section = ConfigFields({"rope_type": "proportional", "partial_rotary_factor": 0.25})
    is_proportional = section.text("rope_type", "default") == "proportional"
    kind_of_scaling = "linear" if section.is_set("factor") else "default"
    whole = section.updated(ConfigFields({"partial_rotary_factor": 1.0})) if is_proportional else section
    rope = read_rope(
        fields,
        whole,
        head_dim=head_dim,
        default_theta=theta,
        aliases={"proportional": kind_of_scaling},
        is_nested=True,
    )
    if not is_proportional:
        return rope
    share, num_frequencies = section.number("partial_rotary_factor", 1.0), head_dim // 2
    num_rotating = int(share * head_dim // 2)
    divisors = (1.0,) * num_rotating + (math.inf,) * (num_frequencies - num_rotating)
    return evolve(rope, inv_freq_divisors=divisors if num_rotating < num_frequencies else ())


def _read_experts(fields: ConfigFields, shape: DecoderConfig) -> MoeConfig:
    """Return the settings of the experts beside the MLPs."""
    if shape.activation not in KERNEL_ACTIVATIONS:
        known = " or ".join(each.value for each in KERNEL_ACTIVATIONS)
        raise UnsupportedArchitectureError(
            f"{fields.shown('hidden_activation')} is not supported in experts: expected {known}",
            architecture=shape.model_type,
        )
    count, selected = fields.positive("num_experts"), fields.positive("top_k_experts")
    if selected > count:
        raise fields.error("top_k_experts", f"at most the number of experts, {count}")
    return MoeConfig(
        layers=frozenset(range(shape.num_layers)),
        num_experts=count,
        num_experts_per_token=selected,
        intermediate_size=fields.positive("moe_intermediate_size"),
        renormalize=True,
        beside_mlp=True,
        activation=shape.activation,
    )


def _read_layer_inputs(fields: ConfigFields, vocab_size: int) -> LayerInputConfig | None:
    """Return what each layer adds of a token besides its embedding; None: nothing."""
    size = fields.integer("hidden_size_per_layer_input", 256)
    if size == 0:
        return None
    rows = fields.positive("vocab_size_per_layer_input", 262_144)
    if rows < vocab_size:
        raise fields.error("vocab_size_per_layer_input", f"at least vocab_size = {vocab_size}")
    padding = fields.integer("pad_token_id", 0)
    if not 0 <= padding < rows:
        raise fields.error("pad_token_id", f"0 to {rows - 1}")
    return LayerInputConfig(
        size=fields.positive("hidden_size_per_layer_input", 256), vocab_size=rows, image_token=padding
    )


FAMILY = DecoderFamily(
    architectures=("Gemma4ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=262_144, hidden=2304, mlp=9216, layers=30, heads=8),
    names=(TensorNames(norms=NORMS),),
    reads_layer_config=True,
)
