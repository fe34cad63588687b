"""Read llama.cpp's older ggjt files, and present them as the equivalent GGUF metadata and tensors.

A file has seven numbers, the vocabulary with scores, and the tensors, each preceded by its name, shape and type. Query
and key rows are permuted as in GGUF.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen

from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError, UnsupportedQuantizationError, shown
from paged_sdk.kernels.quantized.gguf_blocks import block_format, tensor_type_of
from paged_sdk.logs import get_logger
from paged_sdk.weights.gguf.tensor import GgufTensor
from paged_sdk.weights.weight_file import WeightFile

__all__ = ["GGJT", "read_ggml"]

_log = get_logger(__name__)

GGJT: Final = b"tjgg"
"""The first bytes of a file: "ggjt" as a little-endian number."""

_ALIGNMENT: Final = 32
_MAX_VOCABULARY: Final = 1 << 20
_MAX_TENSORS: Final = 1 << 16
_MAX_NAME: Final = 1 << 10
_CHUNK: Final = 1 << 16

# Readable types by version: versions changed the block layouts of some types, but not the types' ids.
_TYPES: Final[Mapping[int, tuple[str, ...]]] = MappingProxyType(
    {
        1: ("F32", "F16"),
        2: ("F32", "F16", "Q5_0", "Q5_1"),
        3: ("F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    }
)
_TOP: Final = {"tok_embeddings": "token_embd", "norm": "output_norm", "output": "output"}
_BLOCK: Final = {
    "attention_norm": "attn_norm",
    "attention.wq": "attn_q",
    "attention.wk": "attn_k",
    "attention.wv": "attn_v",
    "attention.wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
}
_LAYER_NAME: Final = re.compile(r"layers\.(\d+)\.(.+)\.weight")

# Llama's SentencePiece vocabulary: three special tokens, 256 bytes, pieces. Tokens after these 32,000 were added later.
_MARKS: Final = ("<unk>", "<s>", "</s>")
_NUM_PIECES: Final = 32000
# The files record neither epsilon nor context. llama.cpp used an epsilon between Llama's and Llama 2's, and Llama's
# context. A model with grouped-query attention is Llama 2 70B.
_EPS, _CONTEXT = 5e-6, 2048
_GROUPED_EPS, _GROUPED_CONTEXT = 1e-5, 4096


@frozen
class _Shape:
    """Holds the seven numbers of the header, in the file's order."""

    num_tokens: int
    hidden_size: int
    multiple: int
    num_heads: int
    num_layers: int
    rotary_dim: int
    type: int


def read_ggml(file: WeightFile) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Read the header, the vocabulary and the table of tensors, but not the tensors' data.

    :returns: metadata by GGUF key, and the tensors by GGUF name
    :raises CheckpointError: the file is truncated or malformed, or its version is unknown
    :raises UnsupportedArchitectureError: the model is not a llama model
    :raises UnsupportedQuantizationError: a tensor's type is unknown, or had another block layout in this version
    """
    cursor = _Cursor(file)
    cursor.take(len(GGJT))
    version = cursor.u32()
    if version not in _TYPES:
        raise CheckpointError(
            f"{file.path} is a ggjt file of version {version}: supported are 1, 2 and 3", path=file.path
        )
    shape = _Shape(*(cursor.u32() for _ in range(7)))
    if not 0 < shape.num_tokens <= _MAX_VOCABULARY or not shape.num_heads:
        raise cursor.malformed(f"it has {shape.num_tokens} tokens and {shape.num_heads} heads")
    tokens, scores = [], []
    for _ in range(shape.num_tokens):
        tokens.append(cursor.take(cursor.u32(most=_MAX_NAME)))
        scores.append(cursor.f32())
    tensors: dict[str, GgufTensor] = {}
    while cursor.offset < file.size:
        tensor = _tensor(cursor, version)
        if tensor.name in tensors or len(tensors) == _MAX_TENSORS:
            raise cursor.malformed(f"it has tensor {shown(tensor.name)} twice, or more than {_MAX_TENSORS}")
        tensors[tensor.name] = tensor
    return _metadata(cursor, shape, tensors) | _vocabulary(tokens, scores), tensors


class _Cursor:
    """Reads a file sequentially; every method raises if the file ends too early."""

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self.offset = 0
        self._buffer, self._start = b"", 0

    def take(self, count: int) -> bytes:
        self._require(count)
        first = self.offset - self._start
        if not 0 <= first <= first + count <= len(self._buffer):
            size = min(max(count, _CHUNK), self.file.size - self.offset)
            self._buffer, self._start, first = self.file.read(self.offset, size), self.offset, 0
        self.offset += count
        return self._buffer[first : first + count]

    def u32(self, *, most: int | None = None) -> int:
        value: int = struct.unpack("<I", self.take(4))[0]
        if most is not None and value > most:
            raise self.malformed(f"it has a text of {value} bytes")
        return value

    def f32(self) -> float:
        value: float = struct.unpack("<f", self.take(4))[0]
        return value

    def skip(self, count: int) -> int:
        """Skip a tensor's data, which is aligned to 32 bytes; return its offset."""
        self.offset = -(-self.offset // _ALIGNMENT) * _ALIGNMENT
        self._require(count)
        start = self.offset
        self.offset += count
        return start

    def malformed(self, what: str) -> CheckpointError:
        path = self.file.path
        return CheckpointError(f"{path} cannot be read: {what} (byte {self.offset}); download it again", path=path)

    def _require(self, count: int) -> None:
        if self.offset + count > self.file.size:
            raise self.malformed(f"it is cut off: {self.offset + count} bytes are needed, it has {self.file.size}")


def _tensor(cursor: _Cursor, version: int) -> GgufTensor:
    num_dims, name_size, tensor_type = cursor.u32(), cursor.u32(most=_MAX_NAME), cursor.u32()
    if num_dims not in (1, 2):
        raise cursor.malformed(f"it has a tensor of {num_dims} dimensions")
    shape = tuple(cursor.u32() for _ in range(num_dims))[::-1]
    stored = cursor.take(name_size).decode(errors="replace")
    path = cursor.file.path
    name = _gguf_name(stored)
    if name is None:
        raise UnsupportedArchitectureError(
            f"{path} has a tensor {shown(stored)}: only llama models can be read from ggjt files",
            path=path,
            architecture="ggjt",
            supported=("llama",),
        )
    known = _TYPES[version]
    if tensor_type not in map(tensor_type_of, known):
        raise UnsupportedQuantizationError(
            f"{path}: tensor {shown(stored)} has type {tensor_type}, which cannot be read from ggjt version {version}: "
            f"supported are {', '.join(known)}; use a GGUF version",
            path=path,
            quantization=str(tensor_type),
            supported=known,
        )
    form = block_format(tensor_type)
    if not all(shape) or shape[-1] % form.elements:
        raise cursor.malformed(f"tensor {shown(stored)} of type {form.name} has shape {list(shape)}")
    num_bytes = math.prod(shape) // form.elements * form.num_bytes
    return GgufTensor(name, shape, tensor_type, cursor.file, cursor.skip(num_bytes), num_bytes)


def _gguf_name(name: str) -> str | None:
    if match := _LAYER_NAME.fullmatch(name):
        stem = _BLOCK.get(match[2])
        return stem and f"blk.{int(match[1])}.{stem}.weight"
    stem = _TOP.get(name.removesuffix(".weight"))
    return stem and f"{stem}.weight"


def _metadata(cursor: _Cursor, shape: _Shape, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """Return the model's configuration by GGUF key; some values follow from the tensors' shapes."""
    head_dim = shape.hidden_size // shape.num_heads
    sizes = {}
    for name in ("attn_k", "ffn_gate"):
        tensor = tensors.get(f"blk.0.{name}.weight")
        if tensor is None or len(tensor.shape) != 2:
            raise cursor.malformed(f"it has no matrix blk.0.{name}, in GGUF's words")
        sizes[name] = tensor.shape[0]
    if not head_dim or sizes["attn_k"] % head_dim:
        raise cursor.malformed(f"{sizes['attn_k']} rows of keys are no heads of {head_dim}")
    num_kv_heads = sizes["attn_k"] // head_dim
    is_grouped = num_kv_heads < shape.num_heads
    eps, context = (_GROUPED_EPS, _GROUPED_CONTEXT) if is_grouped else (_EPS, _CONTEXT)
    _log.info("%s says no context nor norm's epsilon: %d and %g are taken.", cursor.file.path.name, context, eps)
    values: dict[str, Any] = {
        "vocab_size": shape.num_tokens,
        "context_length": context,
        "embedding_length": shape.hidden_size,
        "block_count": shape.num_layers,
        "feed_forward_length": sizes["ffn_gate"],
        "attention.head_count": shape.num_heads,
        "attention.head_count_kv": num_kv_heads,
        "attention.layer_norm_rms_epsilon": eps,
        "rope.dimension_count": shape.rotary_dim,
    }
    return {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in values.items()}


def _vocabulary(tokens: Sequence[bytes], scores: Sequence[float]) -> dict[str, Any]:
    """Return the tokenizer's metadata; an empty dict if the vocabulary is not Llama's SentencePiece vocabulary."""
    first = len(_MARKS)
    last = first + 256
    if [*tokens[first:last]] != [bytes([byte]) for byte in range(256)]:
        return {}
    try:
        pieces = [token.decode().replace(" ", "▁") for token in tokens[last:]]
    except UnicodeDecodeError:
        return {}
    added = max(0, len(tokens) - _NUM_PIECES)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*_MARKS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces],
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - added), *[4] * added],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
