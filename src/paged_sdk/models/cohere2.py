"""Read Command R7B and A: Command R with sliding windows in three of four layers; the fourth has no positions."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import NO_ROPE
from paged_sdk.models.cohere import read_cohere
from paged_sdk.models.common_config import read_layer_types, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(sliding_window=4096)
    layer_types = read_layer_types(
        fields, lambda layer: (layer + 1) % fields.positive("sliding_window_pattern", 4) != 0
    )
    windows = read_windows(fields, layer_types, fields.optional_positive("sliding_window"))
    shape = read_cohere(fields, default_theta=10_000.0)
    ropes = tuple(NO_ROPE if window is None else rope for rope, window in zip(shape.ropes, windows, strict=True))
    return evolve(shape, ropes=ropes, sliding_windows=windows)


FAMILY = DecoderFamily(
    architectures=("Cohere2ForCausalLM",),
    read=_read,
    sizes=Sizes(vocab=256_000, hidden=8192, mlp=22_528, layers=40, heads=64),
)
