"""Write a model of Qwen2.5-1.5B's shape with random weights, a context of 32,768 and few tokens, as a GGUF file.

It is for long contexts: prompts of 16,000 tokens of the model itself take no longer, and the vocabulary of 152,000, a
fifth of the weights, says nothing about depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.random_gemma import add_tokenizer, finish, random_blocks

__all__ = ["write_qwen"]

_LAYERS: Final = 28
_HIDDEN: Final = 1536
_INNER: Final = 8960
_HEADS: Final = 12
_KV_HEADS: Final = 2
_HEAD_DIM: Final = 128
_VOCAB_SIZE: Final = 49_152

_Q4_K_M: Final = 15


def write_qwen(path: Path, tokenizer: Path) -> None:
    """Write the model in the formats of Q4_K_M.

    :param tokenizer: a GGUF file whose tokenizer it gets
    """
    import gguf

    writer: Any = gguf.GGUFWriter(path, "qwen2")
    writer.add_name("Qwen2.5 1.5B's shape, random weights")
    writer.add_file_type(_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, setting in _settings().items():
        add = writer.add_float32 if isinstance(setting, float) else writer.add_uint32
        add(f"qwen2.{key}", setting)
    add_tokenizer(writer, tokenizer, _VOCAB_SIZE)
    for name, size, value in _vectors():
        writer.add_tensor(name, np.full(size, value, dtype=np.float32))
    for name, quantization, shape in _matrices():
        # A seed for each tensor, so that its content does not depend on the order.
        generator = np.random.default_rng(list(name.encode()))
        kind = gguf.GGMLQuantizationType[quantization]
        writer.add_tensor(name, random_blocks(quantization, *shape, generator), raw_dtype=kind)
    finish(writer)


def _settings() -> Mapping[str, int | float]:
    return {
        "context_length": 32_768,
        "embedding_length": _HIDDEN,
        "block_count": _LAYERS,
        "feed_forward_length": _INNER,
        "attention.head_count": _HEADS,
        "attention.head_count_kv": _KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1_000_000.0,
    }


def _vectors() -> Iterator[tuple[str, int, float]]:
    """Yield name, size and value of each norm and bias."""
    yield "output_norm.weight", _HIDDEN, 1.0
    for layer in range(_LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", _HIDDEN, 1.0
        for name, heads in (("attn_q", _HEADS), ("attn_k", _KV_HEADS), ("attn_v", _KV_HEADS)):
            yield f"blk.{layer}.{name}.bias", heads * _HEAD_DIM, 0.0


def _matrices() -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield name, format and shape of each matrix; the output projection is the embedding's."""
    yield "token_embd.weight", "Q6_K", (_VOCAB_SIZE, _HIDDEN)
    for layer in range(_LAYERS):
        eighth = _LAYERS // 8
        more_bits = layer < eighth or layer >= 7 * _LAYERS // 8 or (layer - eighth) % 3 == 2
        for name, quantization, shape in (
            ("attn_q", "Q4_K", (_HEADS * _HEAD_DIM, _HIDDEN)),
            ("attn_k", "Q4_K", (_KV_HEADS * _HEAD_DIM, _HIDDEN)),
            ("attn_v", "Q6_K" if more_bits else "Q4_K", (_KV_HEADS * _HEAD_DIM, _HIDDEN)),
            ("attn_output", "Q4_K", (_HIDDEN, _HEADS * _HEAD_DIM)),
            ("ffn_gate", "Q4_K", (_INNER, _HIDDEN)),
            ("ffn_up", "Q4_K", (_INNER, _HIDDEN)),
            ("ffn_down", "Q6_K" if more_bits else "Q4_K", (_HIDDEN, _INNER)),
        ):
            yield f"blk.{layer}.{name}.weight", quantization, shape
