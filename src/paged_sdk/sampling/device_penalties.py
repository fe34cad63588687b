"""Penalties of rows that are sampled on the device: which tokens occur in them, the host learns a step too late."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.penalties import count, penalize
from paged_sdk.kernels.penalty_settings import PenaltySettings
from paged_sdk.kernels.transfer import to_device
from paged_sdk.sampling.sampler import has_penalties
from paged_sdk.scheduler.output import ScheduledSequence

__all__ = ["DevicePenalties", "StepPenalties"]


@frozen(eq=False)
class StepPenalties:
    """The penalties of a step's rows.

    :ivar seats: of the rows that have some
    :ivar settings: of all rows, on the device
    """

    seats: list[int]
    settings: PenaltySettings


class DevicePenalties:
    """Counts the tokens of texts with penalties, each in a seat of a table on the device.

    A text is counted from its beginning when it takes a seat. From then on the device adds what it samples, unless the
    text comes back with other tokens than those, as after a preemption: then it is counted anew. A text that finds no
    free seat takes that of one that is not in the step.

    :param num_seats: at least as many as a step has rows
    :param vocab_size: columns of the logits
    """

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device) -> None:
        self._occurrences = torch.zeros(num_seats, vocab_size, dtype=torch.int32, device=device)
        self._free = list(range(num_seats))
        self._seats: dict[int, int] = {}
        # Tokens that each seat's count covers.
        self._lengths = np.zeros(num_seats, dtype=np.int64)

    @staticmethod
    def num_bytes(num_seats: int, vocab_size: int) -> int:
        """Of the table."""
        return num_seats * vocab_size * torch.int32.itemsize

    def of_step(self, scheduled: Sequence[ScheduledSequence]) -> StepPenalties | None:
        """The penalties of a step's rows, once their tokens are counted; None: no row has any.

        :param scheduled: whose next tokens are to be sampled
        """
        penalized = [index for index, row in enumerate(scheduled) if has_penalties(row.sequence.request.sampling)]
        if not penalized:
            return None
        seats = self._take_seats([scheduled[index].sequence.seq_id for index in penalized])
        for index, seat in zip(penalized, seats, strict=True):
            if self._lengths[seat] != scheduled[index].end:
                self._count_anew(seat, scheduled[index])
        params = [row.sequence.request.sampling for row in scheduled]
        seat_of_row = np.full(len(scheduled), -1)
        seat_of_row[penalized] = seats
        settings = to_device(
            self._occurrences.device,
            seat_of_row,
            np.array([1.0 if each.repetition_penalty is None else each.repetition_penalty for each in params], "f4"),
            np.array([each.frequency_penalty for each in params], "f4"),
            np.array([each.presence_penalty for each in params], "f4"),
        )
        return StepPenalties(seats, PenaltySettings(*settings))

    def lower(self, logits: Tensor, step: StepPenalties) -> None:
        """Lower the logits of tokens that occur in their texts, in place.

        :param logits: ``[num_rows, vocab_size]`` float32
        """
        penalize(logits, self._occurrences, step.settings)

    def count(self, step: StepPenalties, tokens: Tensor) -> None:
        """Count what was sampled; the step's rows may then go on as they are.

        :param tokens: ``[num_rows]`` int64; below 0: nothing
        """
        count(self._occurrences, step.settings, tokens)
        self._lengths[step.seats] += 1

    def warm_up(self, logits: Tensor) -> None:
        """Compile what is launched, by rows that have no penalties.

        :param logits: as of :meth:`lower`
        """
        num_rows = len(logits)
        settings = (np.full(num_rows, -1), *np.ones((3, num_rows), "f4"))
        step = StepPenalties([], PenaltySettings(*to_device(logits.device, *settings)))
        self.lower(logits, step)
        self.count(step, torch.zeros(num_rows, dtype=torch.int64, device=logits.device))

    def forget(self, seq_id: int) -> None:
        """Free the seat of a sequence that has ended, if it has one."""
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

    def _count_anew(self, seat: int, row: ScheduledSequence) -> None:
        # Known to the host: a token that it has not seen yet was sampled here, and counted.
        token_ids = np.array(row.sequence.token_ids[: row.end])
        assert len(token_ids) == row.end, f"{len(token_ids)} of {row.end} tokens are known"
        tokens, places = np.unique(token_ids, return_inverse=True)
        num_prompt_tokens = row.sequence.num_prompt_tokens
        counts = 2 * np.bincount(places[num_prompt_tokens:], minlength=len(tokens)).astype(np.int32)
        counts[np.unique(places[:num_prompt_tokens])] += 1
        index, values = to_device(self._occurrences.device, tokens, counts)
        table = self._occurrences[seat]
        table.zero_()
        table.index_copy_(0, index, values)
        self._lengths[seat] = row.end
