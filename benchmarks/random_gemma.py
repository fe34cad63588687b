"""Write a model of gemma3-270M's shape with random weights and a tokenizer of its own, as GGUF files.

Nobody has to accept a license for it, and speed does not depend on what weights mean. Q4_K_M is what llama.cpp makes of
this shape: rows of 640 are no whole number of blocks of 256, so most matrices fall back to Q5_0 and Q8_0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["add_tokenizer", "finish", "random_blocks", "write_bfloat16", "write_q4_k_m"]

_LAYERS: Final = 18
_HIDDEN: Final = 640
_INNER: Final = 2048
_HEADS: Final = 4
_HEAD_DIM: Final = 256
_VOCAB_SIZE: Final = 262_144
_WINDOW: Final = 512
_CONTEXT: Final = 32_768

_SETTINGS: Final[Mapping[str, int | float]] = {
    "context_length": _CONTEXT,
    "embedding_length": _HIDDEN,
    "block_count": _LAYERS,
    "feed_forward_length": _INNER,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": 1,
    "attention.key_length": _HEAD_DIM,
    "attention.value_length": _HEAD_DIM,
    "attention.sliding_window": _WINDOW,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1_000_000.0,
}
_FILE_TYPES: Final = {"Q4_K_M": 15, "BF16": 32}

Array = npt.NDArray[Any]


def write_q4_k_m(path: Path, tokenizer: Path) -> None:
    """Write the model in the mixture of formats that llama.cpp calls Q4_K_M.

    :param tokenizer: a GGUF file whose tokenizer it gets, with unused tokens up to gemma's number
    """
    writer = _writer(path, tokenizer, "Q4_K_M")
    for name, quantization, shape in _matrices():
        kind = _gguf().GGMLQuantizationType[quantization]
        # A seed for each tensor, so that its content does not depend on the order.
        generator = np.random.default_rng(list(name.encode()))
        writer.add_tensor(name, random_blocks(quantization, *shape, generator), raw_dtype=kind)
    finish(writer)


def write_bfloat16(path: Path, quantized: Path) -> None:
    """Write the same model with its weights decoded to bfloat16.

    :param quantized: what :func:`write_q4_k_m` has written
    """
    import torch

    from paged_sdk.weights.gguf_file import GgufFile

    writer, kind = _writer(path, quantized, "BF16"), _gguf().GGMLQuantizationType.BF16
    tensors = GgufFile(quantized).tensors
    for name, _, _ in _matrices():
        values = tensors[name].decoded(torch.bfloat16)
        writer.add_tensor(name, values.view(torch.uint8).numpy(), raw_dtype=kind)
    finish(writer)


def _gguf() -> Any:
    import gguf

    return gguf


def _matrices() -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield name, format in Q4_K_M, and shape of each matrix."""
    yield "token_embd.weight", "Q8_0", (_VOCAB_SIZE, _HIDDEN)
    for layer in range(_LAYERS):
        eighth = _LAYERS // 8
        has_more_bits = layer < eighth or layer >= 7 * _LAYERS // 8 or (layer - eighth) % 3 == 2
        wide = _HEADS * _HEAD_DIM
        for name, quantization, shape in (
            ("attn_q", "Q5_0", (wide, _HIDDEN)),
            ("attn_k", "Q5_0", (_HEAD_DIM, _HIDDEN)),
            ("attn_v", "Q8_0" if has_more_bits else "Q5_0", (_HEAD_DIM, _HIDDEN)),
            ("attn_output", "Q4_K", (_HIDDEN, wide)),
            ("ffn_gate", "Q5_0", (_INNER, _HIDDEN)),
            ("ffn_up", "Q5_0", (_INNER, _HIDDEN)),
            ("ffn_down", "Q6_K" if has_more_bits else "Q4_K", (_HIDDEN, _INNER)),
        ):
            yield f"blk.{layer}.{name}.weight", quantization, shape


def random_blocks(quantization: str, rows: int, cols: int, generator: np.random.Generator) -> Array:
    """Draw uniform codes, with scales that keep a product as large as its input. -> uint8 [rows, bytes of a row]"""
    elements, num_bytes, deviation = {
        "Q8_0": (32, 34, 73.9),
        "Q5_0": (32, 22, 9.2),
        "Q4_K": (256, 144, 32 * 4.6),
        "Q6_K": (256, 210, 16 * 18.5),
    }[quantization]
    blocks = generator.integers(0, 256, (rows, cols // elements, num_bytes), dtype=np.uint8)
    unit = 1 / (deviation * cols**0.5)

    def half(value: float) -> Array:
        return np.array([value], dtype="<f2").view(np.uint8)

    match quantization:
        case "Q8_0" | "Q5_0":
            blocks[..., :2] = half(unit)
        case "Q4_K":
            blocks[..., :2] = half(unit)
            blocks[..., 2:4] = half(7.5 * unit)
            blocks[..., 4:12], blocks[..., 12:16] = 0xA0, 0x00  # all scales and minima are 32
        case "Q6_K":
            blocks[..., 192:208], blocks[..., 208:] = 16, half(unit)
    flat: Array = blocks.reshape(rows, -1)
    return flat


def _writer(path: Path, tokenizer: Path, file_type: str) -> Any:
    """Return a writer that has everything but the matrices."""
    gguf = _gguf()
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_name("gemma3 270M, random weights")
    writer.add_file_type(_FILE_TYPES[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in _SETTINGS.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"gemma3.{key}", value)
    add_tokenizer(writer, tokenizer, _VOCAB_SIZE)
    ones = [("output_norm", _HIDDEN)]
    for layer in range(_LAYERS):
        names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        ones += [(f"blk.{layer}.{name}", _HIDDEN) for name in names]
        ones += [(f"blk.{layer}.{name}", _HEAD_DIM) for name in ("attn_q_norm", "attn_k_norm")]
    for name, size in ones:
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))
    return writer


def add_tokenizer(writer: Any, source: Path, vocab_size: int) -> None:
    """Give a model the tokenizer of a GGUF file, with unused tokens up to ``vocab_size``."""
    from paged_sdk.weights.gguf_file import GgufFile

    metadata = GgufFile(source).metadata
    tokens = list(metadata["tokenizer.ggml.tokens"])
    kinds = list(metadata["tokenizer.ggml.token_type"])
    unused = range(len(tokens), vocab_size)
    tokens += [f"<unused{index}>" for index in unused]
    kinds += [_gguf().TokenType.UNUSED.value] * len(unused)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for key, value in metadata.items():
        if not key.startswith("tokenizer.") or key.endswith((".tokens", ".token_type")):
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def finish(writer: Any) -> None:
    """Write what the writer was given, and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
