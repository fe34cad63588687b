"""Read a LoRA adapter from a GGUF file, as llama.cpp's converter writes it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from paged_sdk.adapters.adapter import Adapter, ModuleUpdate
from paged_sdk.errors import AdapterError, ModelLoadError, shown
from paged_sdk.kernels.quantized.gguf_blocks import dequantize
from paged_sdk.weights.gguf.architecture import EACH, GgufArchitecture
from paged_sdk.weights.gguf.file import open_gguf
from paged_sdk.weights.gguf.names import ARCHITECTURES
from paged_sdk.weights.gguf.tensor import GgufTensor

__all__ = ["read_gguf"]

_NAME: Final = re.compile(r"(?P<matrix>.+\.weight)\.lora_(?P<side>[ab])")
_ALPHA: Final = "adapter.lora.alpha"
_INVOCATION: Final = "adapter.alora.invocation_tokens"


def read_gguf(path: Path) -> Adapter:
    """Read an adapter.

    :raises AdapterError: the file is malformed, no adapter, or an unsupported kind of adapter
    """
    try:
        file, *others = open_gguf(path)
        try:
            if others:
                raise AdapterError(f"{path} is one part of several, which adapters do not have", path=path)
            return _read(path, file.metadata, file.tensors)
        finally:
            for each in (file, *others):
                each.close()
    except AdapterError:
        raise
    except ModelLoadError as error:
        raise AdapterError(str(error), path=error.path) from error


def _read(path: Path, metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> Adapter:
    for key, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.get(key) != expected:
            raise AdapterError.of(path, key, metadata.get(key), repr(expected))
    name = metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise AdapterError.of(path, "general.architecture", name, f"one of {', '.join(ARCHITECTURES)}")
    alpha = metadata.get(_ALPHA, 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError.of(path, _ALPHA, alpha, "a number")
    tokens = metadata.get(_INVOCATION, [])
    if not isinstance(tokens, list) or not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise AdapterError.of(path, _INVOCATION, tokens, "token ids")
    sides: dict[str, dict[str, GgufTensor]] = {}
    for tensor in tensors.values():
        match = _NAME.fullmatch(tensor.name)
        if match is None or len(tensor.shape) != 2:
            what = f"tensor {shown(tensor.name)} of shape {list(tensor.shape)} is no update of a matrix"
            raise AdapterError(f"{path}: {what}", path=path, tensor=tensor.name)
        sides.setdefault(match["matrix"], {})[match["side"]] = tensor
    if not sides:
        raise AdapterError(f"{path} holds no tensors", path=path)
    modules = dict(_update(path, architecture, matrix, own, alpha) for matrix, own in sorted(sides.items()))
    base = metadata.get("general.base_model.0.name")
    return Adapter(
        path=str(path), base=base if isinstance(base, str) else "", modules=modules, invocation=tuple(tokens)
    )


def _update(
    path: Path, architecture: GgufArchitecture, matrix: str, sides: dict[str, GgufTensor], alpha: float
) -> tuple[str, ModuleUpdate]:
    for side in "ab":
        if side not in sides:
            missing = f"{matrix}.lora_{side}"
            raise AdapterError(f"{path} lacks tensor {shown(missing)}", path=path, tensor=missing)
    name = architecture.hugging_face_name(matrix)
    tensor = sides["a"].name
    if name is None or EACH in name:
        what = f"tensor {shown(tensor)} is of a matrix that {architecture.model_type} has not, or of experts"
        raise AdapterError(f"{path}: {what}", path=path, tensor=tensor)
    if architecture.moves_values(matrix):
        # The file lacks the numbers of heads, which undoing GGUF's order would need.
        what = f"tensor {shown(tensor)} is of a matrix whose values {architecture.model_type} has in another order"
        raise AdapterError(f"{path}: {what}, which is not supported", path=path, tensor=tensor)
    down, up = _values(sides["a"]), _values(sides["b"])
    rank = down.shape[0]
    if rank < 1 or up.shape[1] != rank:
        raise AdapterError(
            f"{path}: tensors {shown(tensor)} and {shown(sides['b'].name)} have ranks {rank} and {up.shape[1]}",
            path=path,
            tensor=tensor,
            value=rank,
        )
    in_pairs = architecture.permuted_qk and (".attn_q." in matrix or ".attn_k." in matrix)
    # Without alpha, the scale is 1.
    update = ModuleUpdate(tensor, down, up, alpha / rank if alpha else 1.0, in_pairs)
    return name.removesuffix(".weight"), update


def _values(tensor: GgufTensor) -> Tensor:
    return dequantize(tensor.type, tensor.unread_rows().tensor())
