"""Read OLMo 3: OLMo 2 with windows in three of four layers, which have a rotary embedding of their own."""

from __future__ import annotations

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import SLIDING, read_common, read_head_dim, read_layer_types, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.olmo2 import evolve_olmo
from paged_sdk.models.rope_fields import read_rope

__all__ = ["FAMILY"]

_THETA = 500_000.0


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(rms_norm_eps=1e-5, sliding_window=4096)
    layer_types = read_layer_types(fields, lambda layer: (layer + 1) % 4 != 0)
    head_dim = read_head_dim(fields)
    # The older form scales the full layers only, and its base is theirs alone. As transformers reads it, ``type``, the
    # older name of ``rope_type``, does not count in that form.
    nested = fields.section("rope_parameters")
    unscaled = ConfigFields({} if nested.values() else {"rope_type": "default"})
    full = read_rope(
        fields,
        unscaled.updated(nested.section("full_attention")).updated(fields.section("rope_scaling")),
        head_dim=head_dim,
        default_theta=_THETA,
        is_nested=True,
    )
    windowed = read_rope(
        ConfigFields({**fields.values(), "rope_theta": _THETA}),
        nested.section(SLIDING),
        head_dim=head_dim,
        default_theta=_THETA,
        is_nested=True,
    )
    shape = read_common(
        fields,
        ropes=tuple(windowed if each == SLIDING else full for each in layer_types),
        sliding_windows=read_windows(fields, layer_types, fields.optional_positive("sliding_window")),
    )
    return evolve_olmo(shape, fields)


FAMILY = DecoderFamily(
    architectures=("Olmo3ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=50_304, hidden=4096, mlp=11_008, layers=32, heads=32),
)
