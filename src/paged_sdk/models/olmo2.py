"""Read OLMo 2: llama with norms after attention and MLP instead of before, and norms of queries and keys."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig, QkNormWeights
from paged_sdk.models.common_config import read_common
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY", "evolve_olmo"]


def evolve_olmo(shape: DecoderConfig, fields: ConfigFields) -> DecoderConfig:
    """Return a llama's shape with the changes of OLMo 2 and 3."""
    has_bias = fields.flag("attention_bias", False)
    return evolve(
        shape,
        input_norms=False,
        sandwich_norms=True,
        norm_in_float32=True,
        qk_norm=True,
        qk_norm_weights=QkNormWeights.WHOLE,
        qkv_bias=has_bias,
        output_bias=has_bias,
    )


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    return evolve_olmo(read_common(fields), fields)


FAMILY = DecoderFamily(
    architectures=("Olmo2ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=50_304, hidden=4096, mlp=11_008, layers=32, heads=32),
)
