"""List GGUF's tensor names of encoders."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from paged_sdk.weights.gguf.architecture import TOP_NAMES, GgufArchitecture
from paged_sdk.weights.gguf.layer_names import ATTENTION, MLP, PRE_NORM, PROJECTIONS, QK_NORM, SANDWICH_NORMS, UP_DOWN

__all__ = ["ENCODERS"]

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

ENCODERS: Final[Mapping[str, GgufArchitecture]] = MappingProxyType(
    {
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
            bias_groups={"attention_bias": (*PROJECTIONS, "attn_qkv"), "mlp_bias": tuple(UP_DOWN)},
            divided={"attn_qkv": (_BERT["attn_q"], _BERT["attn_k"], _BERT["attn_v"])},
            left_out=("token_types",),
            is_encoder=True,
        ),
        "nomic-bert": GgufArchitecture(
            model_type="nomic_bert",
            block_names=_NOMIC_BERT | MLP,
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
        "eurobert": GgufArchitecture(model_type="eurobert", block_names=ATTENTION | PRE_NORM | MLP, is_encoder=True),
        "gemma-embedding": GgufArchitecture(
            model_type="gemma3_text",
            block_names=ATTENTION | QK_NORM | SANDWICH_NORMS | MLP,
            top_names=TOP_NAMES | {"dense_2": "dense_2", "dense_3": "dense_3"},
            norm_offset=1.0,
            is_encoder=True,
        ),
    }
)
"""Maps GGUF's ``general.architecture`` to its description, of models whose attention is bidirectional."""
