"""What follows a product whose rows still want their scales: bias and residual, or rotary embedding and the KV cache.

A product with activations that have one scale per row (:mod:`paged_sdk.kernels.native.rotation`) leaves those scales to
whoever reads it.
"""

from __future__ import annotations

from ctypes import byref

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.errors import ConfigError
from paged_sdk.kernels.kv_cache import write_slots
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.linear import check_matrix, check_scales, float_vector, pointer
from paged_sdk.kernels.native.paged_attention import AttentionShape, LayerCache, describe_cache, describe_heads
from paged_sdk.kernels.native.structures import DTYPES, Finish, Place, Placement

__all__ = ["finish_product", "place_heads"]


def finish_product(
    workspace: Workspace | None,
    product: Tensor,
    scales: Tensor | None,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """``product * scales[:, None] + bias + residual``, in float32 until it is stored.

    :param workspace: of the engine that calls; None: torch does it
    :param product: [M, N] float32 or bfloat16; rows contiguous
    :param scales: [M] float32; None: 1
    :param out: [M, N] float32 or bfloat16; rows contiguous
    :param bias: [N]
    :param residual: [M, N] of the dtype of ``out``; may be ``out`` itself
    :returns: ``out``
    :raises ConfigError: shapes, dtypes or strides do not fit
    """
    rows, cols = product.shape
    check_matrix("product", product, (rows, cols))
    check_matrix("out", out, (rows, cols))
    check_scales(scales, rows)
    if residual is not None:
        check_matrix("residual", residual, (rows, cols), (out.dtype,))
    vector = float_vector("bias", bias, cols)
    if workspace is None:
        values = _scaled(product, scales, vector)
        return out.copy_(values if residual is None else values + residual)
    args = Finish(
        product=product.data_ptr(),
        row_scales=pointer(scales),
        bias=pointer(vector),
        residual=pointer(residual),
        out=out.data_ptr(),
        workspace=workspace.handle,
        product_stride=product.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        out_stride=out.stride(0),
        num_rows=rows,
        cols=cols,
        product_dtype=DTYPES[product.dtype],
        dtype=DTYPES[out.dtype],
        num_threads=workspace.num_threads,
    )
    workspace.library.functions.paged_finish(workspace.library.level, byref(args))
    return out


def place_heads(
    workspace: Workspace | None,
    product: Tensor,
    scales: Tensor | None,
    shape: AttentionShape,
    cache: LayerCache,
    *,
    cosines: Tensor,
    sines: Tensor,
    slots: Tensor,
    bias: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Finish a query-key-value product: bias, norms of heads, rotary embedding; keys and values go to the cache.

    :param workspace: of the engine that calls; None: torch does it
    :param product: [M, (num_heads + 2 num_kv_heads) head_size] float32 or bfloat16: queries, keys, values; rows
        contiguous
    :param scales: [M] float32, still to multiply the rows of ``product``; None: 1
    :param cache: changed in place
    :param cosines: [M, n] float32, contiguous: rotation of elements i and n + i of each query and key head (Su et al.,
        2021, arXiv 2104.09864); elements past 2 n stay
    :param sines: likewise
    :param slots: [M] int64: where the tokens' keys and values go, ``block * block_size + offset``; no slot twice
    :param bias: [(num_heads + 2 num_kv_heads) head_size]
    :param query_norm: [head_size], RMSNorm of every query head before rotation
    :param key_norm: likewise
    :param norm_eps: added to those norms' mean square
    :param dtype: of the result, float32 or bfloat16
    :returns: queries [M, num_heads, head_size]
    :raises ConfigError: shapes, dtypes or strides do not fit
    """
    size, rows = shape.head_size, len(product)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * size
    half = cosines.shape[-1]
    check_matrix("product", product, (rows, width))
    check_scales(scales, rows)
    for name, tensor, expected, kind in (
        ("cosines", cosines, (rows, half), torch.float32),
        ("sines", sines, (rows, half), torch.float32),
        ("slots", slots, (rows,), torch.int64),
    ):
        if tensor.shape != expected or tensor.dtype != kind or not tensor.is_contiguous() or 2 * half > size:
            raise ConfigError.of(name, f"{tensor.dtype} {tuple(tensor.shape)}", f"contiguous {kind} {expected}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError.of("dtype", dtype, "float32 or bfloat16")
    heads = describe_heads(shape, cache)
    vector = float_vector("bias", bias, width)
    norms = (float_vector("query_norm", query_norm, size), float_vector("key_norm", key_norm, size))
    if workspace is None:
        return _place_heads_reference(
            _scaled(product, scales, vector), shape, cache, cosines, sines, slots, norms, norm_eps
        ).to(dtype)
    out = torch.empty(rows, shape.num_heads, size, dtype=dtype)
    args = Place(
        product=product.data_ptr(),
        row_scales=pointer(scales),
        bias=pointer(vector),
        out=out.data_ptr(),
        workspace=workspace.handle,
        product_stride=product.stride(0),
        placement=Placement(
            heads=heads,
            cache=describe_cache(cache),
            query_norm=pointer(norms[0]),
            key_norm=pointer(norms[1]),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            slots=slots.data_ptr(),
            rotary_half=half,
            norm_eps=norm_eps,
        ),
        num_rows=rows,
        product_dtype=DTYPES[product.dtype],
        dtype=DTYPES[dtype],
        num_threads=workspace.num_threads,
    )
    if workspace.library.functions.paged_place(workspace.library.level, byref(args)):
        raise MemoryError("no memory for the scratch of native heads")
    return out


def _scaled(product: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
    values = product.float() if scales is None else product.float() * scales[:, None]
    return values if bias is None else values + bias


def _place_heads_reference(
    product: Tensor,
    shape: AttentionShape,
    cache: LayerCache,
    cosines: Tensor,
    sines: Tensor,
    slots: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    norm_eps: float,
) -> Tensor:
    counts = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    heads = torch.split(product.view(len(product), sum(counts), shape.head_size), counts, 1)
    half = cosines.shape[-1]
    rotated = []
    for vectors, weight in zip(heads[:2], norms, strict=True):
        if weight is not None:
            vectors = F.rms_norm(vectors, (shape.head_size,), weight, norm_eps)
        a, b, rest = torch.split(vectors, [half, half, shape.head_size - 2 * half], -1)
        cos, sin = cosines[:, None], sines[:, None]
        rotated.append(torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1))
    kind = cache.key.dtype if cache.k_scale is None else torch.float32
    write_slots(rotated[1].to(kind), heads[2].to(kind), cache.key, cache.value, slots, cache.k_scale, cache.v_scale)
    return rotated[0]
