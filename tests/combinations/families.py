"""Describes the families of tiny models, and asks which of them compute a row alike whatever is beside it."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tiny
import tiny_vision
from mtp_checkpoints import MTP_CONFIGS, add_mtp_layer
from paged_sdk import ConfigError, MemoryGpuConfig, PagedAttentionMeta, TextModelBuilder, VisionModelBuilder
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment

__all__ = ["OTHERS", "RECURRENT", "STATEFUL", "VISION", "WITH_ASSISTANT", "WITH_MTP", "is_fused", "make_checkpoint"]

WITH_MTP: Final = ("qwen3_5_text", "qwen3_next", "glm4_moe", "qwen3_5")
"""Families whose checkpoints have a layer for multi-token prediction here."""
WITH_ASSISTANT: Final = ("gemma4_text", "gemma4")
"""Families that an assistant drafts for here."""
VISION: Final = ("llava", "qwen2_vl", "gemma3", "qwen3_5", "mistral3", "qwen3_vl", "gemma4")
_MAMBA: Final = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16}
RECURRENT: Final[Mapping[str, Mapping[str, Any]]] = {
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
    "qwen3_5_text": MTP_CONFIGS["qwen3_5_text"],
    "qwen3_next": MTP_CONFIGS["qwen3_next"] | {"mlp_only_layers": [0]},
    "bamba": {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "num_hidden_layers": 3},
    "granitemoehybrid": {
        **_MAMBA,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128, "num_hidden_layers": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
    },
}
STATEFUL: Final = (*RECURRENT, "qwen3_5")
"""Families with recurrent layers, whose prefix cache is not stored."""
_LATENT: Final[Mapping[str, Mapping[str, Any]]] = {
    "youtu": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    }
}
_SHAPED: Final[Mapping[str, Mapping[str, Any]]] = {
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "global_head_dim": 32,
        "sliding_window": 12,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": tiny.VOCAB_SIZE,
    }
}
"""Families whose layers differ in their shapes."""
_GROUPED: Final[Mapping[str, Any]] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_MIXTURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "glm4_moe": {**_GROUPED, "n_group": 4, "topk_group": 2, "partial_rotary_factor": 0.5},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1},
}
_SCALED: Final[Mapping[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
"""Queries are scaled from position 16 on."""
_CLASSES: Final[Mapping[str, Mapping[str, Any]]] = {
    "solar_open": _GROUPED,
    "olmo": {},
    "ministral3": {"rope_parameters": _SCALED},
}
"""Families that transformers' classes compute, with experts and without."""
OTHERS: Final = {**RECURRENT, **_LATENT, **_MIXTURES, **_CLASSES, **_SHAPED}


def make_checkpoint(family: str, directory: Path, **overrides: Any) -> None:
    """Write a model of a family.

    :param overrides: fields of its config; families that take images have none
    """
    if family in VISION:
        tiny_vision.make_vision_checkpoint(family, directory)
    elif family in OTHERS:
        tiny.make_other_checkpoint(family, directory, **{**OTHERS[family], **overrides})
    else:
        tiny.make_checkpoint(family, directory, **overrides)
    if family in WITH_MTP:
        add_mtp_layer(directory)


@functools.cache
def is_fused(family: str) -> bool:
    """Ask whether a family's layers run in native calls, which promise one arithmetic for every number of rows.

    Where layers run one operation at a time, the last bits of a row depend on the rows beside it.
    """
    make = VisionModelBuilder if family in VISION else TextModelBuilder
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(family, Path(folder))
        builder = make(folder).with_force_cpu().with_num_threads(1).with_dtype("float32").with_max_model_len(72)
        pool = PagedAttentionMeta(block_size=4, gpu_memory=MemoryGpuConfig.ContextSize(72))
        builder = builder.with_paged_attn(pool).with_batch_invariance()
        try:
            load_parts(builder.source, builder.settings, read_environment({}))
        except ConfigError as error:
            if "with_batch_invariance" not in str(error):
                raise
            return False
    return True
