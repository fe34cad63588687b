"""Read hidden states, and what follows from them, off prompts for which no text is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.errors import NumericalError
from paged_sdk.kernels.sampling import argmax
from paged_sdk.kernels.transfer import HostCopies, to_device
from paged_sdk.models.causal_model import CausalModel, RankingModel, RankLayers
from paged_sdk.runner.late_results import LateResults
from paged_sdk.runner.output import RunnerOutput
from paged_sdk.runner.prompt_logprobs import LOGITS_TILE
from paged_sdk.runner.step_states import StepStates
from paged_sdk.sampling.failures import not_finite
from paged_sdk.sampling.truncation import NOT_DRAWN, draw_greedy
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.scheduler.request import Request
from paged_sdk.types.reading import AnswerLogit, PooledVector, Reading, ReadResult, TokenScores

__all__ = ["PromptReader"]

_SOFTMAX_TILE: Final = 16
"""Their logarithms are taken for fewer: logsumexp over 64 rows of 49,152, whose results are new memory each time, took
18 ms where softmaxes of 16 rows take 2."""


class PromptReader:
    """Gathers what is read of each prompt, chunk by chunk, until the prompt ends."""

    def __init__(self) -> None:
        self._gathered: dict[int, _Gathered] = {}

    def read(self, late: LateResults, states: StepStates) -> None:
        """Read what a step has computed. A prompt whose hidden states or logits are not finite fails alone.

        :param late: gets what was read of the prompts that end with the step
        """
        wanted = [(index, row) for index, row in enumerate(late.scheduled) if row.sequence.request.reading is not None]
        if not wanted:
            return
        scored: list[_Span] = []
        answered: list[tuple[_Answer, int]] = []
        for index, row in wanted:
            sequence, reading = row.sequence, row.sequence.request.reading
            assert reading is not None
            places = reading.states(sequence.num_prompt_tokens)
            start, end = max(row.start, places.start), min(row.end, places.stop)
            if row.start <= places.start:  # after a preemption it is read anew: older steps add to what was read then
                self._gathered[sequence.seq_id] = _gathering(reading, states.model)
            if start >= end:
                continue
            offset = states.first_tokens[index] - row.start
            gathered = self._gathered[sequence.seq_id]
            if isinstance(gathered, _Pool):
                with late.guard(index):
                    gathered.add(states.model.normed(states.hidden[offset + start : offset + end]))
            elif isinstance(gathered, _Answer):
                answered.append((gathered, offset + start))
            else:
                scored.append(_Span(index, row, gathered, start, end, offset))
        _score(scored, states, late)
        _answer(answered, states)
        for index, row in wanted:
            if row.end == row.sequence.num_prompt_tokens:
                gathered = self._gathered.pop(row.sequence.seq_id)
                if index not in late.output.failed:
                    with late.guard(index):
                        late.add(index, _ending(gathered, index, late.output, row.sequence.request.request_id))

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Drop what was gathered of sequences that have ended; unknown ids are allowed."""
        for seq_id in seq_ids:
            self._gathered.pop(seq_id, None)


def _gathering(reading: Reading, model: CausalModel) -> _Gathered:
    match reading:
        case PooledVector():
            return _Pool(reading, model)
        case AnswerLogit():
            return _Answer(reading)
    return _Scores()


def _ending(gathered: _Gathered, index: int, output: RunnerOutput, request_id: str) -> Callable[[], None]:
    """Launch the last of what is read of a prompt, and return what puts it into the results of its row."""
    result = gathered.end(request_id)

    def take_in() -> None:
        output.readings[index] = result()

    return take_in


def _score(spans: Sequence[_Span], states: StepStates, late: LateResults) -> None:
    """Look up how likely tokens are, each by the logits of the one before it, those of all prompts together."""
    if not spans:
        return
    positions = [span.offset + place for span in spans for place in range(span.start, span.end)]
    targets = [token for span in spans for token in span.row.sequence.token_ids[span.start + 1 : span.end + 1]]
    tiles: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(positions), LOGITS_TILE):
        tile = slice(start, start + LOGITS_TILE)
        # No name holds the logits, which go before those of the next tile come.
        tiles.append(_look_up(states.logits(positions[tile]), targets[tile], waits=late.waits))
    copies, wanted, begin = HostCopies(*map(torch.cat, zip(*tiles, strict=True))), np.array(targets), 0
    for span in spans:
        end = begin + span.end - span.start
        late.add(span.index, partial(span.gathered.add, copies, slice(begin, end), wanted, span.row.sequence.request))
        begin = end


def _look_up(logits: Tensor, token_ids: Sequence[int], *, waits: bool) -> tuple[Tensor, Tensor]:
    """Look up the logprobs of some tokens, and the likeliest ones in their places.

    :param logits: float32 ``[N, vocab_size]``
    :param token_ids: ``[N]``
    :param waits: whether the host may look for the likeliest; otherwise all is launched on the device
    :returns: logprobs, float32, and tokens or :data:`NOT_DRAWN`, int64, each ``[N]``
    """
    likeliest = torch.from_numpy(draw_greedy(logits)) if waits else argmax(logits)
    (wanted,) = to_device(logits.device, np.array(token_ids, np.int64)[:, None])
    tiles = [slice(first, first + _SOFTMAX_TILE) for first in range(0, len(logits), _SOFTMAX_TILE)]
    return torch.cat([logits[rows].log_softmax(-1).gather(1, wanted[rows])[:, 0] for rows in tiles]), likeliest


def _answer(asked: Sequence[tuple[_Answer, int]], states: StepStates) -> None:
    """Look up the logits of the tokens that answer prompts, those of all prompts together.

    :param asked: what gets the logits of a prompt, and the index of its last token among those of the step
    """
    for first in range(0, len(asked), LOGITS_TILE):
        tile = asked[first : first + LOGITS_TILE]
        logits = states.logits([token for _, token in tile])
        (wanted,) = to_device(logits.device, np.array([answer.both for answer, _ in tile], np.int64))
        copies = HostCopies(logits.gather(1, wanted))
        for place, (answer, _) in enumerate(tile):
            answer.found = (copies, place)


@frozen(eq=False)
class _Span:
    """Describes tokens of a row whose hidden states are read.

    :ivar index: the index of the row in the step
    :ivar gathered: gets what is found
    :ivar start: the first of them, by its place in the prompt; ``end`` is the place after the last
    :ivar offset: what is added to a place to find the token's hidden state
    """

    index: int
    row: ScheduledSequence
    gathered: _Scores
    start: int
    end: int
    offset: int


class _Scores:
    """Collects how likely a prompt's tokens are.

    :ivar parts: logprobs of some tokens each, and whether greedy sampling would choose them
    """

    def __init__(self) -> None:
        self.parts: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]] = []

    def add(self, copies: HostCopies, own: slice, targets: npt.NDArray[np.int64], request: Request) -> None:
        """Take in the logprobs of the next tokens, and the likeliest ones in their places, once they are there.

        :param own: where they are in the copies, and in ``targets``, the tokens themselves
        :raises NumericalError: logits are not finite
        """
        logprobs, likeliest = (copy.numpy()[own] for copy in copies.wait())
        if (likeliest == NOT_DRAWN).any():
            raise not_finite(request)
        self.parts.append((logprobs, likeliest == targets[own]))

    def end(self, request_id: str) -> Callable[[], ReadResult]:
        """Return what joins all that will have been collected."""
        return self._join

    def _join(self) -> TokenScores:
        if not self.parts:
            return TokenScores(np.empty(0, np.float32), np.empty(0, np.bool_))
        logprobs, are_greedy = (np.concatenate(each) for each in zip(*self.parts, strict=True))
        return TokenScores(logprobs, are_greedy)


class _Answer:
    """Makes one number of the logits after a prompt's last token.

    :ivar both: the token that says yes, and the one that says no; where there is none, the first again
    :ivar found: the logits of both for some prompts, and the place of this one; None: they are not computed yet
    """

    def __init__(self, reading: AnswerLogit) -> None:
        true, false = reading.tokens.true, reading.tokens.false
        self.both = (true, true if false is None else false)
        self._subtracts = false is not None
        self.found: tuple[HostCopies, int] | None = None

    def end(self, request_id: str) -> Callable[[], ReadResult]:
        """Return what waits for the number, and raises NumericalError if it is not finite."""
        assert self.found is not None, "a prompt has a token"
        copies, place = self.found

        def result() -> ReadResult:
            (copy,) = copies.wait()
            true, false = copy[place].tolist()
            return _finite(np.array([true - false if self._subtracts else true], np.float32), request_id, "rank is")

        return result


class _Pool:
    """Makes one vector of hidden states that come in chunks."""

    def __init__(self, reading: PooledVector, model: CausalModel) -> None:
        self._head: RankLayers | None = None
        if reading.is_ranked:
            assert isinstance(model, RankingModel), "only what ranks texts is asked to"
            self._head = model.rank_head
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
                self._weight += count * (2 * first + count - 1) / 2
                pooled = weights @ hidden
            case "max":
                pooled = hidden.amax(0)
                self._pooled = pooled if self._pooled is None else torch.maximum(self._pooled, pooled)
                return
            case "last" | "cls":
                self._pooled = hidden[-1].clone()  # a step's memory may be that of the next one
                return
        self._pooled = pooled if self._pooled is None else self._pooled + pooled

    def end(self, request_id: str) -> Callable[[], ReadResult]:
        """Launch the last of the vector, and its copy to the host.

        :returns: what waits for it, and raises NumericalError if it is not finite
        """
        assert self._pooled is not None, "a prompt has a token"
        pooled = self._pooled / self._weight if self._weight else self._pooled
        if self._head is not None:
            pooled = self._head.ranks(pooled[None])[0]
        what = "hidden states hold" if self._head is None else "rank is"
        copies = HostCopies(pooled)

        def result() -> ReadResult:
            (copy,) = copies.wait()
            return _finite(copy.numpy(), request_id, what)

        return result


def _finite(values: npt.NDArray[np.float32], request_id: str, what: str) -> npt.NDArray[np.float32]:
    """Return what was read.

    :param what: what NaN or Inf is in, for the error
    """
    values = values.astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise NumericalError(f"request {request_id}: the {what} NaN or Inf", request_id=request_id)
    return values


_Gathered: TypeAlias = _Pool | _Answer | _Scores
