"""Present the weights of a GGUF file as those of a Hugging Face checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError, shown
from paged_sdk.kernels.quantized.gguf_blocks import dequantize, tensor_type_of
from paged_sdk.kernels.quantized.stored_matrix import DenseMatrix, StoredMatrix, UnreadRows
from paged_sdk.weights.gguf.config import config_from_gguf
from paged_sdk.weights.gguf.file import open_gguf, tensors_of_parts
from paged_sdk.weights.gguf.names import ARCHITECTURES, EACH, RANK_HEAD, GgufArchitecture
from paged_sdk.weights.gguf.tensor import GgufTensor, RowDifference, stored_matrix
from paged_sdk.weights.qkv_order import qkv_order, runs
from paged_sdk.weights.weight_file import WeightFile

__all__ = ["GgufSource"]

_MAX_STACK = 1 << 12  # experts per layer; models in use have up to 512
# Tensors that are settings rather than weights; config_from_gguf reads them.
_SETTINGS = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")


@frozen(eq=False)
class _Weight:
    """Describes a tensor and how its values differ from the Hugging Face checkpoint's.

    :ivar permuted_heads: the number of heads, if the rows are permuted within each head; 0: no permutation
    :ivar order: the stored row of each row of Hugging Face's order; None: the order is the same
    :ivar offset: the constant that GGUF adds to the values
    """

    tensor: GgufTensor
    permuted_heads: int = 0
    order: Tensor | None = None
    offset: float = 0.0

    def blocks(self) -> Tensor:
        """Return the stored bytes, uint8 [..., bytes of a row], with the rows in Hugging Face's order."""
        if len(self.tensor.shape) > 1:
            return self.unread_rows().tensor().view(*self.tensor.shape[:-1], -1)
        blocks = self.tensor.blocks()
        if self.order is not None:
            return blocks.view(self.tensor.shape[0], -1)[self.order].view(-1)
        if not self.permuted_heads:
            return blocks
        return _unpermuted(blocks.view(self.tensor.shape[0], -1), self.tensor.shape[0] // self.permuted_heads).view(-1)

    def unread_rows(self) -> UnreadRows:
        """Return the stored matrix, uint8 [rows, bytes of a row], with the rows in Hugging Face's order."""
        rows = self.tensor.unread_rows()
        if self.order is not None:
            return evolve(rows, read=partial(_read_in_order, rows, self.order))
        if not self.permuted_heads:
            return rows
        return evolve(rows, read=partial(_read_unpermuted, rows, rows.shape[0] // self.permuted_heads))


@frozen
class _Zeros(GgufTensor):
    """Describes a tensor of zeros that the file leaves out."""

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], file: WeightFile) -> _Zeros:
        """Make a tensor of zeros.

        :param file: the file that errors name
        """
        return cls(name, shape, tensor_type_of("F32"), file, 0, math.prod(shape) * torch.float32.itemsize)

    def read(self, first: int, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.uint8)


class GgufSource:
    """Implements a :class:`~paged_sdk.weights.source.WeightSource` over a GGUF file and its parts.

    :ivar metadata: the file's metadata, by GGUF key
    :ivar config: the model's configuration, as in Hugging Face's ``config.json``
    :param path: the file, or any part of a split model
    :raises CheckpointError: a file is missing, truncated, malformed, or lacks required metadata or a required tensor
    :raises UnsupportedArchitectureError: the model's architecture is not supported
    :raises UnsupportedQuantizationError: a tensor has a type that cannot be decoded
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = open_gguf(path)
        self.metadata: dict[str, Any] = self._files[0].metadata
        tensors = tensors_of_parts(self._files)
        self.config: dict[str, Any] = config_from_gguf(self.metadata, tensors, path)
        architecture = ARCHITECTURES[self.metadata["general.architecture"]].of_file(tensors)
        self._weights = {
            name: self._weight(architecture, tensor)
            for stored in tensors.values()
            if not stored.name.startswith(_SETTINGS)
            for name, tensor in self._named(architecture, stored)
        }
        for name, tensor in self._left_out(architecture, tensors):
            self._weights[name] = _Weight(tensor)

    @property
    def is_quantized(self) -> bool:
        """Return whether any matrix is stored in quantized blocks."""
        return any(weight.tensor.is_quantized for weight in self._weights.values())

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._weights.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor: see :meth:`paged_sdk.weights.source.WeightSource.shape`."""
        return self._find(name).tensor.shape

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor, which may be one part of a split model."""
        return self._weights[name].tensor.file.path if name in self._weights else self._path

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return one tensor: see :meth:`paged_sdk.weights.source.WeightSource.tensor`."""
        weight = self._find(name)
        if weight.offset:
            values = dequantize(weight.tensor.type, weight.blocks()) - weight.offset
            return values.to(device=device, dtype=dtype)
        return dequantize(weight.tensor.type, weight.blocks(), dtype=dtype).to(device)

    def matrix(self, name: str) -> StoredMatrix:
        """Return one matrix: see :meth:`paged_sdk.weights.source.WeightSource.matrix`."""
        weight = self._find(name)
        rows = weight.unread_rows()
        if weight.offset:
            return DenseMatrix(dequantize(weight.tensor.type, rows.tensor()) - weight.offset)
        return stored_matrix(weight.tensor.type, rows)

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        for file in self._files:
            file.close()

    def _find(self, name: str) -> _Weight:
        weight = self._weights.get(name)
        if weight is None:
            raise CheckpointError(f"{self._path} holds no tensor for {shown(name)}", path=self._path)
        return weight

    def _named(self, architecture: GgufArchitecture, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
        """Yield the Hugging Face names that a stored tensor covers, each with its part: the whole, a matrix or vector
        of a stack, or a range of rows.
        """
        layer, _, own = tensor.name.rpartition(".")[0].rpartition(".")
        if own in architecture.divided:
            yield from self._divided(architecture, layer.removeprefix("blk."), architecture.divided[own], tensor)
            return
        name = self._name(architecture, tensor.name)
        if tensor.name == RANK_HEAD and not architecture.is_encoder:
            if len(tensor.shape) != 2:
                raise CheckpointError(
                    f"{self._path}: tensor {shown(RANK_HEAD)} of shape {list(tensor.shape)} is no matrix",
                    path=self._path,
                )
            # Two rows are those of two answer tokens in the output projection. The score is the log odds of the first,
            # the difference of their logits; llama.cpp computes the softmax.
            yield name, RowDifference.of(tensor) if tensor.shape[0] == 2 else tensor
            return
        if EACH not in name:
            # The shared expert's gate is a matrix with one row, which converters write as a vector.
            if tensor.name.endswith(".ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1:
                tensor = evolve(tensor, shape=(1, *tensor.shape))
            # A convolution of each channel by itself has one input channel, which converters leave out.
            if own == "conv" and len(tensor.shape) == 2:
                tensor = evolve(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
            yield name, tensor
            return
        is_norm = tensor.name.endswith("_norm.weight")  # one row per head
        of_vectors = is_norm or tensor.name.endswith(".bias")
        if len(tensor.shape) != (2 if of_vectors else 3) or tensor.shape[0] > _MAX_STACK:
            raise CheckpointError(
                f"{self._path}: tensor {shown(tensor.name)} of shape {list(tensor.shape)} is no stack of "
                f"{'norms' if is_norm else 'vectors' if of_vectors else 'matrices'}",
                path=self._path,
            )
        for index, matrix in enumerate(tensor.unstacked()):
            yield name.replace(EACH, str(index)), matrix

    def _divided(
        self, architecture: GgufArchitecture, layer: str, names: Sequence[str], tensor: GgufTensor
    ) -> Iterator[tuple[str, GgufTensor]]:
        """Yield equal parts of a tensor's rows, by Hugging Face name."""
        kind = tensor.name.rpartition(".")[2]
        rows, *row = tensor.shape
        if rows % len(names) or (not row and tensor.is_quantized):
            raise CheckpointError(
                f"{self._path}: tensor {shown(tensor.name)} of shape {list(tensor.shape)} cannot be {len(names)} parts",
                path=self._path,
            )
        parts = evolve(tensor, shape=(len(names), rows // len(names), *row)).unstacked()
        for name, part in zip(names, parts, strict=True):
            yield f"{architecture.body}{architecture.layers}.{layer}.{name}.{kind}", part

    def _left_out(
        self, architecture: GgufArchitecture, tensors: Mapping[str, GgufTensor]
    ) -> Iterator[tuple[str, GgufTensor]]:
        """Yield tensors of zeros, by Hugging Face name, for what the file leaves out: matrices that it may leave out,
        and the missing biases of groups in which other biases exist.
        """
        for stem in architecture.left_out:
            if (name := f"{stem}.weight") not in tensors:
                zeros = _Zeros.of(name, (1, self.config["hidden_size"]), tensors["token_embd.weight"].file)
                yield self._name(architecture, name), zeros
        stems = {stem for field, group in architecture.bias_groups.items() if self.config[field] for stem in group}
        for weight in tensors.values():
            matrix, _, kind = weight.name.rpartition(".")
            name, shape = f"{matrix}.bias", weight.shape[:1]
            if kind == "weight" and matrix.rpartition(".")[2] in stems and name not in tensors:
                bias = _Zeros.of(name, shape, weight.file)
                yield from self._named(architecture, bias)

    def _name(self, architecture: GgufArchitecture, name: str) -> str:
        found = architecture.hugging_face_name(name)
        if found is None:
            raise UnsupportedArchitectureError(
                f"{self._path} has tensor {shown(name)}, which {architecture.model_type} models do not have",
                path=self._path,
                architecture=self.metadata["general.architecture"],
                supported=ARCHITECTURES,
            )
        return found

    def _weight(self, architecture: GgufArchitecture, tensor: GgufTensor) -> _Weight:
        if architecture.permuted_qk and ".attn_q." in tensor.name:
            return self._permuted(tensor, self.config["num_attention_heads"])
        if architecture.permuted_qk and ".attn_k." in tensor.name:
            return self._permuted(tensor, self.config["num_key_value_heads"])
        if architecture.grouped_qkv and ".attn_qkv." in tensor.name:
            return self._grouped(tensor)
        if tensor.name.endswith("norm.weight"):
            return _Weight(tensor, offset=architecture.norm_offset)
        return _Weight(tensor)

    def _permuted(self, tensor: GgufTensor, num_heads: int) -> _Weight:
        if tensor.shape[0] % (2 * num_heads) or (len(tensor.shape) == 1 and tensor.is_quantized):
            raise CheckpointError(
                f"{self._path}: tensor {shown(tensor.name)} of shape {list(tensor.shape)} cannot be {num_heads} heads",
                path=self._path,
            )
        return _Weight(tensor, permuted_heads=num_heads)

    def _grouped(self, tensor: GgufTensor) -> _Weight:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        head_dim = self.config["hidden_size"] // heads
        if tensor.shape[0] != (heads + 2 * kv_heads) * head_dim or (len(tensor.shape) == 1 and tensor.is_quantized):
            raise CheckpointError(
                f"{self._path}: tensor {shown(tensor.name)} of shape {list(tensor.shape)} cannot be {heads} heads of "
                f"queries and {kv_heads} of keys and of values, of {head_dim} each",
                path=self._path,
            )
        return _Weight(tensor, order=qkv_order(heads, kv_heads, head_dim).argsort())


def _read_in_order(rows: UnreadRows, order: Tensor, first: int, last: int) -> Tensor:
    """Read some rows in Hugging Face's order, with one read per run of rows that are consecutive in the file."""
    return torch.cat([rows[start:end].tensor() for start, end in runs(order[first:last])])


def _read_unpermuted(rows: UnreadRows, head_size: int, first: int, last: int) -> Tensor:
    """Read some rows in Hugging Face's order; whole heads are read to undo the permutation."""
    before = first // head_size * head_size
    stored = rows[before : -(-last // head_size) * head_size].tensor()
    return _unpermuted(stored, head_size)[first - before : last - before]


def _unpermuted(rows: Tensor, head_size: int) -> Tensor:
    """Return rows, uint8 [n, row], in Hugging Face's order: within each head the even rows, then the odd rows."""
    # With numpy, on one thread: torch would split these 0.1 ms among all threads, and wait for busy cores.
    heads = rows.numpy().reshape(-1, head_size // 2, 2, rows.shape[1])
    return torch.from_numpy(np.ascontiguousarray(heads.swapaxes(1, 2))).view(rows.shape)
