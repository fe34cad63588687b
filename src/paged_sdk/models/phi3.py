"""Read Phi-3, 3.5 and 4: llama with fused projections and LongRoPE."""

from __future__ import annotations

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_head_dim
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.rope_fields import read_rope, rope_section
from paged_sdk.models.tensor_names import TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    # The default of the trained context applies even if max_position_embeddings states an extended one.
    fields = fields.with_defaults(
        max_position_embeddings=4096, original_max_position_embeddings=4096, rms_norm_eps=1e-5
    )
    num_layers = fields.positive("num_hidden_layers")
    rope = read_rope(
        fields,
        rope_section(fields),
        head_dim=read_head_dim(fields),
        default_theta=10_000.0,
        aliases={"su": "longrope", "yarn": "longrope"},  # names of LongRoPE in the first releases
        is_partial=True,
    )
    return read_common(
        fields,
        ropes=(rope,) * num_layers,
        sliding_windows=(fields.optional_positive("sliding_window"),) * num_layers,
    )


FAMILY = DecoderFamily(
    architectures=("Phi3ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=32_064, hidden=3072, mlp=8192, layers=32, heads=32),
    names=(TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),),
)
