"""Store and multiply the projections between latent vectors and heads: dense by torch, or packed by native kernels."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from paged_sdk.config.latent_attention import LatentAttentionConfig
from paged_sdk.kernels.latent_heads import LatentHeads
from paged_sdk.kernels.native.heads import NativeHeads
from paged_sdk.kernels.native.latent_attention import PackedLatentHeads
from paged_sdk.kernels.native.packed import DENSE_TYPES, PackedWeight, gains_in_hadamard, pack_dense, pack_gguf
from paged_sdk.kernels.native.quantize import quantize_blocks
from paged_sdk.kernels.quantized.gguf_blocks import BLOCK_FORMATS, tensor_type_of
from paged_sdk.quant.form import Place

__all__ = ["LATENT_BLOCKS", "DenseLatentHeads", "NativeLatentHeads", "latent_bytes", "make_latent_heads"]

LATENT_BLOCKS: Final = "Q8_0"
"""Blocks of quantized projections, whatever the other matrices' type: keys' are applied in both directions, so that a
block's columns are rows in the other. Their part of a layer is small, and read by every token.
"""


class DenseLatentHeads(LatentHeads):
    """Multiplies by torch.

    :param key_up: the projections of keys, ``[num_heads, nope_dim, rank]``
    :param value_up: those of values, ``[num_heads, value_dim, rank]``
    """

    def __init__(self, key_up: Tensor, value_up: Tensor) -> None:
        num_heads, nope_dim, rank = key_up.shape
        super().__init__(
            num_heads=num_heads,
            rank=rank,
            nope_dim=nope_dim,
            value_dim=value_up.shape[1],
            num_bytes=key_up.nbytes + value_up.nbytes,
            format=str(key_up.dtype).removeprefix("torch."),
        )
        self._key_up = key_up.contiguous()
        self._value_up = value_up.mT.contiguous()

    def absorb(self, queries: Tensor, out: Tensor) -> None:
        """Implement :meth:`LatentHeads.absorb`."""
        out.copy_(torch.bmm(queries.transpose(0, 1), self._key_up).transpose(0, 1))

    def values(self, latents: Tensor) -> Tensor:
        """Implement :meth:`LatentHeads.values`."""
        return torch.bmm(latents.transpose(0, 1), self._value_up).transpose(0, 1).contiguous()


class NativeLatentHeads(LatentHeads):
    """Multiplies packed matrices by the native CPU kernels: torch multiplies bfloat16 on one thread, without dot
    products of pairs 200 times slower, 2.7 s for 512 queries of 16 heads of DeepSeek-V2-Lite.

    Of the keys' projections it has both the matrices and their transposes, since a packed matrix is multiplied in one
    direction.

    :param key_up: packed ``[num_heads * nope_dim, rank]``: the projections of keys
    :param absorbing: packed ``[num_heads * rank, nope_dim]``: the transposed projections of keys
    :param value_up: packed ``[num_heads * value_dim, rank]``: the projections of values
    :param hadamard_for_many: whether keys and values are decompressed by codes of the matrices' Hadamard transform
    """

    def __init__(
        self,
        place: Place,
        *,
        key_up: PackedWeight,
        absorbing: PackedWeight,
        value_up: PackedWeight,
        num_heads: int,
        hadamard_for_many: bool,
    ) -> None:
        workspace = place.workspace
        assert workspace is not None
        super().__init__(
            num_heads=num_heads,
            rank=key_up.cols,
            nope_dim=absorbing.cols,
            value_dim=value_up.rows // num_heads,
            num_bytes=key_up.num_bytes + absorbing.num_bytes + value_up.num_bytes,
            format=key_up.format,
        )
        self._absorbing, self._values = (
            NativeHeads(workspace, each, num_heads=num_heads) for each in (absorbing, value_up)
        )
        self._decompressing = [
            NativeHeads(workspace, each.hadamard_form() if hadamard_for_many else each, num_heads=num_heads)
            for each in (key_up, value_up)
        ]

    def absorb(self, queries: Tensor, out: Tensor) -> None:
        """Implement :meth:`LatentHeads.absorb`."""
        self._absorbing(queries, out)

    def values(self, latents: Tensor) -> Tensor:
        """Implement :meth:`LatentHeads.values`."""
        return self._values(latents, latents.new_empty(len(latents), self.num_heads, self.value_dim))

    @property
    def packed(self) -> PackedLatentHeads:
        """Return the matrices in their packed form."""
        key_up, value_up = (each.weight for each in self._decompressing)
        return PackedLatentHeads(
            absorbing=self._absorbing.weight, values=self._values.weight, key_up=key_up, value_up=value_up
        )

    @property
    def decompresses(self) -> bool:
        """Return True."""
        return True

    def decompress(self, latents: Tensor, keys: Tensor, values: Tensor, first: int) -> None:
        """Implement :meth:`LatentHeads.decompress`."""
        for heads, out in zip(self._decompressing, (keys, values), strict=True):
            heads(latents[:, None], out, first=first)


def make_latent_heads(up: Tensor, shape: LatentAttentionConfig, place: Place, *, is_quantized: bool) -> LatentHeads:
    """Make the projections of a layer.

    :param up: ``[num_heads * (nope_dim + value_dim), rank]``: of each head the projection of keys, then that of values;
        in any dtype, where the checkpoint's values are
    :param is_quantized: whether the model's matrices are quantized; then these are, too, if their sizes allow it
    """
    stacked = torch.unflatten(up, 0, (-1, shape.nope_dim + shape.value_dim))
    key_up, value_up = torch.split(stacked, [shape.nope_dim, shape.value_dim], 1)
    packed_type = _packed_type(shape, place, is_quantized=is_quantized)
    if packed_type is None:
        return DenseLatentHeads(*(each.to(place.device, place.dtype) for each in (key_up, value_up)))
    packed = [_packed(each, packed_type, place) for each in (key_up, key_up.mT, value_up)]
    assert place.workspace is not None
    is_dense = packed_type in DENSE_TYPES.values()
    return NativeLatentHeads(
        place,
        key_up=packed[0],
        absorbing=packed[1],
        value_up=packed[2],
        num_heads=len(stacked),
        hadamard_for_many=not is_dense and gains_in_hadamard(place.workspace.library, [packed[0], packed[2]]),
    )


def latent_bytes(num_heads: int, shape: LatentAttentionConfig, place: Place, *, is_quantized: bool) -> int:
    """Return the bytes that the projections of a layer take: see :func:`make_latent_heads`."""
    keys, values = (num_heads * size * shape.rank for size in (shape.nope_dim, shape.value_dim))
    packed_type = _packed_type(shape, place, is_quantized=is_quantized)
    if packed_type is None:
        return (keys + values) * place.dtype.itemsize
    elements = 2 * keys + values
    if packed_type in DENSE_TYPES.values():
        return elements * place.dtype.itemsize
    blocks = BLOCK_FORMATS[packed_type]
    return elements // blocks.elements * blocks.num_bytes


def _packed_type(shape: LatentAttentionConfig, place: Place, *, is_quantized: bool) -> int | None:
    """Return the library's number of the type in which projections are packed, or None if torch multiplies them."""
    if place.workspace is None or place.dtype not in DENSE_TYPES:
        return None
    sizes = shape.nope_dim, shape.value_dim, shape.rank
    if is_quantized and all(size % 32 == 0 for size in sizes):
        return tensor_type_of(LATENT_BLOCKS)
    return None if any(size % 16 for size in sizes) else DENSE_TYPES[place.dtype]


def _packed(heads: Tensor, packed_type: int, place: Place) -> PackedWeight:
    """Pack the matrices of heads, ``[num_heads, rows, cols]``, one below the other."""
    assert place.workspace is not None
    matrix, library = heads.flatten(0, 1), place.workspace.library
    rows, cols = matrix.shape
    # One thread per layer: other threads load other layers.
    if packed_type in DENSE_TYPES.values():
        return pack_dense(library, [matrix], (rows, cols), place.dtype, num_threads=1, memory=place.memory)
    # The transpose of a single head, as a rank may have, is still a view.
    blocks = quantize_blocks(library, matrix.float().contiguous(), packed_type, num_threads=1)
    return pack_gguf(library, blocks, packed_type, rows, cols, num_threads=1, memory=place.memory)
