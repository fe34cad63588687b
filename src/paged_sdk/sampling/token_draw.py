"""Draws the tokens of a step on the host: natively, or by torch and numpy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_sdk.kernels.native.library import load
from paged_sdk.sampling.native_draw import NativeTokenDraw
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.torch_draw import TorchTokenDraw

__all__ = ["TokenDraw", "make_token_draw"]

Ids: TypeAlias = npt.NDArray[np.int64]


class TokenDraw(Protocol):
    """Draws tokens by temperature, top-k, top-p and min-p, in this order, or takes the likeliest.

    Tokens depend on their own row alone, and are the same in every implementation, but for the rounding of sums.
    """

    @property
    def keeps_logits(self) -> bool:
        """Tell whether no logits are overwritten."""
        ...

    def draw(
        self, logits: Tensor, rows: Sequence[SampleRow], wanted: Sequence[int], proposed: Mapping[int, Ids]
    ) -> list[list[int]]:
        """Draw the tokens of some rows.

        :param logits: float32 ``[len(rows), vocab_size]``; may be overwritten, unless :attr:`keeps_logits`
        :param wanted: indices of rows, ascending
        :param proposed: for some of these, what :meth:`propose` returned: of each sample's proposals the first that
            truncation keeps is taken, and only if there is none, a token is drawn
        :returns: for each wanted row ``num_samples`` tokens, or none if a logit is NaN or the largest is not finite
        """
        ...

    def propose(self, logits: Tensor, rows: Sequence[SampleRow], wanted: Sequence[int], num: int) -> list[Ids]:
        """Draw several tokens for each sample of some rows by their temperature alone, with other random numbers than
        :meth:`draw` then draws with.

        :param logits: float32 ``[len(rows), vocab_size]``; not overwritten
        :param wanted: indices of rows that are not greedy, ascending
        :param num: tokens for each sample
        :returns: for each wanted row ``[num_samples, num]``; -1: no token
        """
        ...

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what is kept of sequences that have ended; unknown ids are allowed."""
        ...


def make_token_draw(device: torch.device) -> TokenDraw:
    """Choose how tokens are drawn from logits on a device."""
    library = load() if device.type == "cpu" else None
    return TorchTokenDraw() if library is None else NativeTokenDraw(library)
