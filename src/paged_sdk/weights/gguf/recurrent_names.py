"""List GGUF's tensor names of models with recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from attrs import evolve

from paged_sdk.weights.gguf.architecture import EACH, MTP, TOP_NAMES, GgufArchitecture
from paged_sdk.weights.gguf.layer_names import (
    ATTENTION,
    EXPERTS,
    GRANITE_EXPERTS,
    GRANITE_SHARED,
    MLP,
    PRE_NORM,
    PROJECTIONS,
    QK_NORM,
    SHARED_EXPERT,
    UP_DOWN,
)

__all__ = ["RECURRENT"]

_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_EXPERTS = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": f"feed_forward.experts.{EACH}.w1",
    "ffn_up_exps": f"feed_forward.experts.{EACH}.w3",
    "ffn_down_exps": f"feed_forward.experts.{EACH}.w2",
}
# The norm before the output projection; files have it as that of the embeddings.
_LFM2_TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
# Layers of gated attention, and of gated delta networks.
_DELTA_NORMS = {"post_attention_norm": "post_attention_layernorm", "ssm_norm": "linear_attn.norm"}
_DELTA = {"ssm_conv1d": "linear_attn.conv1d", "ssm_out": "linear_attn.out_proj"}
_BARE_DELTA = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_QWEN35 = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_BARE_MAMBA = {"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"}
_FALCON_H1 = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}


def _within_mixer(names: Mapping[str, str]) -> dict[str, str]:
    """Return the same names in layers that have one part alone."""
    return {stem: f"mixer.{name.rpartition('.')[2]}" for stem, name in names.items()}


_NEMOTRON_H = {
    "attn_norm": "norm",
    **_within_mixer(_MAMBA | PROJECTIONS),
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_NEMOTRON_H_EXPERTS = {
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_exps": f"mixer.experts.{EACH}.up_proj",
    "ffn_down_exps": f"mixer.experts.{EACH}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
# Older files have ssm_in, as Hugging Face's checkpoints do.
_QWEN3_NEXT = {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
_GRANITE_HYBRID = GgufArchitecture(
    model_type="granitemoehybrid",
    block_names=ATTENTION | PRE_NORM | _MAMBA | {"ffn_down": "shared_mlp.output_linear"},
    bare_names=_BARE_MAMBA,
    joined={"shared_mlp.input_linear": ("ffn_gate", "ffn_up")},
    permuted_qk=True,
    bias_groups={"attention_bias": tuple(PROJECTIONS)},
)

_NEMOTRON = GgufArchitecture(
    model_type="nemotron_h",
    block_names=_NEMOTRON_H,
    bare_names=_within_mixer(_BARE_MAMBA),
    top_names={
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
    },
    body="backbone.",
    permuted_qk=True,
    bias_groups={"mlp_bias": tuple(UP_DOWN)},
)

RECURRENT: Final[Mapping[str, GgufArchitecture]] = MappingProxyType(
    {
        "lfm2": GgufArchitecture(
            model_type="lfm2",
            block_names=_LFM2,
            top_names=_LFM2_TOP,
        ),
        "lfm2moe": GgufArchitecture(
            model_type="lfm2_moe",
            block_names=_LFM2 | _LFM2_EXPERTS,
            bare_names={"exp_probs_b.bias": "feed_forward.expert_bias"},
            top_names=_LFM2_TOP,
        ),
        "qwen3next": GgufArchitecture(
            model_type="qwen3_next",
            block_names=ATTENTION | QK_NORM | _DELTA_NORMS | _DELTA | _QWEN3_NEXT | EXPERTS | SHARED_EXPERT,
            bare_names=_BARE_DELTA,
            joined={"linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate")},
            norm_offset=1.0,
            plain_norms=("ssm_norm",),
            mtp_names=MTP,
        ),
        "qwen35": GgufArchitecture(
            model_type="qwen3_5_text",
            block_names=ATTENTION | QK_NORM | _DELTA_NORMS | _DELTA | _QWEN35 | MLP,
            bare_names=_BARE_DELTA,
            tiled_heads=True,
            norm_offset=1.0,
            plain_norms=("ssm_norm",),
            mtp_names=MTP,
        ),
        "qwen35moe": GgufArchitecture(
            model_type="qwen3_5_moe_text",
            block_names=ATTENTION | QK_NORM | _DELTA_NORMS | _DELTA | _QWEN35 | EXPERTS | SHARED_EXPERT,
            bare_names=_BARE_DELTA,
            tiled_heads=True,
            norm_offset=1.0,
            plain_norms=("ssm_norm",),
            mtp_names=MTP,
        ),
        "granitehybrid": evolve(
            _GRANITE_HYBRID,
            mixture=evolve(
                _GRANITE_HYBRID,
                block_names=ATTENTION | PRE_NORM | _MAMBA | GRANITE_EXPERTS,
                joined=GRANITE_SHARED,
            ),
        ),
        "falcon-h1": GgufArchitecture(
            model_type="falcon_h1",
            block_names=ATTENTION | _FALCON_H1 | _MAMBA,
            bare_names=_BARE_MAMBA | {"ffn_norm": "pre_ff_layernorm.weight"},
            top_names=TOP_NAMES | {"output_norm": "model.final_layernorm"},
        ),
        "mamba2": GgufArchitecture(
            model_type="mamba2",
            block_names={"attn_norm": "norm", **_within_mixer(_MAMBA)},
            bare_names=_within_mixer(_BARE_MAMBA),
            top_names=_NEMOTRON.top_names,
            body="backbone.",
        ),
        "nemotron_h": _NEMOTRON,
        "nemotron_h_moe": evolve(
            _NEMOTRON,
            block_names=_NEMOTRON_H | _NEMOTRON_H_EXPERTS,
            bare_names={**_NEMOTRON.bare_names, "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        ),
    }
)
"""Maps GGUF's ``general.architecture`` to its description, of models with recurrent layers."""
