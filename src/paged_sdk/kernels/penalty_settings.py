"""Holds the settings of repetition, frequency and presence penalties on the device."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.checks import check_tensor

__all__ = ["PenaltySettings"]


@frozen(eq=False)
class PenaltySettings:
    """Holds the penalties of N rows, and their seats: the sequences' rows in a table of token counts.

    :ivar seats: ``[N]`` int64, distinct: each row's seat in the table; -1: the row has no penalties and is not counted
    :ivar repetition: ``[N]`` float32, above 0: logits of tokens that occur in prompt or output are divided by it if
        positive, multiplied if not (Keskar et al., "CTRL", 2019, arXiv 1909.05858)
    :ivar frequency: ``[N]`` float32, subtracted for each occurrence in the output
    :ivar presence: ``[N]`` float32, subtracted once if the token occurs in the output
    """

    seats: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    def check(self, num_rows: int, device: torch.device) -> None:
        """Check that the settings are for ``num_rows`` rows on this device.

        :raises ConfigError: shapes, dtypes or devices do not fit
        """
        for name, tensor, dtype in (
            ("seats", self.seats, torch.int64),
            ("repetition", self.repetition, torch.float32),
            ("frequency", self.frequency, torch.float32),
            ("presence", self.presence, torch.float32),
        ):
            check_tensor(name, tensor, (num_rows,), (dtype,), device)
