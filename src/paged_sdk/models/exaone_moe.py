"""Read EXAONE with mixtures of experts (K-EXAONE). In models with sliding windows, layers without a window have no
positions.
"""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import NO_ROPE
from paged_sdk.models.common_config import read_common, read_layer_types, read_one_rope, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.moe_fields import (
    GROUPED_EXPERTS,
    read_grouped_moe,
    read_later_layers,
    read_sparse_layers,
)
from paged_sdk.models.tensor_names import TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=32,
        rms_norm_eps=1e-5,
        sliding_window=4096,
        moe_intermediate_size=1024,
        num_experts_per_tok=8,
        num_experts=64,
        num_shared_experts=1,
        routed_scaling_factor=2.5,
    )
    window = fields.optional_positive("sliding_window")
    layer_types = read_layer_types(
        fields,
        lambda layer: window is not None and (layer + 1) % fields.positive("sliding_window_pattern", 4) != 0,
    )
    windows, rope = read_windows(fields, layer_types, window), read_one_rope(fields)
    shape = evolve(
        read_common(
            fields,
            ropes=tuple(rope if window is None or each is not None else NO_ROPE for each in windows),
            sliding_windows=windows,
        ),
        qk_norm=True,
    )
    layers = read_sparse_layers(fields, shape.num_layers, read_later_layers(fields, shape.num_layers, 1))
    if not layers:
        return shape
    return evolve(
        shape,
        moe=read_grouped_moe(fields, layers=layers, count="num_experts", shared_count="num_shared_experts"),
    )


# Checkpoints have the second name of the bias.
_EXPERTS = (GROUPED_EXPERTS, evolve(GROUPED_EXPERTS, choice_bias="e_score_correction_bias"))

FAMILY = DecoderFamily(
    architectures=("ExaoneMoeForCausalLM",),
    read=_read,
    names=(TensorNames(experts=_EXPERTS, unused=("mtp.",)),),
    sizes=Sizes(vocab=102_400, hidden=4096, mlp=16_384, layers=32, heads=32),
)
