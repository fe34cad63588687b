"""Read hidden states, and what follows from them, off prompts for which no text is generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import NumericalError
from paged_sdk.guard import RequestGuard
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner.output import RunnerOutput
from paged_sdk.sampling.candidates import select_rows
from paged_sdk.sampling.failures import not_finite
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.types.reading import PooledVector, ReadResult, TokenScores

__all__ = ["PromptReader"]

_LOGITS_TILE: Final = 64
"""Logits are computed for so many tokens at a time: a row of 150,000 float32 is 0.6 MB."""


class PromptReader:
    """Gathers what is read of each prompt, chunk by chunk, until the prompt ends."""

    def __init__(self) -> None:
        self._gathered: dict[int, _Gathered] = {}

    def read(
        self,
        scheduled: Sequence[ScheduledSequence],
        first_tokens: Sequence[int],
        hidden: Tensor,
        model: CausalModel,
        result: RunnerOutput,
    ) -> None:
        """Read what a step has computed. A prompt whose hidden states or logits are not finite fails alone.

        :param first_tokens: the index of each row's first token among those of the step
        :param hidden: of all tokens of the step
        :param result: gets what was read of the prompts that end with the step
        """
        wanted = [(index, row) for index, row in enumerate(scheduled) if row.sequence.request.reading is not None]
        if not wanted:
            return
        scored: list[_Span] = []
        for index, row in wanted:
            sequence, reading = row.sequence, row.sequence.request.reading
            assert reading is not None
            states = reading.states(sequence.num_prompt_tokens)
            start, end = max(row.start, states.start), min(row.end, states.stop)
            if row.start <= states.start:  # after a preemption it is read anew
                self._gathered[sequence.seq_id] = _Pool(reading) if isinstance(reading, PooledVector) else _Scores()
            if start >= end:
                continue
            offset = first_tokens[index] - row.start
            gathered = self._gathered[sequence.seq_id]
            if isinstance(gathered, _Pool):
                with RequestGuard(sequence.request.request_id, partial(result.failed.__setitem__, index)):
                    gathered.add(model.normed(hidden[offset + start : offset + end]))
            else:
                scored.append(_Span(index, row, start, end, offset))
        self._score(scored, hidden, model, result)
        for index, row in wanted:
            if row.end == row.sequence.num_prompt_tokens:
                gathered = self._gathered.pop(row.sequence.seq_id)
                if index not in result.failed:
                    with RequestGuard(row.sequence.request.request_id, partial(result.failed.__setitem__, index)):
                        result.readings[index] = gathered.result(row.sequence.request.request_id)

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what was gathered of sequences that have ended; unknown ids are allowed."""
        for seq_id in seq_ids:
            self._gathered.pop(seq_id, None)

    def _score(self, spans: Sequence[_Span], hidden: Tensor, model: CausalModel, result: RunnerOutput) -> None:
        """Look up how likely tokens are, each by the logits of the one before it, those of all prompts together."""
        if not spans:
            return
        positions = [span.offset + place for span in spans for place in range(span.start, span.end)]
        targets = [token for span in spans for token in span.row.sequence.token_ids[span.start + 1 : span.end + 1]]
        parts: list[npt.NDArray[np.float32]] = []
        for start in range(0, len(positions), _LOGITS_TILE):
            logits = model.logits(select_rows(hidden, positions[start : start + _LOGITS_TILE]))
            wanted = torch.tensor(targets[start : start + _LOGITS_TILE], device=logits.device)[:, None]
            largest, likeliest = logits.max(-1, keepdim=True)
            logprobs = logits.gather(1, wanted) - logits.logsumexp(-1, keepdim=True)
            # The largest is NaN or Inf if any value is.
            logprobs = torch.where(largest.isfinite(), logprobs, torch.nan)
            parts.append(torch.cat([logprobs, (likeliest == wanted).float()], 1).cpu().numpy())
        found, begin = np.concatenate(parts), 0
        for span in spans:
            end = begin + span.end - span.start
            own, begin = found[begin:end], end
            if np.isnan(own).any():
                result.failed[span.index] = not_finite(span.row.sequence.request)
                continue
            gathered = self._gathered[span.row.sequence.seq_id]
            assert isinstance(gathered, _Scores)
            gathered.parts.append(own)


@frozen(eq=False)
class _Span:
    """Describes tokens of a row whose hidden states are read.

    :ivar index: the index of the row in the step
    :ivar start: the first of them, by its place in the prompt; ``end`` is the place after the last
    :ivar offset: what is added to a place to find the token's hidden state
    """

    index: int
    row: ScheduledSequence
    start: int
    end: int
    offset: int


class _Scores:
    """Collects how likely a prompt's tokens are.

    :ivar parts: of some tokens each, ``[num_tokens, 2]``: logprobs, and 1 where none is likelier
    """

    def __init__(self) -> None:
        self.parts: list[npt.NDArray[np.float32]] = [np.empty((0, 2), np.float32)]

    def result(self, request_id: str) -> TokenScores:
        """Return what was collected."""
        scores = np.concatenate(self.parts)
        return TokenScores(np.array(scores[:, 0]), scores[:, 1] > 0)


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

    def result(self, request_id: str) -> ReadResult:
        """Return the vector, in the host's memory.

        :raises NumericalError: it is not finite
        """
        assert self._pooled is not None, "a prompt has a token"
        pooled = self._pooled / self._weight if self._weight else self._pooled
        # A copy: what a step has computed may lie in memory of the next one.
        vector = np.array(pooled.cpu().numpy(), dtype=np.float32)
        if not np.isfinite(vector).all():
            raise NumericalError(f"request {request_id}: the hidden states hold NaN or Inf", request_id=request_id)
        return vector


_Gathered: TypeAlias = _Pool | _Scores
