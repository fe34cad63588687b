"""Read OLMoE: llama with a mixture of experts in every layer, and norms of queries and keys."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig, QkNormWeights
from paged_sdk.models.common_config import read_common, read_moe
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8
    )
    shape = read_common(fields)
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        shape,
        qk_norm=True,
        qk_norm_weights=QkNormWeights.WHOLE,
        qkv_clip=fields.optional_number("clip_qkv"),
        qkv_bias=has_bias,
        output_bias=has_bias,
        moe=read_moe(
            fields,
            layers=range(shape.num_layers),
            intermediate_size=shape.intermediate_size,
            renormalize=fields.flag("norm_topk_prob", False),
        ),
    )


FAMILY = DecoderFamily(
    architectures=("OlmoeForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=50_304, hidden=2048, mlp=2048, layers=16, heads=16),
)
