"""List GGUF's tensor names for each architecture, and how values differ from those of Hugging Face checkpoints.

GGUF's names come from llama.cpp. Its converters change values in these ways only: query and key rows of llama and a few
others are permuted (llama.cpp's rotary embedding pairs neighbours, Hugging Face's pairs the halves of a head); the norm
weights of gemma, nemotron and those with gated delta networks have 1 added; the matrices of a layer's experts are
stacked, as are stablelm's per-head norms; fused QKV matrices have all queries, all keys, all values (falcon's and
bloom's checkpoints group them by KV head); Qwen3-Reranker's rank head has two rows, which are to be subtracted;
convolutions have one dimension less; of Mamba-2 layers and gated delta networks, the logarithms of decay rates become
the negated rates, and Mamba-2's vectors are matrices; qwen3next's fused projection is two matrices without groups of
rows, and qwen35's value heads have another order; Granite's fused gate and up are two matrices; falcon-h1's multipliers
are in the weights; apertus's learned numbers of activations are lists in the metadata; and deepseek2's projection of
latent vectors is two stacks of a matrix per head, those of keys transposed.

The table is our own. The gguf package's maps go from every name that any checkpoint has used to GGUF's: inverting them
takes a list of the Hugging Face names of each architecture, which is this table. The package would also require pyyaml
and requests, and take 60 ms to import. ``tests/weights/test_gguf_names.py`` compares the table with the package's maps.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from paged_sdk.weights.gguf.architecture import EACH, LATENT_UP, MTP, TOP_NAMES, GgufArchitecture
from paged_sdk.weights.gguf.encoder_names import ENCODERS
from paged_sdk.weights.gguf.layer_names import (
    ATTENTION,
    EXPERTS,
    GRANITE_EXPERTS,
    GRANITE_SHARED,
    MLP,
    PRE_NORM,
    PROJECTIONS,
    QK_NORM,
    SANDWICH_NORMS,
    SHARED_EXPERT,
    UP_DOWN,
)
from paged_sdk.weights.gguf.recurrent_names import RECURRENT

__all__ = ["ARCHITECTURES", "RANK_HEAD"]

RANK_HEAD = "cls.output.weight"
"""The layer of a reranker that turns a hidden state into scores, with one row per label."""

_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EACH}.w1",
    "ffn_up_exps": f"block_sparse_moe.experts.{EACH}.w3",
    "ffn_down_exps": f"block_sparse_moe.experts.{EACH}.w2",
}
# Shared experts without a gate, and the bias of the choice.
_SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_HUNYUAN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate.wg",
    "ffn_gate_shexp": "mlp.shared_mlp.gate_proj",
    "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}
_CHOICE_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": f"mlp.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EACH}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EACH}.down_proj",
}
_BIAS_GROUPS = {"attention_bias": tuple(PROJECTIONS), "mlp_bias": tuple(MLP)}
_OUTPUT_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
_POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
_AFMOE = {
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
}
# Inputs of the layers' own, and experts beside MLPs.
_GEMMA4 = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_exps": f"experts.{EACH}.gate_proj",
    "ffn_up_exps": f"experts.{EACH}.up_proj",
    "ffn_down_exps": f"experts.{EACH}.down_proj",
}
_BARE_GEMMA4 = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
}
_APERTUS_NORMS = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
_XIELU = {
    "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
    "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
    "xielu.beta": ("mlp.act_fn.beta", ()),
    "xielu.eps": ("mlp.act_fn.eps", ()),
}
_FUSED = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_DENSE_UP_DOWN = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_GROUPED = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
} | _DENSE_UP_DOWN
_MPT = {
    "attn_norm": "norm_1",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.out_proj",
    "ffn_norm": "norm_2",
    "ffn_up": "ffn.up_proj",
    "ffn_down": "ffn.down_proj",
}
_NORMS_OF_HEADS = {
    "attn_q_norm": f"self_attn.q_layernorm.norms.{EACH}",
    "attn_k_norm": f"self_attn.k_layernorm.norms.{EACH}",
}
_LATENT = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}
#: Maps GGUF's ``general.architecture`` to its description. Mistral and Mixtral models are "llama" too.
ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(
            model_type="llama",
            block_names=ATTENTION | PRE_NORM | MLP | _MIXTRAL_EXPERTS,
            permuted_qk=True,
            bias_groups=_BIAS_GROUPS,
        ),
        "qwen2": GgufArchitecture(model_type="qwen2", block_names=ATTENTION | PRE_NORM | MLP),
        "qwen2moe": GgufArchitecture(
            model_type="qwen2_moe", block_names=ATTENTION | PRE_NORM | EXPERTS | SHARED_EXPERT
        ),
        "qwen3": GgufArchitecture(
            model_type="qwen3",
            block_names=ATTENTION | QK_NORM | PRE_NORM | MLP,
            top_names=TOP_NAMES | {"cls.output": "score"},
        ),
        "qwen2vl": GgufArchitecture(model_type="qwen2_vl_text", block_names=ATTENTION | PRE_NORM | MLP),
        "qwen3vl": GgufArchitecture(model_type="qwen3_vl_text", block_names=ATTENTION | QK_NORM | PRE_NORM | MLP),
        "qwen3moe": GgufArchitecture(model_type="qwen3_moe", block_names=ATTENTION | QK_NORM | PRE_NORM | EXPERTS),
        "qwen3vlmoe": GgufArchitecture(
            model_type="qwen3_vl_moe_text", block_names=ATTENTION | QK_NORM | PRE_NORM | EXPERTS
        ),
        "phi3": GgufArchitecture(model_type="phi3", block_names=_FUSED),
        "gemma2": GgufArchitecture(model_type="gemma2", block_names=ATTENTION | SANDWICH_NORMS | MLP, norm_offset=1.0),
        "gemma3": GgufArchitecture(
            model_type="gemma3_text", block_names=ATTENTION | QK_NORM | SANDWICH_NORMS | MLP, norm_offset=1.0
        ),
        "gemma4": GgufArchitecture(
            model_type="gemma4_text",
            block_names=ATTENTION | QK_NORM | SANDWICH_NORMS | MLP | _GEMMA4,
            bare_names=_BARE_GEMMA4,
            top_names=TOP_NAMES
            | {
                "per_layer_token_embd": "model.embed_tokens_per_layer",
                "per_layer_model_proj": "model.per_layer_model_projection",
                "per_layer_proj_norm": "model.per_layer_projection_norm",
            },
        ),
        "gemma4-assistant": GgufArchitecture(
            model_type="gemma4_assistant",
            block_names=ATTENTION | QK_NORM | SANDWICH_NORMS | MLP,
            bare_names=_BARE_GEMMA4,
            top_names=TOP_NAMES
            | {"nextn.pre_projection": "pre_projection", "nextn.post_projection": "post_projection"},
        ),
        "gemma": GgufArchitecture(model_type="gemma", block_names=ATTENTION | PRE_NORM | MLP, norm_offset=1.0),
        "granite": GgufArchitecture(
            model_type="granite",
            block_names=ATTENTION | PRE_NORM | MLP,
            permuted_qk=True,
            bias_groups=_BIAS_GROUPS,
        ),
        "granitemoe": GgufArchitecture(
            model_type="granitemoe",
            block_names=ATTENTION | PRE_NORM | GRANITE_EXPERTS,
            joined=GRANITE_SHARED,
            permuted_qk=True,
            bias_groups={"attention_bias": tuple(PROJECTIONS)},
        ),
        "mistral3": GgufArchitecture(model_type="ministral3", block_names=ATTENTION | PRE_NORM | MLP, permuted_qk=True),
        "smollm3": GgufArchitecture(
            model_type="smollm3",
            block_names=ATTENTION | PRE_NORM | MLP,
            permuted_qk=True,
            bias_groups=_BIAS_GROUPS,
        ),
        "arcee": GgufArchitecture(
            model_type="arcee",
            block_names=ATTENTION | PRE_NORM | UP_DOWN,
            permuted_qk=True,
            bias_groups=_BIAS_GROUPS,
        ),
        "apertus": GgufArchitecture(
            model_type="apertus",
            block_names=PROJECTIONS | QK_NORM | UP_DOWN | _APERTUS_NORMS,
            layer_numbers=_XIELU,
            bias_groups={"attention_bias": tuple(PROJECTIONS)},
        ),
        "seed_oss": GgufArchitecture(
            model_type="seed_oss",
            block_names=ATTENTION | _POST_NORM | MLP,
        ),
        "ernie4_5": GgufArchitecture(model_type="ernie4_5", block_names=ATTENTION | PRE_NORM | MLP),
        "olmo2": GgufArchitecture(model_type="olmo2", block_names=PROJECTIONS | QK_NORM | _OUTPUT_NORMS | MLP),
        "exaone4": GgufArchitecture(model_type="exaone4", block_names=PROJECTIONS | QK_NORM | _OUTPUT_NORMS | MLP),
        "exaone-moe": GgufArchitecture(
            model_type="exaone_moe",
            block_names=ATTENTION | QK_NORM | PRE_NORM | MLP | EXPERTS | _SHARED_EXPERTS,
            bare_names={"exp_probs_b.bias": "mlp.e_score_correction_bias"},
        ),
        "glm4": GgufArchitecture(model_type="glm4", block_names=ATTENTION | _GLM4),
        "glm4moe": GgufArchitecture(
            model_type="glm4_moe",
            block_names=ATTENTION | QK_NORM | _POST_NORM | MLP | EXPERTS | _SHARED_EXPERTS,
            bare_names=_CHOICE_BIAS,
            mtp_names=MTP,
        ),
        "dots1": GgufArchitecture(
            model_type="dots1",
            block_names=ATTENTION | QK_NORM | PRE_NORM | MLP | EXPERTS | _SHARED_EXPERTS,
            bare_names=_CHOICE_BIAS,
        ),
        "afmoe": GgufArchitecture(
            model_type="afmoe",
            block_names=ATTENTION | QK_NORM | MLP | EXPERTS | _SHARED_EXPERTS | _AFMOE,
            bare_names={"exp_probs_b.bias": "mlp.expert_bias"},
        ),
        "ernie4_5-moe": GgufArchitecture(
            model_type="ernie4_5_moe",
            block_names=ATTENTION | PRE_NORM | MLP | EXPERTS | _SHARED_EXPERTS,
            bare_names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        ),
        "minimax-m2": GgufArchitecture(
            model_type="minimax_m2",
            block_names=ATTENTION | QK_NORM | PRE_NORM | _MIXTRAL_EXPERTS,
            bare_names={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        ),
        "hunyuan-dense": GgufArchitecture(
            model_type="hunyuan_v1_dense", block_names=ATTENTION | _HUNYUAN_NORMS | PRE_NORM | MLP
        ),
        "hunyuan-moe": GgufArchitecture(
            model_type="hunyuan_v1_moe",
            block_names=ATTENTION | _HUNYUAN_NORMS | PRE_NORM | EXPERTS | _HUNYUAN_EXPERTS,
        ),
        "starcoder2": GgufArchitecture(
            model_type="starcoder2",
            block_names=ATTENTION | PRE_NORM | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        ),
        "gpt-oss": GgufArchitecture(
            model_type="gpt_oss",
            block_names=ATTENTION | _GPT_OSS,
            bare_names={"attn_sinks.weight": "self_attn.sinks"},
        ),
        "command-r": GgufArchitecture(model_type="cohere", block_names=ATTENTION | QK_NORM | MLP),
        "cohere2": GgufArchitecture(model_type="cohere2", block_names=ATTENTION | MLP),
        "nemotron": GgufArchitecture(
            model_type="nemotron",
            block_names=ATTENTION | PRE_NORM | UP_DOWN,
            norm_offset=1.0,
            bias_groups=_BIAS_GROUPS,
        ),
        "olmoe": GgufArchitecture(model_type="olmoe", block_names=ATTENTION | QK_NORM | PRE_NORM | EXPERTS),
        "phi2": GgufArchitecture(
            model_type="phi",
            block_names=ATTENTION | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
            top_names=TOP_NAMES | {"output_norm": "model.final_layernorm"},
        ),
        "stablelm": GgufArchitecture(model_type="stablelm", block_names=ATTENTION | _NORMS_OF_HEADS | PRE_NORM | MLP),
        "falcon": GgufArchitecture(
            model_type="falcon",
            block_names=_GROUPED,
            beside_names={"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
            top_names=TOP_NAMES | {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f"},
            body="transformer.",
            layers="h",
            grouped_qkv=True,
        ),
        "bloom": GgufArchitecture(
            model_type="bloom",
            block_names=_GROUPED | PRE_NORM,
            top_names=TOP_NAMES
            | {
                "token_embd": "transformer.word_embeddings",
                "token_embd_norm": "transformer.word_embeddings_layernorm",
                "output_norm": "transformer.ln_f",
            },
            body="transformer.",
            layers="h",
            grouped_qkv=True,
        ),
        "mpt": GgufArchitecture(
            model_type="mpt",
            block_names=_MPT,
            top_names=TOP_NAMES | {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f"},
            body="transformer.",
            layers="blocks",
        ),
        # Older files have attn_kv_b, as Hugging Face's checkpoints do.
        "deepseek2": GgufArchitecture(
            model_type="deepseek_v2",
            block_names=_LATENT | PRE_NORM | MLP | EXPERTS | _SHARED_EXPERTS,
            bare_names=_CHOICE_BIAS,
            joined={"self_attn.kv_b_proj": LATENT_UP},
            mtp_names=MTP,
        ),
        **RECURRENT,
        **ENCODERS,
    }
)
