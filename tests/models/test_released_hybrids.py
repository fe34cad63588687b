"""Configs of released models with Mamba-2 layers are read as transformers reads them, with the sizes that they have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import transformers
from transformers import AutoConfig

from paged_sdk.attention.recurrent import state_bytes
from paged_sdk.config.recurrent import Mamba2Config
from paged_sdk.models.family import read_config

_GRANITE: Final[dict[str, Any]] = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100_352,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12,
    "logits_scaling": 8,
    "residual_multiplier": 0.22,
    "mamba_d_state": 128,
    "mamba_d_head": 64,
    "max_position_embeddings": 131_072,
    "normalization_function": "rmsnorm",
    "num_experts_per_tok": 0,
    "num_local_experts": 0,
    "num_hidden_layers": 40,
    "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    "position_embedding_type": "nope",
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10_000,
    "tie_word_embeddings": True,
}
_FALCON: Final[dict[str, Any]] = {
    "model_type": "falcon_h1",
    "attn_layer_indices": None,
    "embedding_multiplier": 5.656854249492381,
    "mamba_norm_before_gate": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "mlp_expansion_factor": 8,
    "rope_scaling": None,
    "rope_theta": 100_000_000_000.0,
}
_NEMOTRON: Final[dict[str, Any]] = {
    "model_type": "nemotron_h",
    "expand": 2,
    "mlp_hidden_act": "relu2",
    "n_groups": 8,
    "num_key_value_heads": 8,
    "num_query_groups": 8,
    "rms_norm_eps": 1e-5,
    "residual_in_fp32": False,
    "rescale_prenorm_residual": True,
    "sliding_window": None,
    "time_step_limit": [0.0, math.inf],
    "time_step_rank": 256,
    "vocab_size": 131_072,
}
_NEMOTRON_3: Final = _NEMOTRON | {
    "intermediate_size": 1856,
    "max_position_embeddings": 262_144,
    "mamba_head_dim": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10_000,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "time_step_floor": 1e-4,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
}
_MAMBA2: Final[dict[str, Any]] = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "chunk_size": 256,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "norm_before_gate": True,
    "rms_norm": True,
    "state_size": 128,
    "time_step_limit": [0.0, math.inf],
    "use_bias": False,
    "use_conv_bias": True,
}
_PATTERN: Final = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_PATTERN_OF_56: Final = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"


def _sizes(hidden: int, mlp: int, heads: int, kv_heads: int, **own: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **own,
    }


# By model: its config, the layers with attention, the parts of a projection, and a sequence's states in bfloat16, MiB.
RELEASED: Final[dict[str, tuple[dict[str, Any], int, tuple[int, ...], int]]] = {
    "Granite-4.0-H-Micro": (
        _GRANITE | _sizes(2048, 8192, 32, 8, shared_intermediate_size=8192, mamba_n_heads=64),
        4,
        (4096, 4096, 128, 128, 64),
        73,
    ),
    "Granite-4.0-H-Tiny": (
        _GRANITE
        | _sizes(1536, 512, 12, 4, shared_intermediate_size=1024, mamba_n_heads=48)
        | {"num_local_experts": 64, "num_experts_per_tok": 6, "logits_scaling": 6},
        4,
        (3072, 3072, 128, 128, 48),
        55,
    ),
    "Granite-4.0-Micro": (
        _GRANITE
        | _sizes(2560, 8192, 40, 8, shared_intermediate_size=8192, mamba_n_heads=128, mamba_d_head="auto")
        | {"layer_types": ["attention"] * 40, "position_embedding_type": "rope", "rope_theta": 10_000_000},
        40,
        (),
        0,
    ),
    "Falcon-H1-0.5B": (
        _FALCON
        | _sizes(1024, 2048, 8, 2, head_dim=64, num_hidden_layers=36, vocab_size=32_784)
        | {"mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_n_heads": 24}
        | {"attention_out_multiplier": 0.9375, "key_multiplier": 0.39062499999999994, "ssm_in_multiplier": 1.25}
        | {"mlp_multipliers": [0.8838834764831844, 0.5859375], "lm_head_multiplier": 0.0390625}
        | {"ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738]},
        36,
        (1536, 1536, 128, 128, 24),
        27,
    ),
    "Falcon-H1-34B": (
        _FALCON
        | _sizes(5120, 21_504, 20, 4, head_dim=128, num_hidden_layers=72, vocab_size=261_120)
        | {"mamba_d_head": 128, "mamba_d_ssm": 4096, "mamba_d_state": 256, "mamba_n_groups": 2, "mamba_n_heads": 32}
        | {"attention_out_multiplier": 0.0375, "key_multiplier": 0.011048543456039804, "ssm_in_multiplier": 0.25},
        72,
        (4096, 4096, 512, 512, 32),
        290,
    ),
    "Nemotron-H-8B": (
        _NEMOTRON
        | _sizes(4096, 21_504, 32, 8, attention_head_dim=128, mamba_head_dim=64, mamba_num_heads=128)
        | {"num_hidden_layers": 52, "hybrid_override_pattern": _PATTERN, "max_position_embeddings": 8192},
        4,
        (8192, 8192, 1024, 1024, 128),
        97,
    ),
    "Nemotron Nano 9B v2": (
        _NEMOTRON
        | _sizes(4480, 15_680, 40, 8, head_dim=128, mamba_head_dim=80, mamba_num_heads=128)
        | {"num_hidden_layers": 56, "hybrid_override_pattern": _PATTERN_OF_56, "max_position_embeddings": 131_072},
        4,
        (10_240, 10_240, 1024, 1024, 128),
        137,
    ),
    "Nemotron 3 Nano 30B-A3B": (
        _NEMOTRON_3 | _sizes(2688, 1856, 32, 2, head_dim=128, mamba_num_heads=64, num_hidden_layers=52),
        6,
        (4096, 4096, 1024, 1024, 64),
        47,
    ),
    "Nemotron 3 Super 120B-A12B": (
        _NEMOTRON_3
        | _sizes(4096, 2688, 32, 2, head_dim=128, mamba_num_heads=128, num_hidden_layers=8)
        | {"n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_latent_size": 1024}
        | {"moe_shared_expert_intermediate_size": 5376, "routed_scaling_factor": 5.0, "num_nextn_predict_layers": 1}
        | {"hybrid_override_pattern": "MEMEMEM*", "mtp_hybrid_override_pattern": "*E"},  # the first of 88
        1,
        (8192, 8192, 1024, 1024, 128),
        16,
    ),
    "Codestral Mamba 7B": (
        _MAMBA2 | {"hidden_size": 4096, "n_groups": 8, "num_heads": 128, "num_hidden_layers": 64, "vocab_size": 32_768},
        0,
        (8192, 8192, 1024, 1024, 128),
        260,
    ),
    "mamba2-130m": (
        _MAMBA2
        | {"hidden_size": 768, "n_groups": 1, "num_heads": 24, "num_hidden_layers": 24, "vocab_size": 50_288}
        | {"tie_word_embeddings": True},
        0,
        (1536, 1536, 128, 128, 24),
        18,
    ),
    "Bamba-9B": (
        _sizes(4096, 14_336, 32, 8, model_type="bamba", num_hidden_layers=32, vocab_size=128_256)
        | {"attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "rope_scaling": None, "rope_theta": 10_000.0}
        | {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_heads": 128},
        3,
        (8192, 8192, 128, 128, 128),
        117,
    ),
}
_WITH_POSITIONS: Final = ("Granite-4.0-Micro", "Falcon-H1-0.5B", "Falcon-H1-34B", "Bamba-9B")


@pytest.mark.parametrize("name", RELEASED)
def test_configs_are_read_as_by_transformers(name: str, tmp_path: Path) -> None:
    content, num_attending, parts, mebibytes = RELEASED[name]
    (tmp_path / "config.json").write_text(json.dumps(content))  # an infinity is the bare word, as in released files
    own = read_config(json.loads((tmp_path / "config.json").read_text()))
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    assert own == read_config(AutoConfig.from_pretrained(tmp_path).to_dict())
    assert len(own.attention_layers) == num_attending
    mambas = [each for each in own.recurrent_layers.values() if isinstance(each, Mamba2Config)]
    assert {each.parts for each in mambas} == ({parts} if parts else set())
    assert round(state_bytes(own, torch.bfloat16, 0) / 2**20) == mebibytes
    assert own.ropes[0].rotates == (name in _WITH_POSITIONS)
