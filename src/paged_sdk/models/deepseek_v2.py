"""Read DeepSeek V2: latent attention, and mixtures of experts in all but the first layers."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.moe import MoeConfig
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.latent_attention_fields import read_latent
from paged_sdk.models.moe_fields import GROUPED_EXPERTS, read_grouped_moe, read_later_layers
from paged_sdk.models.tensor_names import TensorNames

__all__ = ["FAMILY"]

_GREEDY, _LIMITED = "greedy", "group_limited_greedy"


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        max_position_embeddings=2048, moe_intermediate_size=1407, n_routed_experts=64, n_shared_experts=2
    )
    # transformers' class rotates pairs of neighbours whatever the config says.
    shape = read_latent(fields.updated(ConfigFields({"rope_interleave": True})))
    shape = evolve(shape, mlp_bias=fields.flag("mlp_bias", False))
    layers = read_later_layers(fields, shape.num_layers, 0)
    return evolve(shape, moe=_read_moe(fields, layers)) if layers else shape


def _read_moe(fields: ConfigFields, layers: range) -> MoeConfig:
    """Read experts whose weights are a softmax. The largest of a group counts; llama.cpp adds up the largest two."""
    method = fields.text("topk_method", _GREEDY)
    if method not in (_GREEDY, _LIMITED):
        raise fields.error("topk_method", f"{_GREEDY} or {_LIMITED}")
    if fields.flag("mlp_bias", False):
        raise UnsupportedArchitectureError(
            f"{fields.shown('mlp_bias')} is not supported in the mixtures of experts of deepseek_v2",
            architecture="deepseek_v2",
        )
    if method == _GREEDY:
        fields = fields.updated(ConfigFields({"n_group": None, "topk_group": None}))
    # transformers' class does not read norm_topk_prob.
    return evolve(
        read_grouped_moe(
            fields,
            layers=layers,
            group_score_size=fields.positive("gguf_group_score_size", 1),
            scoring=("softmax",),
        ),
        renormalize=False,
        sigmoid_scores=False,
        has_choice_bias=False,
        sum_offset=0.0,
    )


FAMILY = DecoderFamily(
    architectures=("DeepseekV2ForCausalLM",),
    read=_read,
    names=(TensorNames(experts=(GROUPED_EXPERTS,)),),
    sizes=Sizes(vocab=102_400, hidden=4096, mlp=11_008, layers=32, heads=32),
)
