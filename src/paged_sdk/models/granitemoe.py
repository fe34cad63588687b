"""Read Granite 3 with mixtures of experts."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_moe
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.granite import read_granite
from paged_sdk.models.tensor_names import ExpertNames, TensorNames

__all__ = ["FAMILY", "NAMES", "read_granite_moe"]

_EXPERTS = ExpertNames(
    block="block_sparse_moe",
    router="router.layer",
    stacked=("input_linear.weight", "output_linear.weight"),
    shared_gate_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
)

# Checkpoints have the first names; transformers 5 may write those of its own classes.
NAMES = TensorNames(
    experts=(_EXPERTS, evolve(_EXPERTS, router="router", stacked=("experts.gate_up_proj", "experts.down_proj")))
)


def read_granite_moe(fields: ConfigFields, shared_intermediate_size: int | None = None) -> DecoderConfig:
    """Read what Granite with experts has in common, with and without shared experts.

    :raises CheckpointError: a value is missing or invalid
    """
    fields = fields.with_defaults(num_experts=8, num_experts_per_tok=2)
    shape = read_granite(fields)
    moe = read_moe(fields, layers=range(shape.num_layers), intermediate_size=shape.intermediate_size, renormalize=True)
    return evolve(shape, mlp_bias=False, moe=evolve(moe, shared_intermediate_size=shared_intermediate_size))


FAMILY = DecoderFamily(
    architectures=("GraniteMoeForCausalLM",),
    read=read_granite_moe,
    names=(NAMES,),
    sizes=Sizes(vocab=32_000, hidden=4096, mlp=11_008, layers=32, heads=32),
)
