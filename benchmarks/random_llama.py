"""Describe a model of Llama-3.1-8B's shape with random weights: 5 GB, the size that most people run.

Speed does not depend on the weights. The vocabulary has the real size, since a tenth of the weights that a token reads
are the output projection's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.random_gguf import Matrix, RandomModel, attention_matrices, mlp_matrices, rich_layers

__all__ = ["random_llama"]

_LAYERS: Final = 32
_HIDDEN: Final = 4096
_INNER: Final = 14_336
_HEADS: Final = 32
_KV_HEADS: Final = 8
_HEAD_DIM: Final = 128
_VOCAB_SIZE: Final = 128_256


def random_llama() -> RandomModel:
    """Describe the model."""
    return RandomModel(
        architecture="llama",
        name="Llama 3.1 8B's shape, random weights",
        settings={
            "context_length": 32_768,
            "embedding_length": _HIDDEN,
            "block_count": _LAYERS,
            "feed_forward_length": _INNER,
            "attention.head_count": _HEADS,
            "attention.head_count_kv": _KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": _HEAD_DIM,
            "rope.freq_base": 500_000.0,
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


def _matrices() -> Iterator[Matrix]:
    yield "token_embd.weight", "Q4_K", (_VOCAB_SIZE, _HIDDEN)
    yield "output.weight", "Q6_K", (_VOCAB_SIZE, _HIDDEN)
    rich = rich_layers(_LAYERS)
    for layer in range(_LAYERS):
        queries, keys, is_rich = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM, layer in rich
        yield from attention_matrices(layer, _HIDDEN, queries, keys, is_rich=is_rich)
        yield from mlp_matrices(layer, _HIDDEN, _INNER, is_rich=is_rich)
