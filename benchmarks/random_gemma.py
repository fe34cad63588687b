"""Write a model of gemma3-270M's shape with random weights and a tokenizer of its own, as GGUF files.

Types are those of llama.cpp's Q4_K_M for this shape: rows of 640 are not a multiple of blocks of 256, so most matrices
fall back to Q5_0 and Q8_0.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.random_gguf import Matrix, RandomModel, finish, rich_layers

__all__ = ["random_gemma", "write_bfloat16"]

_LAYERS: Final = 18
_HIDDEN: Final = 640
_INNER: Final = 2048
_HEADS: Final = 4
_HEAD_DIM: Final = 256
_VOCAB_SIZE: Final = 262_144


def random_gemma() -> RandomModel:
    """Describe the model."""
    return RandomModel(
        architecture="gemma3",
        name="gemma3 270M, random weights",
        settings={
            "context_length": 32_768,
            "embedding_length": _HIDDEN,
            "block_count": _LAYERS,
            "feed_forward_length": _INNER,
            "attention.head_count": _HEADS,
            "attention.head_count_kv": 1,
            "attention.key_length": _HEAD_DIM,
            "attention.value_length": _HEAD_DIM,
            "attention.sliding_window": 512,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1_000_000.0,
        },
        vocab_size=_VOCAB_SIZE,
        vectors=tuple(_vectors()),
        matrices=tuple(_matrices()),
    )


def write_bfloat16(path: Path, quantized: Path) -> None:
    """Write the same model with its weights decoded to bfloat16.

    :param quantized: the model in Q4_K_M
    """
    import gguf
    import torch

    from paged_sdk.weights.gguf.file import GgufFile

    model, tensors = random_gemma(), GgufFile(quantized).tensors
    writer = model.writer(path, quantized, "BF16")
    for name, _, _ in model.matrices:
        values = tensors[name].decoded(torch.bfloat16)
        writer.add_tensor(name, values.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    finish(writer)


def _vectors() -> Iterator[tuple[str, int, float]]:
    yield "output_norm.weight", _HIDDEN, 1.0
    for layer in range(_LAYERS):
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            yield f"blk.{layer}.{name}.weight", _HIDDEN, 1.0
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"blk.{layer}.{name}.weight", _HEAD_DIM, 1.0


def _matrices() -> Iterator[Matrix]:
    yield "token_embd.weight", "Q8_0", (_VOCAB_SIZE, _HIDDEN)
    rich = rich_layers(_LAYERS)
    for layer in range(_LAYERS):
        wide = _HEADS * _HEAD_DIM
        for name, quantization, shape in (
            ("attn_q", "Q5_0", (wide, _HIDDEN)),
            ("attn_k", "Q5_0", (_HEAD_DIM, _HIDDEN)),
            ("attn_v", "Q8_0" if layer in rich else "Q5_0", (_HEAD_DIM, _HIDDEN)),
            ("attn_output", "Q4_K", (_HIDDEN, wide)),
            ("ffn_gate", "Q5_0", (_INNER, _HIDDEN)),
            ("ffn_up", "Q5_0", (_INNER, _HIDDEN)),
            ("ffn_down", "Q6_K" if layer in rich else "Q4_K", (_HIDDEN, _INNER)),
        ):
            yield f"blk.{layer}.{name}.weight", quantization, shape
