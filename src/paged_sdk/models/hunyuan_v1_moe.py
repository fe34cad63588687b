"""Read Hunyuan's mixtures of experts, in every layer beside an MLP that every token uses."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_moe
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.hunyuan_v1_dense import NORMS, read_hunyuan
from paged_sdk.models.tensor_names import ExpertNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = _uniform(fields.renamed(num_experts_per_tok="moe_topk"), "num_experts_per_tok")
    shape = read_hunyuan(fields)
    moe = read_moe(
        fields.with_defaults(num_experts=1, num_experts_per_tok=1),
        layers=range(shape.num_layers),
        intermediate_size=shape.intermediate_size,
        renormalize=True,
    )
    return evolve(shape, moe=evolve(moe, shared_intermediate_size=shape.intermediate_size, float32_router=True))


def _uniform(fields: ConfigFields, key: str) -> ConfigFields:
    """Return the fields with one number in place of a list with the same number for each layer."""
    if not isinstance(fields.values().get(key), list):
        return fields
    numbers, num_layers = fields.integers(key), fields.positive("num_hidden_layers")
    if len(numbers) != num_layers or len(set(numbers)) != 1:
        raise fields.error(key, f"one number, or the same for each of {num_layers} layers")
    return fields.updated(ConfigFields({key: numbers[0]}))


_EXPERTS = ExpertNames(
    router="gate.wg",
    shared_gate_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    shared_down="mlp.shared_mlp.down_proj",
)

FAMILY = DecoderFamily(
    architectures=("HunYuanMoEV1ForCausalLM",),
    read=_read,
    names=(TensorNames(norms=NORMS, experts=(_EXPERTS,)),),
    sizes=Sizes(vocab=290_943, hidden=4096, mlp=11_008, layers=32, heads=32),
)
