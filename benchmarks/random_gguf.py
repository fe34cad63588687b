"""Write models with random weights as GGUF files: they need no license, and speed does not depend on the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from attrs import frozen

__all__ = [
    "Array",
    "Matrix",
    "RandomModel",
    "attention_matrices",
    "finish",
    "mlp_matrices",
    "random_blocks",
    "rich_layers",
]

Array = npt.NDArray[Any]

Matrix = tuple[str, str, tuple[int, ...]]
"""Name, format, and shape of a matrix ``[rows, cols]`` or of several, ``[experts, rows, cols]``."""

_FILE_TYPES: Final = {"Q4_K_M": 15, "BF16": 32}


@frozen
class RandomModel:
    """Describes a model by the content of its file.

    :ivar architecture: llama.cpp's name of the architecture
    :ivar settings: metadata, without the architecture's prefix
    :ivar vectors: name, size and value of each norm and bias
    :ivar matrices: all other tensors
    """

    architecture: str
    name: str
    settings: Mapping[str, int | float]
    vocab_size: int
    vectors: Sequence[tuple[str, int, float]]
    matrices: Sequence[Matrix]

    def writer(self, path: Path, tokenizer: Path, file_type: str) -> Any:
        """Return a ``gguf`` writer that has everything except the matrices.

        :param tokenizer: a GGUF file whose tokenizer is copied, with unused tokens up to ``vocab_size``
        :param file_type: ``"Q4_K_M"`` or ``"BF16"``
        """
        import gguf

        writer: Any = gguf.GGUFWriter(path, self.architecture)
        writer.add_name(self.name)
        writer.add_file_type(_FILE_TYPES[file_type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in self.settings.items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{self.architecture}.{key}", value)
        _add_tokenizer(writer, tokenizer, self.vocab_size)
        for name, size, value in self.vectors:
            writer.add_tensor(name, np.full(size, value, dtype=np.float32))
        return writer

    def write_q4_k_m(self, path: Path, tokenizer: Path) -> None:
        """Write the model in the mixture of formats that llama.cpp calls Q4_K_M.

        :param tokenizer: as for :meth:`writer`
        """
        import gguf

        writer = self.writer(path, tokenizer, "Q4_K_M")
        for name, quantization, shape in self.matrices:
            # Seeded by the tensor's name, so that its content does not depend on the order.
            generator = np.random.default_rng(list(name.encode()))
            kind = gguf.GGMLQuantizationType[quantization]
            if kind is gguf.GGMLQuantizationType.F32:
                writer.add_tensor(name, generator.standard_normal(shape, dtype=np.float32) / shape[-1] ** 0.5)
                continue
            *counts, cols = shape
            blocks = random_blocks(quantization, int(np.prod(counts)), cols, generator)
            writer.add_tensor(name, blocks.reshape(*counts, -1), raw_dtype=kind)
        finish(writer)


def rich_layers(num_layers: int) -> frozenset[int]:
    """Return the layers whose value and down projections have more bits in Q4_K_M."""
    eighth = num_layers // 8
    return frozenset(
        layer
        for layer in range(num_layers)
        if layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    )


def attention_matrices(layer: int, hidden: int, queries: int, keys: int, *, is_rich: bool) -> Iterator[Matrix]:
    """Yield the matrices of a layer's attention, in the formats of Q4_K_M.

    :param queries: elements of all query heads together
    :param keys: elements of all key heads together, and of all value heads
    :param is_rich: see :func:`rich_layers`
    """
    for name, quantization, shape in (
        ("attn_q", "Q4_K", (queries, hidden)),
        ("attn_k", "Q4_K", (keys, hidden)),
        ("attn_v", "Q6_K" if is_rich else "Q4_K", (keys, hidden)),
        ("attn_output", "Q4_K", (hidden, queries)),
    ):
        yield f"blk.{layer}.{name}.weight", quantization, shape


def mlp_matrices(layer: int, hidden: int, inner: int, *, is_rich: bool) -> Iterator[Matrix]:
    """Yield the matrices of a layer's gated MLP, in the formats of Q4_K_M.

    :param inner: the intermediate size
    :param is_rich: see :func:`rich_layers`
    """
    for name, quantization, shape in (
        ("ffn_gate", "Q4_K", (inner, hidden)),
        ("ffn_up", "Q4_K", (inner, hidden)),
        ("ffn_down", "Q6_K" if is_rich else "Q4_K", (hidden, inner)),
    ):
        yield f"blk.{layer}.{name}.weight", quantization, shape


def random_blocks(quantization: str, rows: int, cols: int, generator: np.random.Generator) -> Array:
    """Draw uniform codes, with scales that keep products as large as their inputs. -> uint8 [rows, bytes of a row]"""
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


def _add_tokenizer(writer: Any, source: Path, vocab_size: int) -> None:
    """Give a model the tokenizer of a GGUF file, with unused tokens up to ``vocab_size``."""
    import gguf

    from paged_sdk.weights.gguf.file import GgufFile

    metadata = GgufFile(source).metadata
    tokens = list(metadata["tokenizer.ggml.tokens"])
    kinds = list(metadata["tokenizer.ggml.token_type"])
    unused = range(len(tokens), vocab_size)
    tokens += [f"<unused{index}>" for index in unused]
    kinds += [gguf.TokenType.UNUSED.value] * len(unused)
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
    """Write the file and close the writer."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
