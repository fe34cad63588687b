"""Hold what the layers of several GGUF architectures name alike: GGUF name within ``blk.N.`` -> Hugging Face name."""

from __future__ import annotations

from typing import Final

from paged_sdk.weights.gguf.architecture import EACH

__all__ = [
    "ATTENTION",
    "EXPERTS",
    "GRANITE_EXPERTS",
    "GRANITE_SHARED",
    "MLP",
    "PRE_NORM",
    "PROJECTIONS",
    "QK_NORM",
    "SANDWICH_NORMS",
    "SHARED_EXPERT",
    "UP_DOWN",
]

PROJECTIONS: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
ATTENTION: Final = {"attn_norm": "input_layernorm"} | PROJECTIONS
QK_NORM: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP: Final = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
EXPERTS: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EACH}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EACH}.down_proj",
}
SHARED_EXPERT: Final = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GRANITE_EXPERTS: Final = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"block_sparse_moe.experts.{EACH}.up_proj",
    "ffn_down_exps": f"block_sparse_moe.experts.{EACH}.down_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
# A gate and an up projection that Hugging Face fuses.
GRANITE_SHARED: Final = {"shared_mlp.input_linear": ("ffn_gate_shexp", "ffn_up_shexp")}
UP_DOWN: Final = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORM: Final = {"ffn_norm": "post_attention_layernorm"}
SANDWICH_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
