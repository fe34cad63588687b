"""A step whose tokens are chosen on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from paged_sdk.runner.output import RunnerOutput

__all__ = ["NOT_FINITE", "SampledStep"]

NOT_FINITE: Final = "the logits hold NaN or Inf"


class SampledStep:
    """A :class:`~paged_sdk.runner.output.PendingStep` whose tokens come to the host when they are there.

    :param output: all that is known already
    :param rows: which rows the tokens belong to
    :param tokens: ``[len(rows)]`` int64; -1: nothing could be chosen
    :param hands_on: whether these are all the tokens that the step samples
    """

    def __init__(self, output: RunnerOutput, rows: Sequence[int], tokens: Tensor, *, hands_on: bool) -> None:
        self.hands_on = hands_on
        self._output = output
        self._rows = rows
        self._event: Any = None
        self._tokens = tokens
        if tokens.is_cuda:
            self._tokens = torch.empty(len(tokens), dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            event: Any = torch.cuda.Event  # it has no annotations
            self._event = event()
            self._event.record(torch.cuda.current_stream(tokens.device))

    def result(self) -> RunnerOutput:
        """Wait for the device, without the interpreter's lock."""
        if self._event is not None:
            self._event.synchronize()
        output = self._output
        for row, token in zip(self._rows, self._tokens.tolist(), strict=True):
            if token >= 0:
                output.token_ids[row] = [token]
            else:
                output.failed[row] = NOT_FINITE
        return output
