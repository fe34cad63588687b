"""Compute embeddings and scores of prompts for which no text is generated, from their hidden states or logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.adapters.bank import AdapterBank
from paged_sdk.errors import NumericalError
from paged_sdk.kernels.sampling import NOT_DRAWN, argmax
from paged_sdk.kernels.transfer import HostCopies, to_device
from paged_sdk.models.causal_model import CausalModel, RankingModel, RankLayers
from paged_sdk.runner.late_results import LateResults
from paged_sdk.runner.output import RunnerOutput
from paged_sdk.runner.prompt_logprobs import LOGITS_TILE
from paged_sdk.runner.step_states import StepStates
from paged_sdk.sampling.failures import not_finite
from paged_sdk.sampling.truncation import draw_greedy
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.scheduler.request import Request
from paged_sdk.types.reading import AnswerLogit, PooledVector, Reading, ReadResult, TokenScores

__all__ = ["PromptReader"]

_SOFTMAX_TILE: Final = 16
"""Rows per log_softmax: logsumexp over 64 rows of 49,152, whose temporaries are new memory each time, took 18 ms; in
tiles of 16 rows, softmaxes take 2 ms."""


class PromptReader:
    """Accumulates each prompt's result chunk by chunk, until the prompt ends.

    :param adapters: the adapters that prompts may use; None: there are none
    """

    def __init__(self, adapters: AdapterBank | None = None) -> None:
        self._adapters = adapters
        self._gathered: dict[int, _Gathered] = {}

    def read(self, late: LateResults, states: StepStates) -> None:
        """Read the prompts of a step. A prompt whose hidden states or logits are not finite fails alone.

        :param late: receives the results of prompts that end with the step
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
            if row.start <= places.start:  # also after a preemption; late results of older steps go to the old object
                adapter, bank = sequence.request.adapter, self._adapters
                replaced = None if adapter is None or bank is None else bank.whole(adapter.number)
                self._gathered[sequence.seq_id] = _gathering(reading, states.model, replaced)
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
        """Drop the state of sequences that have ended; unknown ids are allowed."""
        for seq_id in seq_ids:
            self._gathered.pop(seq_id, None)


def _gathering(reading: Reading, model: CausalModel, replaced: Mapping[str, Tensor] | None) -> _Gathered:
    """Make the object that computes a prompt's result.

    :param replaced: tensors of the ranking layers that the prompt's adapter replaces
    """
    match reading:
        case PooledVector():
            return _Pool(reading, model, replaced)
        case AnswerLogit():
            return _Answer(reading)
    return _Scores()


def _ending(gathered: _Gathered, index: int, output: RunnerOutput, request_id: str) -> Callable[[], None]:
    """Launch the last part of a prompt's result, and return a function that stores the result of its row."""
    result = gathered.end(request_id)

    def take_in() -> None:
        output.readings[index] = result()

    return take_in


def _score(spans: Sequence[_Span], states: StepStates, late: LateResults) -> None:
    """Look up the logprobs of tokens, each from the logits of the token before it, for all prompts together."""
    if not spans:
        return
    positions = [span.offset + place for span in spans for place in range(span.start, span.end)]
    targets = [token for span in spans for token in span.row.sequence.token_ids[span.start + 1 : span.end + 1]]
    tiles: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(positions), LOGITS_TILE):
        tile = slice(start, start + LOGITS_TILE)
        # No variable holds the logits, so they are freed before those of the next tile are computed.
        tiles.append(_look_up(states.logits(positions[tile]), targets[tile], waits=late.waits))
    copies, wanted, begin = HostCopies(*map(torch.cat, zip(*tiles, strict=True))), np.array(targets), 0
    for span in spans:
        end = begin + span.end - span.start
        late.add(span.index, partial(span.gathered.add, copies, slice(begin, end), wanted, span.row.sequence.request))
        begin = end


def _look_up(logits: Tensor, token_ids: Sequence[int], *, waits: bool) -> tuple[Tensor, Tensor]:
    """Look up the logprobs of some tokens, and find the likeliest token at each place.

    :param logits: float32 ``[N, vocab_size]``
    :param token_ids: ``[N]``
    :param waits: True: the host finds the likeliest tokens; False: everything is launched on the device
    :returns: logprobs, float32, and likeliest tokens or :data:`NOT_DRAWN`, int64, each ``[N]``
    """
    likeliest = torch.from_numpy(draw_greedy(logits)) if waits else argmax(logits)
    (wanted,) = to_device(logits.device, np.array(token_ids, np.int64)[:, None])
    tiles = [slice(first, first + _SOFTMAX_TILE) for first in range(0, len(logits), _SOFTMAX_TILE)]
    return torch.cat([logits[rows].log_softmax(-1).gather(1, wanted[rows])[:, 0] for rows in tiles]), likeliest


def _answer(asked: Sequence[tuple[_Answer, int]], states: StepStates) -> None:
    """Look up the logits of answer tokens, for all prompts together.

    :param asked: for each prompt: the object that receives the logits, and the index of its last token in the step
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
    """Describes the tokens of a row whose logits are read.

    :ivar index: the index of the row in the step
    :ivar gathered: receives the results
    :ivar start: position of the first token in the prompt; ``end`` is exclusive
    :ivar offset: added to a position, gives the index of the token in the step
    """

    index: int
    row: ScheduledSequence
    gathered: _Scores
    start: int
    end: int
    offset: int


class _Scores:
    """Collects the logprobs of a prompt's tokens.

    :ivar parts: per chunk: logprobs, and whether greedy sampling would choose the tokens
    """

    def __init__(self) -> None:
        self.parts: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]] = []

    def add(self, copies: HostCopies, own: slice, targets: npt.NDArray[np.int64], request: Request) -> None:
        """Wait for the logprobs of the next tokens and the likeliest tokens at their places, and store them.

        :param own: slice of this prompt in the copies and in ``targets``
        :param targets: the tokens
        :raises NumericalError: logits are not finite
        """
        logprobs, likeliest = (copy.numpy()[own] for copy in copies.wait())
        if (likeliest == NOT_DRAWN).any():
            raise not_finite(request)
        self.parts.append((logprobs, likeliest == targets[own]))

    def end(self, request_id: str) -> Callable[[], ReadResult]:
        """Return a function that joins all parts."""
        return self._join

    def _join(self) -> TokenScores:
        if not self.parts:
            return TokenScores(np.empty(0, np.float32), np.empty(0, np.bool_))
        logprobs, are_greedy = (np.concatenate(each) for each in zip(*self.parts, strict=True))
        return TokenScores(logprobs, are_greedy)


class _Answer:
    """Computes a score from the logits after a prompt's last token.

    :ivar both: the token for yes and the token for no; without the latter, the first one twice
    :ivar found: the logits of both tokens for several prompts, and the index of this prompt; None: not computed yet
    """

    def __init__(self, reading: AnswerLogit) -> None:
        true, false = reading.tokens.true, reading.tokens.false
        self.both = (true, true if false is None else false)
        self._subtracts = false is not None
        self.found: tuple[HostCopies, int] | None = None

    def end(self, request_id: str) -> Callable[[], ReadResult]:
        """Return a function that waits for the score, and raises NumericalError if it is not finite."""
        assert self.found is not None, "a prompt has a token"
        copies, place = self.found

        def result() -> ReadResult:
            (copy,) = copies.wait()
            true, false = copy[place].tolist()
            return _finite(np.array([true - false if self._subtracts else true], np.float32), request_id, "rank is")

        return result


class _Pool:
    """Pools hidden states, which arrive in chunks, into one vector, and scores the vector if that was requested."""

    def __init__(self, reading: PooledVector, model: CausalModel, replaced: Mapping[str, Tensor] | None = None) -> None:
        self._head: RankLayers | None = None
        if reading.is_ranked:
            assert isinstance(model, RankingModel), "the model has no ranking layers"
            self._head = model.rank_head
        self._replaced = replaced
        self._pooling = reading.pooling
        self._pooled: Tensor | None = None
        self._weight = 0.0
        self._num_tokens = reading.first_token

    def add(self, hidden: Tensor) -> None:
        """Add the next tokens' hidden states, float32 ``[num_tokens, hidden_size]``."""
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
                self._pooled = hidden[-1].clone()  # the next step may reuse this step's memory
                return
        self._pooled = pooled if self._pooled is None else self._pooled + pooled

    def end(self, request_id: str) -> Callable[[], ReadResult]:
        """Launch the end of the computation, and the copy to the host.

        :returns: a function that waits for the result, and raises NumericalError if it is not finite
        """
        assert self._pooled is not None, "a prompt has a token"
        pooled = self._pooled / self._weight if self._weight else self._pooled
        if self._head is not None:
            pooled = self._head.ranks(pooled[None], self._replaced)[0]
        what = "hidden states hold" if self._head is None else "rank is"
        copies = HostCopies(pooled)

        def result() -> ReadResult:
            (copy,) = copies.wait()
            return _finite(copy.numpy(), request_id, what)

        return result


def _finite(values: npt.NDArray[np.float32], request_id: str, what: str) -> npt.NDArray[np.float32]:
    """Check that values are finite, and return them as float32.

    :param what: subject and verb of the error, such as "rank is"
    """
    values = values.astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise NumericalError(f"request {request_id}: the {what} NaN or Inf", request_id=request_id)
    return values


_Gathered: TypeAlias = _Pool | _Answer | _Scores
