"""Read CodeGen: GPT-J with one projection to queries, values and keys, in four groups of rows."""

from __future__ import annotations

from typing import Final

from attrs import evolve

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import CheckpointError
from paged_sdk.models.config_fields import ConfigFields
from paged_sdk.models.family import DecoderFamily
from paged_sdk.models.gptj import NAMES, read_gptj

__all__ = ["FAMILY"]

# One group per logical TPU core that the released models were trained on (transformers' mp_num).
_NUM_GROUPS: Final = 4


def _read(fields: ConfigFields) -> DecoderConfig:
    shape = read_gptj(fields)
    if shape.num_heads % _NUM_GROUPS:
        raise CheckpointError(f"config.json: n_head = {shape.num_heads}: expected a multiple of {_NUM_GROUPS}")
    return evolve(shape, qkv_groups=_NUM_GROUPS, qkv_values_first=True)


FAMILY = DecoderFamily(
    architectures=("CodeGenForCausalLM",), read=_read, names=(evolve(NAMES, qkv=("attn.qkv_proj",)),)
)
