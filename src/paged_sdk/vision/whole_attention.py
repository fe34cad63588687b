"""Compute unmasked attention with the native kernels for paged attention."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_sdk.kernels.attention_inputs import LayerCache, Precision
from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.paged_attention import AttentionShape, VarlenBatch, native_paged_attention

__all__ = ["whole_attention"]

_WIDTH: Final = 16  # the kernels need a head_dim that is a multiple of this


def whole_attention(
    workspace: Workspace, query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, precision: Precision
) -> Tensor:
    """Compute attention of every row over all rows of the same image.

    :param query: ``[num_images, num_heads, num_rows, head_dim]`` float32, bfloat16 or float16; keys and values likewise
    :param scale: factor of the scores; None: ``head_dim ** -0.5``
    :param precision: the lowest in which to multiply
    :returns: like ``query``
    """
    num_images, num_heads, num_rows, head_dim = query.shape
    size = -(-head_dim // _WIDTH) * _WIDTH
    # Each image is a sequence whose keys and values are one page.
    rows, keys, values = (
        F.pad(each.transpose(1, 2), (0, size - head_dim)).contiguous() for each in (query, key, value)
    )
    batch = VarlenBatch(
        torch.arange(0, (num_images + 1) * num_rows, num_rows, dtype=torch.int32),
        torch.arange(num_images, dtype=torch.int32)[:, None],
        torch.full((num_images,), num_rows, dtype=torch.int32),
        bidirectional_from=torch.zeros(num_images, dtype=torch.int32),
    )
    shape = AttentionShape(num_heads, num_heads, size, head_dim**-0.5 if scale is None else scale, precision=precision)
    made = native_paged_attention(workspace, rows.flatten(0, 1), LayerCache(keys, values), batch, shape)
    return torch.unflatten(made, 0, (num_images, num_rows)).transpose(1, 2)[..., :head_dim]
