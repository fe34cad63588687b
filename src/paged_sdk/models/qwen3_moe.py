"""Read Qwen 3 with mixtures of experts: in every layer, in every n-th, or in all but some."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_moe
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        sliding_window=4096,
        num_experts=128,
        num_experts_per_tok=8,
    )
    num_layers = fields.positive("num_hidden_layers")
    # Unlike in Qwen 3, every layer has the window.
    window = fields.optional_positive("sliding_window") if fields.flag("use_sliding_window", False) else None
    has_bias = fields.flag("attention_bias", False)
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers")
    return evolve(
        read_common(fields, sliding_windows=(window,) * num_layers),
        qk_norm=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        moe=read_moe(
            fields,
            layers=(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0),
            intermediate_size=fields.positive("moe_intermediate_size", 768),
            renormalize=fields.flag("norm_topk_prob", False),
        ),
    )


FAMILY = DecoderFamily(
    architectures=("Qwen3MoeForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=151_936, hidden=2048, mlp=6144, layers=24, heads=32),
)
