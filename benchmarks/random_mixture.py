"""Describe a mixture of experts: eight of Qwen3-30B-A3B's 48 layers, with random weights and a small vocabulary.

A layer selects 8 of 128 experts per token, and reads 32 of its 350 MB for one token. A router with random weights
selects experts as evenly as trained routers are meant to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.random_gguf import Matrix, RandomModel, attention_matrices, rich_layers

__all__ = ["random_mixture"]

_LAYERS: Final = 8
_HIDDEN: Final = 2048
_HEADS: Final = 32
_KV_HEADS: Final = 4
_HEAD_DIM: Final = 128
_EXPERTS: Final = 128
_SELECTED: Final = 8
_INNER: Final = 768  # intermediate size of an expert
_VOCAB_SIZE: Final = 49_152


def random_mixture() -> RandomModel:
    """Describe the model."""
    return RandomModel(
        architecture="qwen3moe",
        name="8 layers of Qwen3-30B-A3B's shape, random weights",
        settings={
            "context_length": 40_960,
            "embedding_length": _HIDDEN,
            "block_count": _LAYERS,
            "feed_forward_length": 6144,  # for layers without experts; there are none
            "expert_count": _EXPERTS,
            "expert_used_count": _SELECTED,
            "expert_feed_forward_length": _INNER,
            "attention.head_count": _HEADS,
            "attention.head_count_kv": _KV_HEADS,
            "attention.key_length": _HEAD_DIM,
            "attention.value_length": _HEAD_DIM,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1_000_000.0,
        },
        vocab_size=_VOCAB_SIZE,
        vectors=tuple(_vectors()),
        matrices=tuple(_matrices()),
    )


def _vectors() -> Iterator[tuple[str, int, float]]:
    yield "output_norm.weight", _HIDDEN, 1.0
    for layer in range(_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", _HIDDEN, 1.0
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"blk.{layer}.{name}.weight", _HEAD_DIM, 1.0


def _matrices() -> Iterator[Matrix]:
    yield "token_embd.weight", "Q4_K", (_VOCAB_SIZE, _HIDDEN)
    yield "output.weight", "Q6_K", (_VOCAB_SIZE, _HIDDEN)
    rich = rich_layers(_LAYERS)
    for layer in range(_LAYERS):
        queries, keys, is_rich = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM, layer in rich
        yield from attention_matrices(layer, _HIDDEN, queries, keys, is_rich=is_rich)
        for name, quantization, shape in (
            ("ffn_gate_inp", "F32", (_EXPERTS, _HIDDEN)),
            ("ffn_gate_exps", "Q4_K", (_EXPERTS, _INNER, _HIDDEN)),
            ("ffn_up_exps", "Q4_K", (_EXPERTS, _INNER, _HIDDEN)),
            ("ffn_down_exps", "Q6_K" if is_rich else "Q4_K", (_EXPERTS, _HIDDEN, _INNER)),
        ):
            yield f"blk.{layer}.{name}.weight", quantization, shape
