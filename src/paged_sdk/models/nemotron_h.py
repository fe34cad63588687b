"""Read Nemotron-H: layers that are a Mamba-2 layer, attention without positions, or an MLP or experts without gates."""

from __future__ import annotations

from typing import Final

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig, LayerParts
from paged_sdk.config.moe import MoeConfig
from paged_sdk.config.recurrent import Mamba2Config
from paged_sdk.config.rope import NO_ROPE
from paged_sdk.layers.activation import KERNEL_ACTIVATIONS
from paged_sdk.models.common_config import FULL, read_activation, read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.mamba2_fields import LINEAR, must_not_limit_steps, read_kinds
from paged_sdk.models.moe_fields import read_grouped_moe
from paged_sdk.models.tensor_names import ExpertNames, NormNames, TensorNames

__all__ = ["FAMILY"]

_MLP, _EXPERTS = "mlp", "moe"
_LETTERS: Final = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _EXPERTS}
_DEFAULT: Final = (LINEAR, _EXPERTS, FULL, _MLP)


def _read(fields: ConfigFields) -> DecoderConfig:
    # transformers accepts either name, and prefers these.
    fields = fields.renamed(
        layers_block_type="layer_types",
        n_groups="mamba_n_groups",
        conv_kernel="mamba_d_conv",
        use_conv_bias="mamba_conv_bias",
        time_step_limit="mamba_dt_limit",
    )
    fields = fields.with_defaults(num_key_value_heads=8, max_position_embeddings=4096, layer_norm_epsilon=1e-5)
    fields = fields.with_defaults(head_dim=fields.positive("attention_head_dim", 128))
    kinds = _read_kinds(fields)
    fields = fields.updated(ConfigFields({"num_hidden_layers": len(kinds)}))
    for key in ("attention_bias", "sliding_window"):  # which transformers ignores
        if fields.is_set(key):
            raise fields.error(key, "nothing: attention has neither biases nor windows")
    mamba, activation = _read_mamba(fields), read_activation(fields, "mlp_hidden_act", Activation.RELU2)
    return evolve(
        read_common(
            fields,
            ropes=(NO_ROPE,) * len(kinds),
            activation=activation,
            eps="layer_norm_epsilon",
        ),
        norm_in_float32=True,
        gated_mlp=False,
        mlp_bias=fields.flag("mlp_bias", False),
        recurrent=tuple(mamba if kind == LINEAR else None for kind in kinds),
        parts=tuple(LayerParts.MIXER if kind in (LINEAR, FULL) else LayerParts.MLP for kind in kinds),
        moe=_read_experts(fields, kinds, activation) if _EXPERTS in kinds else None,
    )


def _read_kinds(fields: ConfigFields) -> tuple[str, ...]:
    key, pattern = "layers_block_type", fields.text("hybrid_override_pattern", "")
    if not set(pattern) <= set(_LETTERS):
        raise fields.error("hybrid_override_pattern", f"letters among {' '.join(_LETTERS)}")
    default = tuple(_LETTERS[letter] for letter in pattern) or _DEFAULT
    return read_kinds(fields, key, None, default, (FULL, LINEAR, _MLP, _EXPERTS))


def _read_experts(fields: ConfigFields, kinds: tuple[str, ...], activation: Activation) -> MoeConfig:
    if activation not in KERNEL_ACTIVATIONS:
        known = " or ".join(each.value for each in KERNEL_ACTIVATIONS)
        raise fields.error("mlp_hidden_act", f"{known} in layers with experts")
    fields = fields.with_defaults(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=7688)
    moe = read_grouped_moe(fields, layers=[layer for layer, kind in enumerate(kinds) if kind == _EXPERTS])
    return evolve(
        moe,
        activation=activation,
        gated=False,
        # Whatever the number of shared experts.
        shared_intermediate_size=fields.positive("moe_shared_expert_intermediate_size", 7688),
        latent_size=fields.optional_positive("moe_latent_size"),
    )


def _read_mamba(fields: ConfigFields) -> Mamba2Config:
    heads, groups = fields.positive("mamba_num_heads", 128), fields.positive("n_groups", 8)
    if heads % groups:
        raise fields.error("n_groups", f"a divisor of mamba_num_heads = {heads}")
    if read_activation(fields, "mamba_hidden_act", Activation.SILU) is not Activation.SILU:
        raise fields.error("mamba_hidden_act", Activation.SILU.value)
    must_not_limit_steps(fields)
    has_bias = fields.flag("use_bias", False)
    return Mamba2Config(
        num_heads=heads,
        head_dim=fields.positive("mamba_head_dim", 64),
        state_size=fields.positive("ssm_state_size", 128),
        num_groups=groups,
        kernel_size=fields.positive("conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        input_bias=has_bias,
        output_bias=has_bias,
    )


_EXPERT_NAMES: Final = ExpertNames(
    block="mixer",
    choice_bias="gate.e_score_correction_bias",
    gate=None,
    stacked=("experts.up_proj", "experts.down_proj"),
    shared_gate_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
)
_NAMES: Final = TensorNames(
    embedding="embeddings",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    output="mixer.o_proj",
    recurrent="mixer",
    up="mixer.up_proj",
    down="mixer.down_proj",
    norms=NormNames(attention="norm", mlp="norm", last="norm_f"),
    experts=(_EXPERT_NAMES,),
    unused=("mtp.",),
)

FAMILY = DecoderFamily(
    architectures=("NemotronHForCausalLM",),
    read=_read,
    names=(evolve(_NAMES, body="backbone."), _NAMES),
    sizes=Sizes(vocab=131_072, hidden=4096, mlp=21_504, layers=52, heads=32),
)
