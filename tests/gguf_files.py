"""Write small GGUF files with the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

__all__ = ["LLAMA", "add_metadata", "llama_tensors", "write_gguf"]

HIDDEN, HEADS, KV_HEADS, MLP, VOCAB = 32, 4, 2, 64, 48

#: Metadata of a llama of one layer; head size 8.
LLAMA: Mapping[str, Any] = {
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.block_count": 1,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def llama_tensors(layers: int = 1) -> dict[str, npt.NDArray[np.float32]]:
    """Make random tensors that fit :data:`LLAMA`, by GGUF name."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(layers):
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (HIDDEN // 2, HIDDEN),
            "attn_v": (HIDDEN // 2, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (MLP, HIDDEN),
            "ffn_up": (MLP, HIDDEN),
            "ffn_down": (HIDDEN, MLP),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    """Add values by full key; the types follow from the values, ints as uint32."""
    for key, value in metadata.items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any] = LLAMA,
    tensors: Mapping[str, npt.NDArray[Any]] | None = None,
    *,
    architecture: str = "llama",
    quantization: str = "F32",
    alignment: int | None = None,
) -> Path:
    """Write a file.

    :param metadata: see :func:`add_metadata`
    :param tensors: the tensors by GGUF name; None: :func:`llama_tensors`
    :param quantization: the type of all matrices
    :returns: ``path``
    """
    writer = gguf.GGUFWriter(path, architecture)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    add_metadata(writer, metadata)
    for name, array in (llama_tensors() if tensors is None else tensors).items():
        kind = gguf.GGMLQuantizationType[quantization if array.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
