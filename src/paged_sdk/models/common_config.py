"""Read the config fields that families have in common, by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType

from attrs import evolve

from paged_sdk.config.activation import LEARNED, Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.moe import MoeConfig
from paged_sdk.config.rope import RopeConfig
from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.rope_fields import read_rope, rope_section

__all__ = [
    "FULL",
    "SLIDING",
    "must_not_be_tied",
    "own_heads",
    "read_activation",
    "read_common",
    "read_head_dim",
    "read_layer_ropes",
    "read_layer_types",
    "read_moe",
    "read_one_rope",
    "read_windows",
]

SLIDING = "sliding_attention"
FULL = "full_attention"

# transformers has several names for the same function, by implementation.
_OTHER_NAMES = MappingProxyType(
    {
        "swish": "silu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_pytorch_tanh",
        "gelu_fast": "gelu_pytorch_tanh",
        "gelu_accurate": "gelu_pytorch_tanh",
        "gelu_python_tanh": "gelu_pytorch_tanh",
    }
)

# Fields of shared experts, grouped routing, scoring functions other than softmax, and scaled or biased routing weights:
# refused unless the family reads them.
_SHARED_SIZE = "shared_expert_intermediate_size"
_OTHER_MOE_FIELDS = (
    _SHARED_SIZE,
    "n_shared_experts",
    "num_shared_experts",
    "n_group",
    "topk_group",
    "scoring_func",
    "moe_router_activation_func",
    "routed_scaling_factor",
    "use_routing_bias",
)


def read_common(
    fields: ConfigFields,
    *,
    ropes: tuple[RopeConfig, ...] | None = None,
    sliding_windows: tuple[int | None, ...] | None = None,
    activation: Activation | None = None,
    tie_embeddings: bool = False,
    eps: str = "rms_norm_eps",
) -> DecoderConfig:
    """Read the shape of a plain llama, from which families derive theirs.

    :param ropes: the rotary embedding of each layer; None: one for all layers, read from the usual fields
    :param sliding_windows: the window of each layer; None: full attention in all layers
    :param activation: the MLP's activation; None: read from ``hidden_act``
    :param tie_embeddings: default of ``tie_word_embeddings``
    :param eps: name of the field with the norms' epsilon
    :raises CheckpointError: a value is missing or invalid
    """
    num_layers = fields.positive("num_hidden_layers")
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    head_dim = read_head_dim(fields)
    ropes = ropes or (read_one_rope(fields),) * num_layers
    if len({rope.switch for rope in ropes} - {None}) > 1:
        raise fields.error("rope_parameters", "one original_max_position_embeddings for all layers")
    return DecoderConfig(
        model_type=fields.text("model_type"),
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=fields.positive("max_position_embeddings", 2048),
        norm_eps=fields.number(eps, 1e-6),
        ropes=ropes,
        sliding_windows=sliding_windows or (None,) * num_layers,
        attention_scale=head_dim**-0.5,
        activation=activation or read_activation(fields, "hidden_act", Activation.SILU),
        tie_embeddings=fields.flag("tie_word_embeddings", tie_embeddings),
    )


def read_one_rope(
    fields: ConfigFields, *, default_theta: float = 10_000.0, is_partial: bool = False, interleaved: bool = False
) -> RopeConfig:
    """Read the rotary embedding of families with the same one in all layers.

    :param default_theta: base of the frequencies if the config states none
    :param is_partial: whether the family may rotate a part of each head
    :param interleaved: whether the family pairs neighbouring elements
    """
    rope = read_rope(
        fields,
        rope_section(fields),
        head_dim=read_head_dim(fields),
        default_theta=default_theta,
        is_partial=is_partial,
    )
    return evolve(rope, interleaved=interleaved)


def read_layer_ropes(
    fields: ConfigFields, layer_types: tuple[str, ...], *, full_theta: float, windowed_theta: float
) -> tuple[RopeConfig, ...]:
    """Read the rotary embedding of each layer, for families whose layers with sliding windows have a different one.

    :param layer_types: see :func:`read_layer_types`
    :param full_theta: base for layers with full attention if the config states none
    :param windowed_theta: base for layers with a window if the config states none
    """
    # In the older form, rope_theta and rope_scaling apply to layers with full attention only, and transformers ignores
    # ``type``, the older name of ``rope_type``.
    nested = fields.section("rope_parameters")
    unscaled = ConfigFields({} if nested.values() else {"rope_type": "default"})
    full = unscaled.updated(nested.section(FULL)).updated(fields.section("rope_scaling"))
    windowed, head_dim = fields.updated(ConfigFields({"rope_theta": windowed_theta})), read_head_dim(fields)
    ropes = {
        FULL: read_rope(fields, full, head_dim=head_dim, default_theta=full_theta, is_nested=True),
        SLIDING: read_rope(
            windowed, nested.section(SLIDING), head_dim=head_dim, default_theta=windowed_theta, is_nested=True
        ),
    }
    return tuple(ropes[each] for each in layer_types)


def read_head_dim(fields: ConfigFields) -> int:
    """Return head_dim; by default, hidden_size divided by the number of heads."""
    return fields.positive("head_dim", fields.positive("hidden_size") // fields.positive("num_attention_heads"))


def own_heads(fields: ConfigFields, *, intermediate_size: int, num_kv_heads: int | None = None) -> ConfigFields:
    """Return the fields of a family that always has head_dim = hidden_size / num_heads, in the common names.

    :param intermediate_size: the family's value, which its configs lack or have under another name
    :param num_kv_heads: likewise; None: the number of heads
    :raises CheckpointError: hidden_size is not a multiple of the number of heads
    """
    num_heads = fields.positive("num_attention_heads")
    if fields.positive("hidden_size") % num_heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads = {num_heads}")
    own = {"head_dim": None, "num_key_value_heads": num_kv_heads, "intermediate_size": intermediate_size}
    return fields.updated(ConfigFields(own))


def must_not_be_tied(fields: ConfigFields) -> None:
    """Refuse tied embeddings, for families whose output projection has a bias.

    :raises UnsupportedArchitectureError: the config ties the embeddings
    """
    if fields.flag("tie_word_embeddings", False):
        model_type = fields.text("model_type")
        raise UnsupportedArchitectureError(
            f"{fields.shown('tie_word_embeddings')} is not supported beside a bias of the output projection, which "
            f"{model_type} has",
            architecture=model_type,
        )


def read_activation(fields: ConfigFields, key: str, default: Activation) -> Activation:
    """Return the activation of the MLP; one with learned numbers is known where it is the default."""
    name = fields.text(key, default.value)
    known = {each.value: each for each in Activation if each not in LEARNED or each is default}
    if (found := known.get(_OTHER_NAMES.get(name, name))) is None:
        raise fields.error(key, f"one of {', '.join([*known, *_OTHER_NAMES])}")
    return found


def read_layer_types(fields: ConfigFields, is_sliding: Callable[[int], bool]) -> tuple[str, ...]:
    """Return ``sliding_attention`` or ``full_attention`` for each layer.

    :param is_sliding: returns whether the layer of an index has a window; used if the config has no ``layer_types``
    """
    num_layers = fields.positive("num_hidden_layers")
    types = fields.texts("layer_types") or tuple(SLIDING if is_sliding(i) else FULL for i in range(num_layers))
    if len(types) != num_layers:
        raise CheckpointError(f"config.json: layer_types has {len(types)} entries: expected {num_layers}")
    if not set(types) <= {SLIDING, FULL}:
        raise fields.error("layer_types", f"{SLIDING} or {FULL} for each layer")
    return types


def read_windows(fields: ConfigFields, layer_types: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer; None for full attention.

    :raises CheckpointError: a layer needs a window and the config states none, which transformers cannot run either
    """
    if window is None and SLIDING in layer_types:
        raise fields.error("layer_types", f"no {SLIDING}, since there is no sliding_window")
    return tuple(window if each == SLIDING else None for each in layer_types)


def read_moe(
    fields: ConfigFields,
    *,
    layers: Iterable[int],
    intermediate_size: int,
    renormalize: bool,
    shared_intermediate_size: int | None = None,
    known: Iterable[str] = (),
) -> MoeConfig:
    """Read the settings of the mixtures of experts.

    :param layers: the indices of layers with a mixture
    :param intermediate_size: intermediate size of one expert
    :param renormalize: whether the weights of a token's experts are scaled to sum to 1
    :param shared_intermediate_size: intermediate size of the shared expert, which has a gate; None: the family has none
    :param known: fields of its own kind of experts or routing that the family reads itself
    :raises CheckpointError: a value is missing or invalid
    :raises UnsupportedArchitectureError: the config has experts or routing of another family
    """
    own = (*known, *(() if shared_intermediate_size is None else (_SHARED_SIZE,)))
    others = [key for key in _OTHER_MOE_FIELDS if key not in own and fields.is_set(key)]
    if read_activation(fields, "hidden_act", Activation.SILU) is not Activation.SILU:
        others.append("hidden_act")
    if others:
        model_type = fields.text("model_type")
        raise UnsupportedArchitectureError(
            f"{fields.shown(others[0])} is not supported in the mixtures of experts of {model_type}",
            architecture=model_type,
        )
    # transformers accepts either name.
    count = fields.optional_positive("num_local_experts") or fields.positive("num_experts")
    selected = fields.positive("num_experts_per_tok")
    if selected > count:
        raise fields.error("num_experts_per_tok", f"at most the number of experts, {count}")
    return MoeConfig(
        layers=frozenset(layers),
        num_experts=count,
        num_experts_per_token=selected,
        intermediate_size=intermediate_size,
        renormalize=renormalize,
        shared_intermediate_size=shared_intermediate_size,
        has_shared_gate=shared_intermediate_size is not None,
    )
