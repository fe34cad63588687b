"""Read dots.llm1: mixtures of experts in all but the first layers, and norms of queries and keys."""

from __future__ import annotations

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.common_config import read_common, read_layer_types, read_windows
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.moe_fields import GROUPED_EXPERTS, read_grouped_moe, read_later_layers
from paged_sdk.models.tensor_names import TensorNames

__all__ = ["FAMILY"]


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = fields.with_defaults(
        num_key_value_heads=32, sliding_window=4096, moe_intermediate_size=1408, norm_topk_prob=False
    )
    window, first_window = fields.optional_positive("sliding_window"), fields.integer("max_window_layers", 62)
    layer_types = read_layer_types(fields, lambda layer: window is not None and layer >= first_window)
    shape = read_common(fields, sliding_windows=read_windows(fields, layer_types, window))
    has_bias = fields.flag("attention_bias", False)
    shape = evolve(shape, qk_norm=True, qkv_bias=has_bias, output_bias=has_bias)
    layers = read_later_layers(fields, shape.num_layers, 0)
    # The released checkpoints name DeepSeek V3's way to choose experts there.
    scoring = ("noaux_tc", "sigmoid")
    return evolve(shape, moe=read_grouped_moe(fields, layers=layers, scoring=scoring)) if layers else shape


FAMILY = DecoderFamily(
    architectures=("Dots1ForCausalLM",),
    read=_read,
    names=(TensorNames(experts=(GROUPED_EXPERTS,)),),
    sizes=Sizes(vocab=152_064, hidden=4608, mlp=10_944, layers=62, heads=32),
)
