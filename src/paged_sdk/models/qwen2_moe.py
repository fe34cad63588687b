"""Read Qwen 1.5 and 2 with mixtures of experts, each with a shared expert that serves every token."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_layer_types, read_moe, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=16,
        max_position_embeddings=32_768,
        sliding_window=4096,
        num_experts=60,
        num_experts_per_tok=4,
    )
    num_layers = fields.positive("num_hidden_layers")
    window = fields.optional_positive("sliding_window") if fields.flag("use_sliding_window", False) else None
    last = fields.integer("max_window_layers", 28)
    # Unlike in Qwen 2, every second one of the lower layers has the window.
    types = read_layer_types(fields, lambda layer: window is not None and layer % 2 == 0 and layer < last)
    step = fields.positive("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers")
    return evolve(
        read_common(fields, sliding_windows=read_windows(fields, types, window)),
        qkv_bias=fields.flag("qkv_bias", True),
        moe=read_moe(
            fields,
            layers=(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0),
            intermediate_size=fields.positive("moe_intermediate_size", 1408),
            renormalize=fields.flag("norm_topk_prob", False),
            shared_intermediate_size=fields.positive("shared_expert_intermediate_size", 5632),
        ),
    )


FAMILY = DecoderFamily(
    architectures=("Qwen2MoeForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=151_936, hidden=2048, mlp=5632, layers=24, heads=16),
)
