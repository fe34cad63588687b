"""Convolve the tokens of a step causally, each channel by itself, from where earlier steps left off."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_sdk.kernels.recurrent_step import RecurrentRows

__all__ = ["short_conv"]


def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, rows: RecurrentRows) -> Tensor:
    """Compute ``y[t, c] = bias[c] + sum over k of weight[c, k] * x[t - kernel_size + 1 + k, c]`` within each sequence,
    and keep each sequence's last inputs for its next step. Products are summed in float32, or float64.

    :param x: ``[num_tokens, channels]``, the tokens of all rows in the order of the rows
    :param weight: ``[channels, kernel_size]``
    :param bias: ``[channels]`` or None
    :param pool: ``[num_slots, kernel_size - 1 + most_drafts, channels]`` of the dtype of ``x``: the last inputs of the
        rows' sequences before the step, oldest first; replaced by those after it, apart from drafts, whose inputs
        follow
    :returns: ``[num_tokens, channels]`` of the dtype of ``x``
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(wide).mT.contiguous()  # [kernel_size, channels]
    num_kept = len(taps) - 1
    kept = rows.last_inputs(pool, num_kept)
    if rows.only_decodes and rows.drafts is None:
        windows = torch.cat([kept, x.unsqueeze(1)], 1)
        pool[:, :num_kept].index_copy_(0, rows.slots, windows[:, 1:])
        y = torch.einsum("rkc,kc->rc", windows.to(wide), taps)
    else:
        # One line with every row's kept inputs before its new ones: no row is padded. The places between two rows,
        # where windows span both, are computed too, and not read.
        places = rows.line(num_kept)
        line = x.new_empty(len(places.kept) + len(x), x.shape[1])
        line.index_copy_(0, places.kept, kept.flatten(0, 1))
        line.index_copy_(0, places.new, x)
        pool[:, : places.last.shape[1]].index_copy_(0, rows.slots, line[places.last])
        values = line.to(wide)
        num_windows = len(line) - num_kept
        sums = values[:num_windows] * taps[0]
        for k in range(1, len(taps)):
            sums.addcmul_(values[k : k + num_windows], taps[k])
        y = sums.index_select(0, places.new - num_kept)
    return (y if bias is None else y + bias).to(x.dtype)
