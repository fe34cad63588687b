"""Describe a model of Qwen2.5-1.5B's shape with random weights, a context of 32,768 and a small vocabulary.

It is for measurements of long contexts, where random weights take as long as trained ones, and the vocabulary of
152,000, a fifth of the weights, does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.random_gguf import Matrix, RandomModel, attention_matrices, mlp_matrices, rich_layers

__all__ = ["random_qwen"]

_LAYERS: Final = 28
_HIDDEN: Final = 1536
_INNER: Final = 8960
_HEADS: Final = 12
_KV_HEADS: Final = 2
_HEAD_DIM: Final = 128
_VOCAB_SIZE: Final = 49_152


def random_qwen() -> RandomModel:
    """Describe the model; its output projection is tied to the embedding."""
    return RandomModel(
        architecture="qwen2",
        name="Qwen2.5 1.5B's shape, random weights",
        settings={
            "context_length": 32_768,
            "embedding_length": _HIDDEN,
            "block_count": _LAYERS,
            "feed_forward_length": _INNER,
            "attention.head_count": _HEADS,
            "attention.head_count_kv": _KV_HEADS,
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
        for name, heads in (("attn_q", _HEADS), ("attn_k", _KV_HEADS), ("attn_v", _KV_HEADS)):
            yield f"blk.{layer}.{name}.bias", heads * _HEAD_DIM, 0.0


def _matrices() -> Iterator[Matrix]:
    yield "token_embd.weight", "Q6_K", (_VOCAB_SIZE, _HIDDEN)
    rich = rich_layers(_LAYERS)
    for layer in range(_LAYERS):
        queries, keys, is_rich = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM, layer in rich
        yield from attention_matrices(layer, _HIDDEN, queries, keys, is_rich=is_rich)
        yield from mlp_matrices(layer, _HIDDEN, _INNER, is_rich=is_rich)
