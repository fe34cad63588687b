"""Read StableLM 2: llama with layer norms and rotary embedding of a quarter of each head; some models norm heads."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig, NormKind, QkNormWeights
from paged_sdk.models.common_config import read_common, read_one_rope
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.tensor_names import NormNames, TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=32, max_position_embeddings=4096, layer_norm_eps=1e-5, partial_rotary_factor=0.25
    )
    # transformers ignores head_dim in this family.
    if fields.optional_positive("head_dim") not in (
        None,
        fields.positive("hidden_size") // fields.positive("num_attention_heads"),
    ):
        raise fields.error("head_dim", "hidden_size / num_attention_heads")
    return evolve(
        read_common(
            fields,
            ropes=(read_one_rope(fields, is_partial=True),) * fields.positive("num_hidden_layers"),
            eps="layer_norm_eps",
        ),
        norm=NormKind.LAYER,
        norm_bias=True,
        parallel_residual=fields.flag("use_parallel_residual", False),
        qkv_bias=fields.flag("use_qkv_bias", False),
        qk_norm=fields.flag("qk_layernorm", False),
        qk_norm_weights=QkNormWeights.OWN,
    )


_NORMS = NormNames(query="self_attn.q_layernorm", key="self_attn.k_layernorm")

FAMILY = DecoderFamily(
    architectures=("StableLmForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=50_304, hidden=2560, mlp=6912, layers=32, heads=32),
    names=(TensorNames(norms=_NORMS),),
)
