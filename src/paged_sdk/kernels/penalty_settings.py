"""Says by how much a token's earlier occurrences lower its logit."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.checks import check_tensor

__all__ = ["PenaltySettings"]


@frozen(eq=False)
class PenaltySettings:
    """Holds the penalties of N rows. A table counts how often tokens occur, in a row for each text, which is its seat.

    :ivar seats: ``[N]`` int64, distinct: each row's seat in the table; -1: the row has no penalties and is not counted
    :ivar repetition: ``[N]`` float32, above 0, of tokens that occur in prompt or output: their logits are divided by it
        if they are above zero, and multiplied if not (Keskar et al., "CTRL", 2019, arXiv 1909.05858)
    :ivar frequency: ``[N]`` float32, subtracted for each occurrence in the output
    :ivar presence: ``[N]`` float32, subtracted once if there is one
    """

    seats: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    def check(self, num_rows: int, device: torch.device) -> None:
        """Check that these are settings for so many rows on this device.

        :raises ConfigError: shapes, dtypes or devices do not fit
        """
        for name, tensor, dtype in (
            ("seats", self.seats, torch.int64),
            ("repetition", self.repetition, torch.float32),
            ("frequency", self.frequency, torch.float32),
            ("presence", self.presence, torch.float32),
        ):
            check_tensor(name, tensor, (num_rows,), (dtype,), device)
