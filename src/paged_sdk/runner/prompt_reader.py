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
from paged_sdk.sampling.truncation import NOT_DRAWN, draw_greedy
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.types.reading import PooledVector, ReadResult, TokenScores

__all__ = ["PromptReader"]

_LOGITS_TILE: Final = 64
"""Logits are computed for so many tokens at a time: a row of 150,000 float32 is 0.6 MB."""

_SOFTMAX_TILE: Final = 16
"""Their logarithms are taken for fewer: logsumexp over 64 rows of 49,152, whose results are new memory each time, took
18 ms where softmaxes of 16 rows take 2."""


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
        logprobs: list[npt.NDArray[np.float32]] = []
        greedy: list[npt.NDArray[np.int64]] = []
        for start in range(0, len(positions), _LOGITS_TILE):
            logits = model.logits(select_rows(hidden, positions[start : start + _LOGITS_TILE]))
            wanted = torch.tensor(targets[start : start + _LOGITS_TILE], device=logits.device)[:, None]
            greedy.append(draw_greedy(logits))
            for first in range(0, len(logits), _SOFTMAX_TILE):
                rows = slice(first, first + _SOFTMAX_TILE)
                logprobs.append(logits[rows].log_softmax(-1).gather(1, wanted[rows])[:, 0].cpu().numpy())
        all_logprobs, all_greedy, begin = np.concatenate(logprobs), np.concatenate(greedy), 0
        are_greedy = all_greedy == np.array(targets)
        for span in spans:
            end = begin + span.end - span.start
            own, begin = slice(begin, end), end
            if (all_greedy[own] == NOT_DRAWN).any():
                result.failed[span.index] = not_finite(span.row.sequence.request)
                continue
            gathered = self._gathered[span.row.sequence.seq_id]
            assert isinstance(gathered, _Scores)
            gathered.parts.append((all_logprobs[own], are_greedy[own]))


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

    :ivar parts: logprobs of some tokens each, and whether greedy sampling would choose them
    """

    def __init__(self) -> None:
        self.parts: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]] = []

    def result(self, request_id: str) -> TokenScores:
        """Return what was collected."""
        if not self.parts:
            return TokenScores(np.empty(0, np.float32), np.empty(0, np.bool_))
        logprobs, are_greedy = (np.concatenate(each) for each in zip(*self.parts, strict=True))
        return TokenScores(logprobs, are_greedy)


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
                self._pooled = hidden[-1].clone()  # a step's memory may be that of the next one
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
