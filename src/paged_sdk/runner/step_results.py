"""Holds the tensors that recorded steps write their results to."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.sampling import argmax

__all__ = ["Recorded", "StepResults"]


class StepResults:
    """Holds the results of recorded steps, in memory that all steps share: only one of them runs at a time.

    A step also writes the likeliest tokens to ``overlap``, from which the next step reads. If other tokens are sampled,
    they replace them there.

    :param overlap: ``[max_num_seqs]`` int64: the tokens that the previous step sampled
    :param num_tokens: maximum number of tokens of a recorded step
    """

    def __init__(self, overlap: Tensor, num_tokens: int) -> None:
        self.overlap = overlap
        self._num_tokens = num_tokens
        self._tokens = torch.empty_like(overlap)
        self._hidden = self._logits = overlap.new_empty(0, 0)

    def keep(self, hidden: Tensor, logits: Tensor) -> None:
        """Store the results of a step, with device operations only.

        :param hidden: ``[num_tokens, hidden_size]``
        :param logits: float32 ``[num_rows, vocab_size]``, of the rows that may be sampled
        """
        if not self._hidden.numel():  # in the first run of the first step, which is not recorded
            self._hidden = hidden.new_empty(self._num_tokens, *hidden.shape[1:])
            self._logits = logits.new_empty(len(self._tokens), *logits.shape[1:])
        self._hidden[: len(hidden)].copy_(hidden)
        self._logits[: len(logits)].copy_(logits)
        tokens = argmax(logits)
        self._tokens[: len(tokens)].copy_(tokens)
        torch.clamp(tokens, min=0, out=self.overlap[: len(tokens)])

    def of(self, num_tokens: int, positions: list[int]) -> Recorded:
        """Return the results of the step that has just been replayed.

        :param positions: indices of the tokens whose logits the step has computed
        """
        rows = len(positions)
        return Recorded(self._hidden[:num_tokens], positions, self._logits[:rows], self._tokens[:rows])


@frozen(eq=False)
class Recorded:
    """Holds the results of a recorded step, which are valid until the next one.

    :ivar hidden: ``[num_tokens, hidden_size]``
    :ivar positions: the indices of the tokens whose logits were computed
    :ivar logits: float32 ``[len(positions), vocab_size]``; may be overwritten
    :ivar likeliest: ``[len(positions)]`` int64; :data:`~paged_sdk.kernels.sampling.NOT_DRAWN` where there is none
    """

    hidden: Tensor
    positions: list[int]
    logits: Tensor
    likeliest: Tensor
