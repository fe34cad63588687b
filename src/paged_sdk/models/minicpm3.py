"""Read MiniCPM 3: llama with latent attention, and factors of embeddings, residual branches and logits."""

from __future__ import annotations

import math

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.latent_attention_fields import read_latent

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    hidden, num_layers = fields.positive("hidden_size"), fields.positive("num_hidden_layers")
    fields = fields.with_defaults(
        max_position_embeddings=32_768,
        rms_norm_eps=1e-5,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
    )
    if not fields.is_set("v_head_dim"):
        fields = fields.updated(ConfigFields({"v_head_dim": hidden // fields.positive("num_attention_heads")}))
    # transformers' class rotates halves whatever the config says.
    shape = read_latent(
        fields.updated(ConfigFields({"rope_interleave": False})), default_query_rank=768, tie_embeddings=True
    )
    depth, base = fields.optional_number("scale_depth"), fields.optional_positive("dim_model_base")
    return evolve(
        shape,
        embedding_scale=fields.number("scale_emb"),
        residual_scale=None if depth is None else depth / math.sqrt(num_layers),
        logit_scale=None if base is None else base / hidden,
        mlp_bias=fields.flag("mlp_bias", False),
    )


FAMILY = DecoderFamily(
    architectures=("MiniCPM3ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=73_448, hidden=2560, mlp=6400, layers=62, heads=40),
)
