"""Attend with every row over all keys, in the native kernels for paged attention."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.attention_inputs import LayerCache, Products
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.paged_attention import AttentionShape, VarlenBatch, native_paged_attention

__all__ = ["whole_attention"]

_ROWS: Final = 512
"""Rows of a head that share the loads of their keys: a thread's memory for them is 1 MB."""
_WIDTH: Final = 16  # elements of a head that the kernels read at a time


def whole_attention(
    workspace: Workspace, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, products: Products
) -> Tensor:
    """Attend without a mask.

    The kernels let a token see the keys before it. So some hundred rows are brought to them as the query heads of one
    token, the last, which share a KV head: these see all keys.

    :param query: ``[num_images, num_heads, num_rows, head_dim]`` bfloat16; keys and values likewise
    :param scale: multiplies the scores; None: the root of ``head_dim`` divides them
    :param products: what may be multiplied
    :returns: like ``query``
    """
    num_images, num_heads, num_rows, head_dim = query.shape
    scale = head_dim**-0.5 if scale is None else scale
    size = -(-head_dim // _WIDTH) * _WIDTH
    num_parts = -(-num_rows // _ROWS)
    rows = -(-num_rows // num_parts)
    padded = F.pad(query, (0, size - head_dim, 0, num_parts * rows - num_rows))
    parts = padded.view(num_images, num_heads, num_parts, rows, size).transpose(1, 2)
    cache = LayerCache(*(F.pad(each.transpose(1, 2), (0, size - head_dim)).contiguous() for each in (key, value)))
    num_seqs = num_images * num_parts
    batch = VarlenBatch(
        torch.arange(num_seqs + 1, dtype=torch.int32),
        torch.arange(num_images, dtype=torch.int32).repeat_interleave(num_parts)[:, None].contiguous(),
        torch.full((num_seqs,), num_rows, dtype=torch.int32),
        torch.ones(num_seqs, dtype=torch.uint8),  # as those of a chunk, of which some are multiplied together
    )
    shape = AttentionShape(num_heads * rows, num_heads, size, scale, products=products)
    out = native_paged_attention(workspace, parts.reshape(num_seqs, num_heads * rows, size), cache, batch, shape)
    made = out.view(num_images, num_parts, num_heads, rows, size).transpose(1, 2)
    return made.reshape(num_images, num_heads, num_parts * rows, size)[:, :, :num_rows, :head_dim]
