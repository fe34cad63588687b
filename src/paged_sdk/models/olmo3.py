"""Read OLMo 3: OLMo 2 with sliding windows in three of four layers, which have a separate rotary embedding."""

from __future__ import annotations

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_layer_ropes, read_layer_types, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.olmo2 import evolve_olmo

__all__ = ["FAMILY"]

_THETA = 500_000.0


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(rms_norm_eps=1e-5, sliding_window=4096)
    layer_types = read_layer_types(fields, lambda layer: (layer + 1) % 4 != 0)
    shape = read_common(
        fields,
        ropes=read_layer_ropes(fields, layer_types, full_theta=_THETA, windowed_theta=_THETA),
        sliding_windows=read_windows(fields, layer_types, fields.optional_positive("sliding_window")),
    )
    return evolve_olmo(shape, fields)


FAMILY = DecoderFamily(
    architectures=("Olmo3ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=50_304, hidden=4096, mlp=11_008, layers=32, heads=32),
)
