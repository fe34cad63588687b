"""Applies repetition, frequency and presence penalties to the logits of tokens that already occur.

The repetition penalty comes first (Keskar et al., "CTRL", 2019: positive logits are divided by it, others multiplied;
for tokens of prompt and output), then frequency and presence as OpenAI's API defines them (for tokens of the output).
On the host, each sequence's state counts its tokens. On a device a table counts them, because the host learns of a
sampled token only when the next step has already started.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.config.sampling import SamplingParams
from paged_sdk.kernels.penalties import count, penalize
from paged_sdk.kernels.penalty_settings import PenaltySettings
from paged_sdk.kernels.transfer import to_device
from paged_sdk.sampling.failures import NO_FAILURES, Failures
from paged_sdk.sampling.processor import ALL_TOKENS, DeviceProcessor, Processor, ProcessorState
from paged_sdk.sampling.row import SampleRow
from paged_sdk.sampling.sparse import Entries
from paged_sdk.sampling.token_counts import TokenCounts
from paged_sdk.scheduler.request import Request

__all__ = ["DevicePenalties", "Penalties", "PenaltyChange", "PenaltyState", "StepPenalties"]


@frozen(eq=False)
class PenaltyChange:
    """Holds the penalties of one row.

    :ivar params: the penalties
    :ivar tokens: the distinct tokens of prompt and output
    :ivar output_counts: how often each of them occurs in the output
    """

    params: SamplingParams
    tokens: npt.NDArray[np.int64]
    output_counts: npt.NDArray[np.int64]


class Penalties(Processor[PenaltyChange]):
    """Lowers the logits of tokens that already occur."""

    def applies_until(self, request: Request) -> int:
        return ALL_TOKENS if _has_penalties(request.sampling) else 0

    def begin(self, request: Request) -> PenaltyState:
        return PenaltyState(request.sampling, TokenCounts(request.prompt_token_ids))

    def apply(self, logits: Tensor, changes: Sequence[tuple[int, PenaltyChange]]) -> Failures:
        entries = Entries(logits, [row for row, _ in changes], [change.tokens for _, change in changes])
        sizes = [len(change.tokens) for _, change in changes]

        def per_token(values: Sequence[float]) -> Any:
            return entries.along(np.repeat(np.array(values, np.float32), sizes))

        params = [change.params for _, change in changes]
        scores = entries.read()
        if any(_repetition(each) != 1 for each in params):
            repetition = per_token([_repetition(each) for each in params])
            where: Any = torch.where if isinstance(scores, Tensor) else np.where
            with np.errstate(over="ignore"):  # of the one that is not taken
                scores = where(scores < 0, scores * repetition, scores / repetition)
        if any(each.frequency_penalty or each.presence_penalty for each in params):
            frequency = per_token([each.frequency_penalty for each in params])
            presence = per_token([each.presence_penalty for each in params])
            counts = entries.along(np.concatenate([change.output_counts for _, change in changes]).astype(np.float32))
            scores = scores - (frequency * counts + presence * (counts > 0))
        entries.write(scores)
        return NO_FAILURES

    def device_bytes(self, max_num_seqs: int, vocab_size: int) -> int:
        return max_num_seqs * vocab_size * torch.int32.itemsize

    def on_device(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> DevicePenalties:
        return DevicePenalties(max_num_seqs, vocab_size, device)


class PenaltyState(ProcessorState[PenaltyChange]):
    """Counts the tokens of one sequence.

    :param params: the penalties
    :param counts: the counts so far
    """

    def __init__(self, params: SamplingParams, counts: TokenCounts) -> None:
        self._params = params
        self._counts = counts

    def advance(self, token_ids: Sequence[int]) -> None:
        self._counts.advance(token_ids)

    def roll_back(self, num_tokens: int) -> None:
        self._counts.roll_back(num_tokens)

    def fork(self) -> Self:
        return type(self)(self._params, self._counts.fork())

    def change(self) -> PenaltyChange:
        return PenaltyChange(self._params, self._counts.tokens, self._counts.output_counts)


@frozen(eq=False)
class StepPenalties:
    """Holds the penalties of a step's rows.

    :ivar seats: rows of the count table that belong to the rows with penalties
    :ivar settings: the settings of all rows, on the device
    """

    seats: list[int]
    settings: PenaltySettings


class DevicePenalties(DeviceProcessor[StepPenalties]):
    """Counts the tokens of sequences with penalties in a table on the device; a sequence's row there is its seat.

    When a sequence takes a seat, all its tokens are counted. From then on the device adds each sampled token. If the
    number of counted tokens no longer matches the sequence's, as after a preemption, all are counted again. If no seat
    is free, a sequence takes the seat of one that is not in the step.

    :param num_seats: rows of the table, at least the largest number of rows in a step
    :param vocab_size: columns of the logits
    """

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device) -> None:
        self._occurrences = torch.zeros(num_seats, vocab_size, dtype=torch.int32, device=device)
        self._free = list(range(num_seats))
        self._seats: dict[int, int] = {}
        # Number of tokens counted in each seat.
        self._lengths = np.zeros(num_seats, dtype=np.int64)

    def begin(self, rows: Sequence[SampleRow]) -> StepPenalties | None:
        penalized = [index for index, row in enumerate(rows) if _has_penalties(row.request.sampling)]
        if not penalized:
            return None
        seats = self._take_seats([rows[index].seq_id for index in penalized])
        for index, seat in zip(penalized, seats, strict=True):
            if self._lengths[seat] != rows[index].num_tokens:
                self._count_anew(seat, rows[index])
        params = [row.request.sampling for row in rows]
        seat_of_row = np.full(len(rows), -1)
        seat_of_row[penalized] = seats
        settings = to_device(
            self._occurrences.device,
            seat_of_row,
            np.array([_repetition(each) for each in params], "f4"),
            np.array([each.frequency_penalty for each in params], "f4"),
            np.array([each.presence_penalty for each in params], "f4"),
        )
        return StepPenalties(seats, PenaltySettings(*settings))

    def apply(self, logits: Tensor, step: StepPenalties) -> None:
        penalize(logits, self._occurrences, step.settings)

    def advance(self, step: StepPenalties, tokens: Tensor) -> None:
        count(self._occurrences, step.settings, tokens)
        self._lengths[step.seats] += 1

    def warm_up(self, logits: Tensor) -> None:
        num_rows = len(logits)
        settings = (np.full(num_rows, -1), *np.ones((3, num_rows), "f4"))
        step = StepPenalties([], PenaltySettings(*to_device(logits.device, *settings)))
        self.apply(logits, step)
        self.advance(step, torch.zeros(num_rows, dtype=torch.int64, device=logits.device))

    def forget(self, seq_id: int) -> None:
        seat = self._seats.pop(seq_id, None)
        if seat is not None:
            self._lengths[seat] = 0
            self._free.append(seat)

    def _take_seats(self, seq_ids: Sequence[int]) -> list[int]:
        newcomers = [seq_id for seq_id in seq_ids if seq_id not in self._seats]
        if len(newcomers) > len(self._free):
            needed, staying = len(newcomers) - len(self._free), set(seq_ids)
            for seq_id in list(itertools.islice((each for each in self._seats if each not in staying), needed)):
                self.forget(seq_id)
        self._seats.update((seq_id, self._free.pop()) for seq_id in newcomers)
        return [self._seats[seq_id] for seq_id in seq_ids]

    def _count_anew(self, seat: int, row: SampleRow) -> None:
        # Counting needs the token ids on the host. A token that the host has not seen yet was counted when sampled.
        token_ids = np.array(row.token_ids[: row.num_tokens])
        assert len(token_ids) == row.num_tokens, f"{len(token_ids)} of {row.num_tokens} tokens are known"
        tokens, inverse = np.unique(token_ids, return_inverse=True)
        counts = 2 * np.bincount(inverse[row.num_prompt_tokens :], minlength=len(tokens)).astype(np.int32)
        counts[np.unique(inverse[: row.num_prompt_tokens])] += 1
        index, values = to_device(self._occurrences.device, tokens, counts)
        table = self._occurrences[seat]
        table.zero_()
        table.index_copy_(0, index, values)
        self._lengths[seat] = row.num_tokens


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty not in (None, 1.0) or params.frequency_penalty != 0 or params.presence_penalty != 0


def _repetition(params: SamplingParams) -> float:
    return 1.0 if params.repetition_penalty is None else params.repetition_penalty
