"""List GGUF's tensor names for each architecture, and how values differ from those of Hugging Face checkpoints.

GGUF's names come from llama.cpp. Its converters change values in these ways only: query and key rows of llama and a few
others are permuted (llama.cpp's rotary embedding pairs neighbours, Hugging Face's pairs the halves of a head); the norm
weights of gemma, nemotron and those with gated delta networks have 1 added; the matrices of a layer's experts are
stacked, as are stablelm's per-head norms; fused QKV matrices have all queries, all keys, all values (falcon's and
bloom's checkpoints group them by KV head); Qwen3-Reranker's rank head has two rows, which are to be subtracted;
convolutions have one dimension less; of Mamba-2 layers and gated delta networks, the logarithms of decay rates become
the negated rates, and Mamba-2's vectors are matrices; qwen3next's fused projection is two matrices without groups of
rows, and qwen35's value heads have another order; Granite's fused gate and up are two matrices; falcon-h1's
multipliers are in the weights; and deepseek2's projection of latent vectors is two stacks of a matrix per head, those
of keys transposed.

The table is our own. The gguf package's maps go from every name that any checkpoint has used to GGUF's: inverting them
takes a list of the Hugging Face names of each architecture, which is this table. The package would also require pyyaml
and requests, and take 60 ms to import. ``tests/weights/test_gguf_names.py`` compares the table with the package's maps.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from attrs import evolve

from paged_sdk.weights.gguf.architecture import EACH, LATENT_UP, TOP_NAMES, GgufArchitecture

__all__ = ["ARCHITECTURES", "RANK_HEAD"]

RANK_HEAD = "cls.output.weight"
"""The layer of a reranker that turns a hidden state into scores, with one row per label."""

_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_ATTENTION = {"attn_norm": "input_layernorm"} | _PROJECTIONS
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EACH}.w1",
    "ffn_up_exps": f"block_sparse_moe.experts.{EACH}.w3",
    "ffn_down_exps": f"block_sparse_moe.experts.{EACH}.w2",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EACH}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EACH}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
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
_BIAS_GROUPS = {"attention_bias": tuple(_PROJECTIONS), "mlp_bias": tuple(_MLP)}
_UP_DOWN = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_OUTPUT_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
_POST_NORM = {"post_attention_norm": "post_attention_layernorm"}
_PRE_NORM = {"ffn_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
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
_FUSED = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}

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
# Of these layers each has one part alone.
_NEMOTRON_H = {
    "attn_norm": "norm",
    **{stem: f"mixer.{name.rpartition('.')[2]}" for stem, name in (_MAMBA | _PROJECTIONS).items()},
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
# Older files have ssm_in, as Hugging Face's checkpoints do.
_QWEN3_NEXT = {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
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
_BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_BERT_EMBEDDINGS = {
    "token_embd": "embeddings.word_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "token_types": "embeddings.token_type_embeddings",
}
_NOMIC_BERT = {
    "attn_output": "self_attn.o_proj",
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm",
}
_MODERN_BERT = {
    "attn_norm": "attn_norm",
    "attn_qkv": "attn.Wqkv",
    "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm",
    "ffn_up": "mlp.Wi",
    "ffn_down": "mlp.Wo",
}
_GRANITE_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"block_sparse_moe.experts.{EACH}.up_proj",
    "ffn_down_exps": f"block_sparse_moe.experts.{EACH}.down_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_GRANITE_HYBRID = GgufArchitecture(
    model_type="granitemoehybrid",
    block_names=_ATTENTION | _PRE_NORM | _MAMBA | {"ffn_down": "shared_mlp.output_linear"},
    bare_names=_BARE_MAMBA,
    joined={"shared_mlp.input_linear": ("ffn_gate", "ffn_up")},
    permuted_qk=True,
    bias_groups={"attention_bias": tuple(_PROJECTIONS)},
)
#: Maps GGUF's ``general.architecture`` to its description. Mistral and Mixtral models are "llama" too.
ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(
            model_type="llama",
            block_names=_ATTENTION | _PRE_NORM | _MLP | _MIXTRAL_EXPERTS,
            permuted_qk=True,
            bias_groups=_BIAS_GROUPS,
        ),
        "qwen2": GgufArchitecture(model_type="qwen2", block_names=_ATTENTION | _PRE_NORM | _MLP),
        "qwen2moe": GgufArchitecture(
            model_type="qwen2_moe", block_names=_ATTENTION | _PRE_NORM | _EXPERTS | _SHARED_EXPERT
        ),
        "qwen3": GgufArchitecture(
            model_type="qwen3",
            block_names=_ATTENTION | _QK_NORM | _PRE_NORM | _MLP,
            top_names=TOP_NAMES | {"cls.output": "score"},
        ),
        "qwen2vl": GgufArchitecture(model_type="qwen2_vl_text", block_names=_ATTENTION | _PRE_NORM | _MLP),
        "qwen3vl": GgufArchitecture(model_type="qwen3_vl_text", block_names=_ATTENTION | _QK_NORM | _PRE_NORM | _MLP),
        "qwen3moe": GgufArchitecture(model_type="qwen3_moe", block_names=_ATTENTION | _QK_NORM | _PRE_NORM | _EXPERTS),
        "phi3": GgufArchitecture(model_type="phi3", block_names=_FUSED),
        "gemma2": GgufArchitecture(
            model_type="gemma2", block_names=_ATTENTION | _SANDWICH_NORMS | _MLP, norm_offset=1.0
        ),
        "gemma3": GgufArchitecture(
            model_type="gemma3_text", block_names=_ATTENTION | _QK_NORM | _SANDWICH_NORMS | _MLP, norm_offset=1.0
        ),
        "gemma4": GgufArchitecture(
            model_type="gemma4_text",
            block_names=_ATTENTION | _QK_NORM | _SANDWICH_NORMS | _MLP | _GEMMA4,
            bare_names=_BARE_GEMMA4,
            top_names=TOP_NAMES
            | {
                "per_layer_token_embd": "model.embed_tokens_per_layer",
                "per_layer_model_proj": "model.per_layer_model_projection",
                "per_layer_proj_norm": "model.per_layer_projection_norm",
            },
        ),
        "gemma": GgufArchitecture(model_type="gemma", block_names=_ATTENTION | _PRE_NORM | _MLP, norm_offset=1.0),
        "granite": GgufArchitecture(
            model_type="granite",
            block_names=_ATTENTION | _PRE_NORM | _MLP,
            permuted_qk=True,
            bias_groups=_BIAS_GROUPS,
        ),
        "smollm3": GgufArchitecture(
            model_type="smollm3",
            block_names=_ATTENTION | _PRE_NORM | _MLP,
            permuted_qk=True,
            bias_groups=_BIAS_GROUPS,
        ),
        "arcee": GgufArchitecture(
            model_type="arcee",
            block_names=_ATTENTION | _PRE_NORM | _UP_DOWN,
            permuted_qk=True,
            bias_groups=_BIAS_GROUPS,
        ),
        "seed_oss": GgufArchitecture(
            model_type="seed_oss",
            block_names=_ATTENTION | _POST_NORM | _MLP,
        ),
        "ernie4_5": GgufArchitecture(model_type="ernie4_5", block_names=_ATTENTION | _PRE_NORM | _MLP),
        "olmo2": GgufArchitecture(model_type="olmo2", block_names=_PROJECTIONS | _QK_NORM | _OUTPUT_NORMS | _MLP),
        "exaone4": GgufArchitecture(model_type="exaone4", block_names=_PROJECTIONS | _QK_NORM | _OUTPUT_NORMS | _MLP),
        "glm4": GgufArchitecture(model_type="glm4", block_names=_ATTENTION | _GLM4),
        "glm4moe": GgufArchitecture(
            model_type="glm4_moe",
            block_names=_ATTENTION | _QK_NORM | _POST_NORM | _MLP | _EXPERTS | _SHARED_EXPERTS,
            bare_names=_CHOICE_BIAS,
        ),
        "dots1": GgufArchitecture(
            model_type="dots1",
            block_names=_ATTENTION | _QK_NORM | _PRE_NORM | _MLP | _EXPERTS | _SHARED_EXPERTS,
            bare_names=_CHOICE_BIAS,
        ),
        "ernie4_5-moe": GgufArchitecture(
            model_type="ernie4_5_moe",
            block_names=_ATTENTION | _PRE_NORM | _MLP | _EXPERTS | _SHARED_EXPERTS,
            bare_names={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        ),
        "minimax-m2": GgufArchitecture(
            model_type="minimax_m2",
            block_names=_ATTENTION | _QK_NORM | _PRE_NORM | _MIXTRAL_EXPERTS,
            bare_names={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        ),
        "hunyuan-dense": GgufArchitecture(
            model_type="hunyuan_v1_dense", block_names=_ATTENTION | _HUNYUAN_NORMS | _PRE_NORM | _MLP
        ),
        "hunyuan-moe": GgufArchitecture(
            model_type="hunyuan_v1_moe",
            block_names=_ATTENTION | _HUNYUAN_NORMS | _PRE_NORM | _EXPERTS | _HUNYUAN_EXPERTS,
        ),
        "starcoder2": GgufArchitecture(
            model_type="starcoder2",
            block_names=_ATTENTION | _PRE_NORM | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        ),
        "gpt-oss": GgufArchitecture(
            model_type="gpt_oss",
            block_names=_ATTENTION | _GPT_OSS,
            bare_names={"attn_sinks.weight": "self_attn.sinks"},
        ),
        "command-r": GgufArchitecture(model_type="cohere", block_names=_ATTENTION | _QK_NORM | _MLP),
        "cohere2": GgufArchitecture(model_type="cohere2", block_names=_ATTENTION | _MLP),
        "nemotron": GgufArchitecture(
            model_type="nemotron",
            block_names=_ATTENTION | _PRE_NORM | _UP_DOWN,
            norm_offset=1.0,
            bias_groups=_BIAS_GROUPS,
        ),
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
            block_names=_ATTENTION | _QK_NORM | _DELTA_NORMS | _DELTA | _QWEN3_NEXT | _EXPERTS | _SHARED_EXPERT,
            bare_names=_BARE_DELTA,
            joined={"linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate")},
            norm_offset=1.0,
            plain_norms=("ssm_norm",),
        ),
        "qwen35": GgufArchitecture(
            model_type="qwen3_5_text",
            block_names=_ATTENTION | _QK_NORM | _DELTA_NORMS | _DELTA | _QWEN35 | _MLP,
            bare_names=_BARE_DELTA,
            tiled_heads=True,
            norm_offset=1.0,
            plain_norms=("ssm_norm",),
        ),
        "qwen35moe": GgufArchitecture(
            model_type="qwen3_5_moe_text",
            block_names=_ATTENTION | _QK_NORM | _DELTA_NORMS | _DELTA | _QWEN35 | _EXPERTS | _SHARED_EXPERT,
            bare_names=_BARE_DELTA,
            tiled_heads=True,
            norm_offset=1.0,
            plain_norms=("ssm_norm",),
        ),
        "granitehybrid": evolve(
            _GRANITE_HYBRID,
            mixture=evolve(
                _GRANITE_HYBRID,
                block_names=_ATTENTION | _PRE_NORM | _MAMBA | _GRANITE_EXPERTS,
                joined={"shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp")},
            ),
        ),
        "falcon-h1": GgufArchitecture(
            model_type="falcon_h1",
            block_names=_ATTENTION | _FALCON_H1 | _MAMBA,
            bare_names=_BARE_MAMBA | {"ffn_norm": "pre_ff_layernorm.weight"},
            top_names=TOP_NAMES | {"output_norm": "model.final_layernorm"},
        ),
        "nemotron_h": GgufArchitecture(
            model_type="nemotron_h",
            block_names=_NEMOTRON_H,
            bare_names={own: f"mixer.{name.rpartition('.')[2]}" for own, name in _BARE_MAMBA.items()},
            top_names={
                "token_embd": "backbone.embeddings",
                "output_norm": "backbone.norm_f",
                "output": "lm_head",
            },
            body="backbone.",
            permuted_qk=True,
            bias_groups={"mlp_bias": tuple(_UP_DOWN)},
        ),
        "olmoe": GgufArchitecture(model_type="olmoe", block_names=_ATTENTION | _QK_NORM | _PRE_NORM | _EXPERTS),
        "phi2": GgufArchitecture(
            model_type="phi",
            block_names=_ATTENTION | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
            top_names=TOP_NAMES | {"output_norm": "model.final_layernorm"},
        ),
        "stablelm": GgufArchitecture(
            model_type="stablelm", block_names=_ATTENTION | _NORMS_OF_HEADS | _PRE_NORM | _MLP
        ),
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
            block_names=_GROUPED | _PRE_NORM,
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
            block_names=_LATENT | _PRE_NORM | _MLP | _EXPERTS | _SHARED_EXPERTS,
            bare_names=_CHOICE_BIAS,
            joined={"self_attn.kv_b_proj": LATENT_UP},
        ),
        # XLM-RoBERTa, RoBERTa and DistilBERT, too: their layers are BERT's.
        "bert": GgufArchitecture(
            model_type="bert",
            block_names=_BERT,
            top_names=_BERT_EMBEDDINGS
            | {
                "position_embd": "embeddings.position_embeddings",
                "cls": "pooler.dense",
                "cls.output": "classifier",
            },
            body="",
            layers="encoder.layer",
            bias_groups={"attention_bias": (*_PROJECTIONS, "attn_qkv"), "mlp_bias": tuple(_UP_DOWN)},
            divided={"attn_qkv": (_BERT["attn_q"], _BERT["attn_k"], _BERT["attn_v"])},
            left_out=("token_types",),
            is_encoder=True,
        ),
        "nomic-bert": GgufArchitecture(
            model_type="nomic_bert",
            block_names=_NOMIC_BERT | _MLP,
            top_names=_BERT_EMBEDDINGS,
            body="",
            divided={"attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
            left_out=("token_types",),
            is_encoder=True,
        ),
        "modern-bert": GgufArchitecture(
            model_type="modernbert",
            block_names=_MODERN_BERT,
            top_names={
                "token_embd": "model.embeddings.tok_embeddings",
                "token_embd_norm": "model.embeddings.norm",
                "output_norm": "model.final_norm",
                "cls": "head.dense",
                "cls.norm": "head.norm",
                "cls.output": "classifier",
            },
            is_encoder=True,
        ),
        "eurobert": GgufArchitecture(model_type="eurobert", block_names=_ATTENTION | _PRE_NORM | _MLP, is_encoder=True),
        "gemma-embedding": GgufArchitecture(
            model_type="gemma3_text",
            block_names=_ATTENTION | _QK_NORM | _SANDWICH_NORMS | _MLP,
            top_names=TOP_NAMES | {"dense_2": "dense_2", "dense_3": "dense_3"},
            norm_offset=1.0,
            is_encoder=True,
        ),
    }
)
