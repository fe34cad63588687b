"""Present the weights of a GGUF file as those of a Hugging Face checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.errors import CheckpointError, UnsupportedArchitectureError, shown
from paged_sdk.kernels.quantized.gguf_blocks import tensor_type_of
from paged_sdk.kernels.quantized.stored_matrix import StoredMatrix
from paged_sdk.weights.gguf.architecture import (
    EACH,
    LATENT_UP,
    MTP_LAYER,
    RATES,
    TILED,
    VECTORS,
    GgufArchitecture,
    stem_of,
)
from paged_sdk.weights.gguf.config import config_from_gguf
from paged_sdk.weights.gguf.file import open_gguf, tensors_of_parts
from paged_sdk.weights.gguf.layer_numbers import number_weights
from paged_sdk.weights.gguf.model import OF_LAYER
from paged_sdk.weights.gguf.names import ARCHITECTURES, RANK_HEAD
from paged_sdk.weights.gguf.tensor import GgufTensor, RowDifference
from paged_sdk.weights.gguf.weight import GgufWeight, JoinedWeight, LatentUpWeight, NumberWeight
from paged_sdk.weights.qkv_order import grouped_heads, qkv_order, qkvz_order, rows_of_heads
from paged_sdk.weights.weight_file import WeightFile

__all__ = ["GgufSource"]

_Weight: TypeAlias = GgufWeight | JoinedWeight | LatentUpWeight | NumberWeight

_MAX_STACK = 1 << 12  # experts per layer; models in use have up to 512
# Tensors that are settings rather than weights; config_from_gguf reads them.
_SETTINGS = ("rope_freqs.", "rope_factors_long.", "rope_factors_short.")
_NVFP4 = tensor_type_of("NVFP4")
_FACTOR, _INPUT_FACTOR = "scale", "input_scale"


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
        try:
            tensors = tensors_of_parts(self._files)
            self.config: dict[str, Any] = config_from_gguf(self.metadata, tensors, path)
            self._weights = self._all_weights(tensors)
        except BaseException:
            self.close()
            raise

    def _all_weights(self, tensors: Mapping[str, GgufTensor]) -> dict[str, _Weight]:
        """Return what the checkpoint holds, by Hugging Face name.

        :param tensors: the tensors of all parts, by GGUF name
        """
        architecture = ARCHITECTURES[self.metadata["general.architecture"]].of_file(tensors)
        tensors = self._with_nvfp4_factors(architecture, tensors)
        weights: dict[str, _Weight] = {
            name: self._weight(architecture, tensor)
            for stored in tensors.values()
            if not stored.name.startswith(_SETTINGS)
            for name, tensor in self._named_anywhere(architecture, stored)
        }
        weights |= self._joined(architecture, tensors)
        weights |= dict(number_weights(architecture, self.metadata, self.config["num_hidden_layers"], self._path))
        return weights | {name: GgufWeight(zeros) for name, zeros in self._left_out(architecture, tensors)}

    def _with_nvfp4_factors(
        self, architecture: GgufArchitecture, tensors: Mapping[str, GgufTensor]
    ) -> dict[str, GgufTensor]:
        """Return the tensors with the factors that llama.cpp's converter writes beside NVFP4 blocks: one for a matrix,
        or one for that of each expert. Those of activations are left out.
        """
        found = dict(tensors)
        for name, tensor in tensors.items():
            stem, _, kind = name.rpartition(".")
            matrix = tensors.get(f"{stem}.weight") if kind in (_FACTOR, _INPUT_FACTOR) else None
            is_models = f"{stem_of(name)}.{kind}" in architecture.block_names  # such as Gemma 4's factors of experts
            if matrix is None or matrix.type != _NVFP4 or is_models:
                continue
            del found[name]
            if kind == _FACTOR:
                if tensor.shape not in ((1,), matrix.shape[:-2]) or tensor.is_quantized:
                    raise self._misfit(tensor, f"is no factor of {shown(matrix.name)}")
                found[matrix.name] = evolve(matrix, factors=tuple(tensor.decoded().tolist()))
        return found

    @property
    def is_quantized(self) -> bool:
        """Return whether any matrix is stored in quantized blocks."""
        return any(weight.is_quantized for weight in self._weights.values())

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._weights.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor: see :meth:`paged_sdk.weights.source.WeightSource.shape`."""
        return self._find(name).shape

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor, which may be one part of a split model."""
        return self._weights[name].path if name in self._weights else self._path

    def tensor(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return one tensor: see :meth:`paged_sdk.weights.source.WeightSource.tensor`."""
        return self._find(name).values(dtype).to(device)

    def matrix(self, name: str) -> StoredMatrix:
        """Return one matrix: see :meth:`paged_sdk.weights.source.WeightSource.matrix`."""
        return self._find(name).matrix()

    def close(self) -> None:
        """Close the files; tensors that were read stay valid."""
        for file in self._files:
            file.close()

    def _find(self, name: str) -> _Weight:
        weight = self._weights.get(name)
        if weight is None:
            raise CheckpointError(f"{self._path} holds no tensor for {shown(name)}", path=self._path)
        return weight

    def _named_anywhere(self, architecture: GgufArchitecture, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
        """Yield the same as :meth:`_named`, also for layers for multi-token prediction (MTP), which follow the model's
        own: the first one is read if the architecture names its tensors, and what is not known of it is left out.
        """
        match, count = OF_LAYER.match(tensor.name), self.config["num_hidden_layers"]
        if match is None or int(match[1]) < count:
            yield from self._named(architecture, tensor)
            return
        stem, _, kind = tensor.name.removeprefix(match[0]).rpartition(".")
        if int(match[1]) > count or not architecture.mtp_names:
            return
        if (own := architecture.mtp_names.get(stem)) is not None:
            yield f"{own}.{kind}", tensor
        elif architecture.parts(stem) or architecture.hugging_face_name(tensor.name) is not None:
            prefix = f"{architecture.body}{architecture.layers}.{count}."
            for name, part in self._named(architecture, tensor):
                yield name.replace(prefix, MTP_LAYER, 1), part

    def _named(self, architecture: GgufArchitecture, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
        """Yield the Hugging Face names that a stored tensor covers, each with its part: the whole, a matrix or vector
        of a stack, or a range of rows.
        """
        layer, _, own = tensor.name.rpartition(".")[0].rpartition(".")
        if any(own in stems for stems in architecture.joined.values()):
            return
        if parts := architecture.parts(own):
            yield from self._divided(architecture, layer.removeprefix("blk."), parts, tensor)
            return
        name = self._name(architecture, tensor.name)
        if tensor.name == RANK_HEAD and not architecture.is_encoder:
            if len(tensor.shape) != 2:
                raise self._misfit(tensor, "is no matrix")
            # Two rows are those of two answer tokens in the output projection. The score is the log odds of the first,
            # the difference of their logits; llama.cpp computes the softmax.
            yield name, RowDifference.of(tensor) if tensor.shape[0] == 2 else tensor
            return
        if EACH not in name:
            # The shared expert's gate is a matrix with one row, which converters write as a vector.
            if tensor.name.endswith(".ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1:
                tensor = evolve(tensor, shape=(1, *tensor.shape))
            # A convolution of each channel by itself has one input channel, which converters leave out.
            if own in ("conv", "ssm_conv1d") and len(tensor.shape) == 2:
                tensor = evolve(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
            if stem_of(tensor.name) in VECTORS:
                tensor = evolve(tensor, shape=(math.prod(tensor.shape),))
            yield name, tensor
            return
        is_norm = tensor.name.endswith("_norm.weight")  # one row per head
        of_vectors = is_norm or tensor.name.endswith(".bias")
        if len(tensor.shape) != (2 if of_vectors else 3) or tensor.shape[0] > _MAX_STACK:
            of_what = "norms" if is_norm else "vectors" if of_vectors else "matrices"
            raise self._misfit(tensor, f"is no stack of {of_what}")
        for index, matrix in enumerate(tensor.unstacked()):
            yield name.replace(EACH, str(index)), matrix

    def _divided(
        self, architecture: GgufArchitecture, layer: str, names: Sequence[str], tensor: GgufTensor
    ) -> Iterator[tuple[str, GgufTensor]]:
        """Yield equal parts of a matrix's rows, or of those of each matrix of a stack, by Hugging Face name."""
        kind = tensor.name.rpartition(".")[2]
        shape = tensor.shape if EACH in names[0] else (1, *tensor.shape)
        is_vector = kind == "bias"
        if (
            len(shape) != (2 if is_vector else 3)
            or shape[0] > _MAX_STACK
            or shape[1] % len(names)
            or (is_vector and tensor.is_quantized)
        ):
            raise self._misfit(tensor, f"cannot be {len(names)} parts")
        count, rows, *row = shape
        factors = tensor.factors
        if len(factors) > 1:
            factors = tuple(factor for factor in factors for _ in names)
        parts = evolve(tensor, shape=(count * len(names), rows // len(names), *row), factors=factors).unstacked()
        for place, part in enumerate(parts):
            index, own = divmod(place, len(names))
            name = names[own].replace(EACH, str(index))
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

    def _joined(
        self, architecture: GgufArchitecture, tensors: Mapping[str, GgufTensor]
    ) -> dict[str, JoinedWeight | LatentUpWeight]:
        """Return the matrices that have the rows of several tensors, by Hugging Face name."""
        found: dict[str, JoinedWeight | LatentUpWeight] = {}
        count = self.config["num_hidden_layers"]
        for layer in range(count + bool(architecture.mtp_names)) if architecture.joined else ():
            prefix = f"{architecture.body}{architecture.layers}.{layer}." if layer < count else MTP_LAYER
            for name, stems in architecture.joined.items():
                parts = [tensors.get(f"blk.{layer}.{stem}.weight") for stem in stems]
                there = [part for part in parts if part is not None]
                if there:
                    join = self._latent_up if stems == LATENT_UP else self._joined_parts
                    found[f"{prefix}{name}.weight"] = join(there)
        return found

    def _latent_up(self, parts: Sequence[GgufTensor]) -> LatentUpWeight:
        heads, rank = self.config["num_attention_heads"], self.config["kv_lora_rank"]
        sizes = self.config["qk_nope_head_dim"], self.config["v_head_dim"]
        if [part.shape for part in parts] != [(heads, rank, sizes[0]), (heads, sizes[1], rank)]:
            what = f"with {heads} heads, keys of {sizes[0]} and values of {sizes[1]}"
            raise self._misfit(parts[0], f"cannot be that of keys beside that of values, {what}")
        return LatentUpWeight(*map(GgufWeight, parts))

    def _joined_parts(self, parts: Sequence[GgufTensor]) -> JoinedWeight:
        if "linear_num_key_heads" not in self.config:
            return self._stacked(parts)
        sizes = self._delta_sizes()
        key_heads, value_heads, key_dim, value_dim = sizes
        values = value_heads * value_dim
        wanted = [(2 * key_heads * key_dim + values, self.config["hidden_size"]), (values, self.config["hidden_size"])]
        if [part.shape for part in parts] != wanted:
            raise self._misfit(parts[0], f"cannot be those of {key_heads} key heads beside gates of {values} rows")
        return JoinedWeight(tuple(map(GgufWeight, parts)), qkvz_order(*sizes).argsort())

    def _stacked(self, parts: Sequence[GgufTensor]) -> JoinedWeight:
        """Return a gate and an up projection as one matrix."""
        wanted = (self.config.get("shared_intermediate_size", 0), self.config["hidden_size"])
        if [part.shape for part in parts] != [wanted, wanted]:
            raise self._misfit(parts[0], f"cannot be a gate of {wanted[0]} neurons beside an up projection")
        return JoinedWeight(tuple(map(GgufWeight, parts)), torch.arange(2 * wanted[0]))

    def _delta_sizes(self) -> tuple[int, int, int, int]:
        """Return the numbers of key and value heads, and the sizes of a key and of a value, of gated delta networks."""
        heads = self.config["linear_num_key_heads"], self.config["linear_num_value_heads"]
        return *heads, self.config["linear_key_head_dim"], self.config["linear_value_head_dim"]

    def _weight(self, architecture: GgufArchitecture, tensor: GgufTensor) -> GgufWeight:
        stem = stem_of(tensor.name)
        if architecture.permuted_qk and stem == "attn_q":
            return self._permuted(tensor, self.config["num_attention_heads"])
        if architecture.permuted_qk and stem == "attn_k":
            return self._permuted(tensor, self.config["num_key_value_heads"])
        if architecture.grouped_qkv and stem == "attn_qkv":
            return self._grouped(tensor)
        if architecture.tiled_heads and stem in TILED:
            return self._tiled(tensor, stem)
        if stem == RATES:
            return GgufWeight(tensor, is_rate=True)
        if tensor.name.endswith("norm.weight") and stem not in architecture.plain_norms:
            return GgufWeight(tensor, offset=architecture.norm_offset)
        return GgufWeight(tensor)

    def _permuted(self, tensor: GgufTensor, num_heads: int) -> GgufWeight:
        if tensor.shape[0] % (2 * num_heads) or (len(tensor.shape) == 1 and tensor.is_quantized):
            raise self._misfit(tensor, f"cannot be {num_heads} heads")
        return GgufWeight(tensor, permuted_heads=num_heads)

    def _grouped(self, tensor: GgufTensor) -> GgufWeight:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        head_dim = self.config["hidden_size"] // heads
        if tensor.shape[0] != (heads + 2 * kv_heads) * head_dim or (len(tensor.shape) == 1 and tensor.is_quantized):
            raise self._misfit(
                tensor,
                f"cannot be {heads} heads of queries and {kv_heads} of keys and of values, of {head_dim} each",
            )
        return GgufWeight(tensor, order=qkv_order(heads, kv_heads, head_dim).argsort())

    def _tiled(self, tensor: GgufTensor, stem: str) -> GgufWeight:
        """Return a tensor of gated delta networks with its value heads side by side by key head."""
        key_heads, heads, key_dim, value_dim = self._delta_sizes()
        before = 2 * key_heads * key_dim if stem in ("attn_qkv", "ssm_conv1d") else 0
        width = 1 if stem in ("ssm_alpha", "ssm_beta", "ssm_dt", RATES) else value_dim
        turned = stem == "ssm_out"
        if tensor.shape[-1 if turned else 0] != before + heads * width or (
            len(tensor.shape) == 1 and tensor.is_quantized
        ):
            raise self._misfit(tensor, f"cannot be {heads} value heads of {width}, after {before} others")
        if 1 in (key_heads, heads // key_heads):  # as in the smaller models of Qwen 3.5: there is one order
            return GgufWeight(tensor, is_rate=stem == RATES)
        order = grouped_heads(key_heads, heads)
        if turned:
            return GgufWeight(tensor, columns=(order, width))
        return GgufWeight(tensor, order=rows_of_heads(order, width, before), is_rate=stem == RATES)

    def _misfit(self, tensor: GgufTensor, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: tensor {shown(tensor.name)} of shape {list(tensor.shape)} {why}", path=self._path
        )
