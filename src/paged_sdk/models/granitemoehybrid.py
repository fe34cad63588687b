"""Read Granite 4: Mamba-2 layers, and attention in some; an MLP in all, beside experts in the larger models."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.activation import Activation
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import NO_ROPE
from paged_sdk.models.common_config import FULL, read_activation, read_moe, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.granite import read_granite
from paged_sdk.models.granitemoe import NAMES
from paged_sdk.models.mamba2_fields import LINEAR, read_kinds, read_mamba2

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(shared_intermediate_size=1024, num_local_experts=8, num_experts_per_tok=2)
    if read_activation(fields, "hidden_act", Activation.SILU) is not Activation.SILU:
        raise fields.error("hidden_act", Activation.SILU.value)
    num_layers = fields.positive("num_hidden_layers")
    kinds = read_kinds(fields, "layer_types", num_layers, (LINEAR,) * num_layers, (FULL, LINEAR))
    rope = read_one_rope(fields) if fields.values().get("position_embedding_type") == "rope" else NO_ROPE
    # The MLP that all tokens use, in models without experts, too.
    size, mamba = fields.positive("shared_intermediate_size"), read_mamba2(fields)
    shape = evolve(
        read_granite(fields.updated(ConfigFields({"intermediate_size": size})), (rope,) * num_layers),
        mlp_bias=False,
        recurrent=tuple(mamba if kind == LINEAR else None for kind in kinds) if LINEAR in kinds else (),
    )
    if not fields.integer("num_local_experts"):
        return shape
    moe = read_moe(
        fields,
        layers=range(num_layers),
        intermediate_size=fields.positive("intermediate_size"),
        renormalize=True,
    )
    return evolve(shape, moe=evolve(moe, shared_intermediate_size=size))


FAMILY = DecoderFamily(
    architectures=("GraniteMoeHybridForCausalLM",),
    read=_read,
    names=(evolve(NAMES, recurrent="mamba", gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),),
    sizes=Sizes(vocab=32_000, hidden=4096, mlp=11_008, layers=32, heads=32),
)
