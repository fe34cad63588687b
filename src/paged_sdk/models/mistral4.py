"""Read Mistral 4: latent attention whose queries grow with their position, and mixtures of experts."""

from __future__ import annotations

from typing import Any, Final

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily, Sizes
from paged_sdk.models.latent_attention_fields import read_latent
from paged_sdk.models.moe_fields import GROUPED_EXPERTS, read_grouped_moe, read_later_layers
from paged_sdk.models.rope_fields import rope_section
from paged_sdk.models.tensor_names import TensorNames

__all__ = ["FAMILY"]

# Default of configs without settings of the rotary embedding.
_ROPE: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _read(fields: ConfigFields) -> DecoderConfig:
    fields = _with_rope(fields).with_defaults(
        max_position_embeddings=1_048_576,
        kv_lora_rank=256,
        moe_intermediate_size=2048,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=4,
    )
    shape = read_latent(fields, default_query_rank=1024)
    beta = rope_section(fields).number("llama_4_scaling_beta", 0.0)
    shape = evolve(shape, ropes=tuple(evolve(rope, query_scale_beta=beta) for rope in shape.ropes))
    layers = read_later_layers(fields, shape.num_layers, 0)
    if not layers:
        return shape
    moe = read_grouped_moe(fields, layers=layers, scoring=("softmax",))
    return evolve(shape, moe=evolve(moe, sigmoid_scores=False, has_choice_bias=False, float32_router=False))


def _with_rope(fields: ConfigFields) -> ConfigFields:
    """Return the fields with settings of the rotary embedding, which rotates all of ``qk_rope_head_dim`` elements.

    The config counts them as a part of a query (``partial_rotary_factor``).
    """
    fields = fields.with_defaults(qk_rope_head_dim=64, qk_nope_head_dim=64)
    section = rope_section(fields)
    rotated, others = fields.positive("qk_rope_head_dim"), fields.positive("qk_nope_head_dim")
    own = "partial_rotary_factor"
    share = next((each.number(own) for each in (section, fields) if own in each.values()), None)
    if share is not None and int((rotated + others) * share) != rotated:
        raise section.error(own, f"{rotated} of {rotated + others}, as qk_rope_head_dim says")
    values = {name: value for name, value in (section.values() or _ROPE).items() if name != own}
    return ConfigFields({**fields.values(), own: None, "rope_scaling": None, "rope_parameters": values})


FAMILY = DecoderFamily(
    architectures=("Mistral4ForCausalLM",),
    read=_read,
    names=(TensorNames(experts=(GROUPED_EXPERTS,)),),
    sizes=Sizes(vocab=131_072, hidden=4096, mlp=12_288, layers=36, heads=32),
)
