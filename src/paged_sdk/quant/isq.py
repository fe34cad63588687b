"""Quantize matrices in situ: say what each type stands for, and quantize a matrix on the device that holds it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from attrs import frozen
from torch import Tensor

from paged_sdk.config.isq import IsqType
from paged_sdk.kernels.gguf_blocks import BLOCK_FORMATS, BlockMatrix, tensor_type_of
from paged_sdk.kernels.native.library import NativeLibrary
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.quantize import quantize_blocks_reference
from paged_sdk.kernels.repack import REPACKABLE_TYPES

__all__ = ["can_be_quantized", "for_head", "is_for_gpus", "quantize"]


@frozen(kw_only=True)
class _Recipe:
    """Says how to quantize to a type.

    :ivar blocks: ggml's name of the blocks that weights are stored in
    :ivar head: the type for the output projection, whose errors reach the logits undamped, and for the embeddings
    :ivar narrow: the type, one step wider, for rows whose length is no multiple of the type's block; None: there is
        none
    """

    blocks: str
    head: IsqType
    narrow: IsqType | None = None


_RECIPES: Final[Mapping[IsqType, _Recipe]] = MappingProxyType(
    {
        IsqType.Q2K: _Recipe(blocks="Q2_K", head=IsqType.Q6K, narrow=IsqType.Q4_0),
        IsqType.Q3K: _Recipe(blocks="Q3_K", head=IsqType.Q6K, narrow=IsqType.Q4_0),
        IsqType.Q4_0: _Recipe(blocks="Q4_0", head=IsqType.Q6K),
        IsqType.Q4_1: _Recipe(blocks="Q4_1", head=IsqType.Q6K),
        IsqType.Q5_0: _Recipe(blocks="Q5_0", head=IsqType.Q8_0),
        IsqType.Q5_1: _Recipe(blocks="Q5_1", head=IsqType.Q8_0),
        IsqType.Q8_0: _Recipe(blocks="Q8_0", head=IsqType.Q8_0),
        IsqType.Q8_1: _Recipe(blocks="Q8_0", head=IsqType.Q8_0),
        IsqType.Q4K: _Recipe(blocks="Q4_K", head=IsqType.Q6K, narrow=IsqType.Q5_0),
        IsqType.Q5K: _Recipe(blocks="Q5_K", head=IsqType.Q8_0, narrow=IsqType.Q5_1),
        IsqType.Q6K: _Recipe(blocks="Q6_K", head=IsqType.Q8_0, narrow=IsqType.Q8_0),
    }
)


def for_head(isq: IsqType) -> IsqType:
    """Return the type for the output projection and the embeddings where a model is quantized to another type."""
    return _RECIPES[isq].head


def is_for_gpus(isq: IsqType) -> bool:
    """Return whether the kernels for GPUs multiply the type."""
    return tensor_type_of(_RECIPES[isq].blocks) in REPACKABLE_TYPES


def can_be_quantized(isq: IsqType, cols: int) -> bool:
    """Return whether rows of so many columns fit the type, or the one that narrow rows take in its place."""
    return _fitting(isq, cols) is not None


def quantize(values: Tensor, isq: IsqType, library: NativeLibrary | None) -> BlockMatrix:
    """Quantize a matrix on its own device: by the native library on the CPU, else by torch, which gives the same bits a
    hundred times slower.

    :param values: ``[rows, columns]`` float32, bfloat16 or float16, for which :func:`can_be_quantized` is true
    :raises CheckpointError: it holds NaN, Inf or numbers above 32,768
    """
    tensor_type = _fitting(isq, values.shape[1])
    assert tensor_type is not None
    if library is not None and values.device.type == "cpu":
        return BlockMatrix(tensor_type, quantize_blocks(library, values, tensor_type))
    return BlockMatrix(tensor_type, quantize_blocks_reference(values, tensor_type))


def _fitting(isq: IsqType, cols: int) -> int | None:
    """Return ggml's number of the blocks for rows of so many columns; None: they fit no type."""
    recipe = _RECIPES[isq]
    tensor_type = tensor_type_of(recipe.blocks)
    if cols % BLOCK_FORMATS[tensor_type].elements == 0:
        return tensor_type
    return None if recipe.narrow is None else _fitting(recipe.narrow, cols)
