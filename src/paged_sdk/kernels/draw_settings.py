"""Holds the settings of sampling on the device."""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.checks import check_tensor

__all__ = ["NEXT_TRY", "DrawSettings"]

NEXT_TRY: Final = 2**40
"""Distance in a row's random stream between successive draws for one position; at least as large as any position."""


@frozen(eq=False)
class DrawSettings:
    """Holds the sampling settings of N rows.

    Top-k keeps the k likeliest tokens, top-p the likeliest of these whose weights sum to a share p of the total, min-p
    those with at least that share of the likeliest token's weight. All tokens that tie with the last kept one are kept.

    :ivar temperature: ``[N]`` float32; 0: greedy, other settings are ignored
    :ivar top_k: ``[N]`` int32, at least 1; V or more keep all
    :ivar top_p: ``[N]`` float32, above 0; 1 keeps all
    :ivar min_p: ``[N]`` float32, 0 to 1; 0 keeps all
    :ivar streams: ``[N]`` int64: the 64-bit seed of the row's random numbers
    :ivar positions: ``[N]`` int64, 0 to :data:`NEXT_TRY`: index of the random number to draw with
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    streams: Tensor
    positions: Tensor

    def check(self, num_rows: int, device: torch.device) -> None:
        """Check that the settings are for ``num_rows`` rows on this device.

        :raises ConfigError: shapes, dtypes or devices do not fit
        """
        for name, tensor, dtype in (
            ("temperature", self.temperature, torch.float32),
            ("top_k", self.top_k, torch.int32),
            ("top_p", self.top_p, torch.float32),
            ("min_p", self.min_p, torch.float32),
            ("streams", self.streams, torch.int64),
            ("positions", self.positions, torch.int64),
        ):
            check_tensor(name, tensor, (num_rows,), (dtype,), device)
