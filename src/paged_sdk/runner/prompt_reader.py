"""Read hidden states off prompts for which no text is generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paged_sdk.errors import NumericalError
from paged_sdk.guard import RequestGuard
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.output import RunnerOutput
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.types.reading import PooledVector

__all__ = ["PromptReader"]


class PromptReader:
    """Gathers what is read of each prompt, chunk by chunk, until the prompt ends."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}

    def read(
        self,
        scheduled: Sequence[ScheduledSequence],
        first_tokens: Sequence[int],
        hidden: Tensor,
        model: CausalModel,
        result: RunnerOutput,
    ) -> None:
        """Read what a step has computed. A prompt whose hidden states are not finite fails alone.

        :param first_tokens: the index of each row's first token among those of the step
        :param hidden: of all tokens of the step
        :param result: gets what was read of the prompts that end with the step
        """
        for index, row in enumerate(scheduled):
            sequence = row.sequence
            reading = sequence.request.reading
            if reading is None:
                continue
            with RequestGuard(sequence.request.request_id, partial(result.failed.__setitem__, index)):
                states = reading.states(sequence.num_prompt_tokens)
                start, end = max(row.start, states.start), min(row.end, states.stop)
                if start < end:
                    if start == states.start:  # after a preemption it is read anew
                        self._pools[sequence.seq_id] = _Pool(reading)
                    offset = first_tokens[index] - row.start
                    self._pools[sequence.seq_id].add(model.normed(hidden[offset + start : offset + end]))
                if row.end == sequence.num_prompt_tokens:
                    vector = self._pools.pop(sequence.seq_id).vector()
                    if not np.isfinite(vector).all():
                        raise NumericalError(
                            f"request {sequence.request.request_id}: the hidden states hold NaN or Inf"
                        )
                    result.readings[index] = vector

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what was gathered of sequences that have ended; unknown ids are allowed."""
        for seq_id in seq_ids:
            self._pools.pop(seq_id, None)


class _Pool:
    """Makes one vector of hidden states that come in chunks."""

    def __init__(self, reading: PooledVector) -> None:
        self._pooling = reading.pooling
        self._pooled: Tensor | None = None
        self._weight = 0.0
        self._num_tokens = reading.first_token

    def add(self, hidden: Tensor) -> None:
        """Take in the next tokens' hidden states, float32 ``[num_tokens, hidden_size]``."""
        first, count = self._num_tokens + 1, len(hidden)
        self._num_tokens += count
        match self._pooling:
            case "mean":
                self._weight += count
                pooled = hidden.sum(0)
            case "weighted_mean":
                weights = torch.arange(first, first + count, dtype=torch.float32, device=hidden.device)
                self._weight += float(weights.sum())
                pooled = weights @ hidden
            case "max":
                pooled = hidden.amax(0)
                self._pooled = pooled if self._pooled is None else torch.maximum(self._pooled, pooled)
                return
            case "last" | "cls":
                self._pooled = hidden[-1]
                return
        self._pooled = pooled if self._pooled is None else self._pooled + pooled

    def vector(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Return the vector, in the host's memory."""
        assert self._pooled is not None, "a prompt has a token"
        pooled = self._pooled / self._weight if self._weight else self._pooled
        # A copy: what a step has computed may lie in memory of the next one.
        return np.array(pooled.cpu().numpy(), dtype=np.float32)
