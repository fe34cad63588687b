"""Write llama files as llama.cpp's converter did before GGUF, by their published layout."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch

from paged_sdk.kernels.quantized.gguf_blocks import tensor_type_of
from paged_sdk.kernels.quantized.quantize import quantize_blocks_reference

__all__ = ["PIECES", "write_ggjt"]

_NAMES: Final = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}
PIECES: Final = (" ", "h", "e", "l", "o", "w", "he", "ll", "hell", "hello", " w", " wo")
"""What follows the bytes in the vocabulary, the likeliest last."""


def write_ggjt(path: Path, model: Any, quantization: str = "F32", *, version: int = 3, words: bool = True) -> Path:
    """Write a file.

    :param model: a llama of transformers
    :param quantization: the type of all matrices
    :param words: write Llama's kind of vocabulary, marks, bytes and pieces; False: words of no such kind
    """
    config = model.config
    numbers = (
        config.vocab_size, config.hidden_size, 32, config.num_attention_heads, config.num_hidden_layers,
        config.head_dim, 0,
    )  # fmt: skip
    data = bytearray(b"tjgg" + struct.pack("<8I", version, *numbers))
    tokens = [b" \xe2\x81\x87 ", b"", b"", *(bytes([byte]) for byte in range(256))]
    tokens += [piece.encode() for piece in PIECES] if words else []
    tokens += [f"token{id}".encode() for id in range(len(tokens), config.vocab_size)]
    if not words:
        tokens.reverse()
    for id, token in enumerate(tokens):
        data += struct.pack("<I", len(token)) + token + struct.pack("<f", id if b"token" not in token else -1e3 - id)
    for name, tensor in model.state_dict().items():
        tensor_type = tensor_type_of(quantization if tensor.ndim == 2 else "F32")
        rows = _in_pairs(name, tensor.numpy(), config)
        stored = _stored_name(name).encode()
        data += struct.pack("<3I", rows.ndim, len(stored), tensor_type)
        data += struct.pack(f"<{rows.ndim}I", *reversed(rows.shape)) + stored
        data += bytes(-len(data) % 32) + _blocks(rows, tensor_type)
    path.write_bytes(data)
    return path


def _stored_name(name: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if layer is None:
        return f"{_NAMES[name.removesuffix('.weight')]}.weight"
    return f"layers.{layer[1]}.{_NAMES[layer[2]]}.weight"


def _in_pairs(name: str, rows: Any, config: Any) -> Any:
    """Put rows that are rotated together side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return rows
    return np.ascontiguousarray(rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2)).reshape(rows.shape)


def _blocks(rows: Any, tensor_type: int) -> bytes:
    if tensor_type in range(10, 15):  # of which the gguf package quantizes none
        return quantize_blocks_reference(torch.from_numpy(rows), tensor_type).numpy().tobytes()
    blocks: bytes = gguf.quants.quantize(rows, gguf.GGMLQuantizationType(tensor_type)).tobytes()
    return blocks
