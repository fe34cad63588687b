"""Define a step's rows and states as recurrent layers take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from paged_sdk.kernels.native.library import Workspace
from paged_sdk.kernels.native.recurrent import NativeRecurrentRows
from paged_sdk.kernels.row_drafts import RowDrafts
from paged_sdk.kernels.transfer import to_device

__all__ = ["ChunkGrid", "DividedRows", "LinePlaces", "RecurrentRows", "RecurrentStep"]


@frozen(eq=False, kw_only=True)
class LinePlaces:
    """Locates the tokens of a step in a line that has each row's last inputs of earlier steps before its new ones.

    :ivar kept: ``[num_rows * n]`` int64: places of the earlier inputs
    :ivar new: ``[num_tokens]`` int64: places of the new tokens
    :ivar last: ``[num_rows, n]`` int64: places of the inputs to keep for the next step, as many as without drafts, then
        those of the drafts; rows of fewer drafts repeat their last one
    :ivar before: ``[num_rows, n]`` int64: where the slots have the earlier inputs
    """

    kept: Tensor
    new: Tensor
    last: Tensor
    before: Tensor


@frozen(eq=False, kw_only=True)
class ChunkGrid:
    """Divides the rows of several tokens into chunks of one size, of which only a row's last one may be padded.

    The chunks are in the order of a scan: first chunks of all rows, then second ones. The rows with the most chunks
    come first, so those that are still to be scanned are always the first ones.

    :ivar rows: ``[num_rows]`` int64: the rows, of a step's
    :ivar tokens: ``[num_chunks, size]`` int64: the token at each place; padding has the number of tokens of the step
    :ivar own: ``[n]`` int64: the tokens of these rows, of a step's; ``places`` says where they are in
        ``tokens.flatten()``
    :ivar counts: number of chunks in each step of the scan
    """

    rows: Tensor
    tokens: Tensor
    own: Tensor
    places: Tensor
    counts: tuple[int, ...]


@frozen(eq=False, kw_only=True)
class DividedRows:
    """Divides the tokens of rows with drafts, for rules that change a state token by token.

    Tokens are numbered in a line of those that are kept of earlier steps and those of the step.

    :ivar kept: slots of the kept ones, and their places in the slots: ``[num_kept]`` int64 each
    :ivar cleared: slots of states that are zero, through which no token takes them yet, ``[n]`` int64
    :ivar known: the rows that take states through tokens that are right; None: there are none
    :ivar known_tokens: ``[n]`` int64: their tokens, of the line
    :ivar guessed: the rows of drafts, whose slots count these rows; None: there are none
    :ivar guessed_slots: ``[num_guessed_rows]`` int64: the slots of the states before them
    :ivar guessed_tokens: ``[n]`` int64: their tokens, of the line
    :ivar own: ``[num_tokens]`` int64: the step's tokens among those of ``known`` and then ``guessed``
    :ivar new: the step's drafts, ``[n]`` int64, and the slots and places at which their inputs are kept, likewise
    """

    kept: tuple[Tensor, Tensor]
    cleared: Tensor
    known: RecurrentRows | None
    known_tokens: Tensor
    guessed: RecurrentRows | None
    guessed_slots: Tensor
    guessed_tokens: Tensor
    own: Tensor
    new: tuple[Tensor, Tensor, Tensor]


class RecurrentRows:
    """Describes the rows of a step: prefill chunks and decodes in any order, without padding.

    :param slots: the slot of each row's state
    :param starts: tokens of each row's sequence before its first one here; at 0 the state is zero, whatever its slot
        holds
    :param lengths: number of tokens of each row, at least 1
    :param drafts: the rows' drafts; None: there are none, and none are replayed
    :param workspace: of the native CPU kernels, for a step on the CPU; None: torch operations compute it
    :ivar slots: ``[num_rows]`` int64
    :ivar is_new: ``[num_rows]`` bool: whether the state before the row is zero
    :ivar lengths: number of tokens of each row
    :ivar drafts: the rows' drafts; None: there are none
    :ivar native: the rows in the native kernels' form; None: torch operations compute the step
    """

    def __init__(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        *,
        device: torch.device,
        drafts: RowDrafts | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        self._on_host = np.array(slots, dtype=np.int64), np.array(starts, dtype=np.int64)
        slots_there, starts_there = to_device(device, *self._on_host)
        self.lengths: tuple[int, ...] = tuple(lengths)
        self.drafts: RowDrafts | None = drafts
        self.slots: Tensor = slots_there
        self.is_new: Tensor = starts_there == 0
        self.native: NativeRecurrentRows | None = (
            None if workspace is None else NativeRecurrentRows(workspace, self.slots, self.is_new, self.lengths, drafts)
        )
        self._device = device
        self._lines: dict[int, LinePlaces] = {}
        self._grid: ChunkGrid | None = None
        self._singles: tuple[Tensor, Tensor] | None = None

    @property
    def only_decodes(self) -> bool:
        """Return whether every row has one token."""
        return max(self.lengths) == 1

    def states(self, pool: Tensor) -> Tensor:
        """Return a copy of the rows' states: zero for rows that begin a sequence.

        :param pool: ``[num_slots, ...]``
        :returns: ``[num_rows, ...]``
        """
        begins = self.is_new.view(-1, *(1,) * (pool.dim() - 1))
        return pool.index_select(0, self.slots).masked_fill_(begins, 0)

    def last_inputs(self, pool: Tensor, num_kept: int) -> Tensor:
        """Return a copy of the last inputs before each row, ``num_kept`` and those of the drafts that its own follow:
        zero for rows that begin a sequence.

        :param pool: ``[num_slots, num_kept + most_drafts, channels]``: inputs before drafts, then those of drafts
        :returns: ``[num_rows, n, channels]``; rows that follow fewer drafts have others before these
        """
        if self.drafts is None:
            return self.states(pool[:, :num_kept])
        return pool[self.slots[:, None], self.line(num_kept).before].masked_fill_(self.is_new[:, None, None], 0)

    def line(self, num_kept: int) -> LinePlaces:
        """Return the places of a line with the inputs of :meth:`last_inputs` before each row; all layers share it."""
        if num_kept not in self._lines:
            lengths = np.array(self.lengths)
            replayed, earlier, drafts = (
                np.zeros((3, len(lengths)), dtype=np.int64) if self.drafts is None else self.drafts.counts
            )
            drafts = earlier + drafts
            num_before = num_kept + earlier.max()
            ends = np.cumsum(lengths + num_before)  # of each row in the line
            kept = (ends - lengths - num_before)[:, None] + np.arange(num_before)
            new = np.arange(lengths.sum()) + np.repeat(np.arange(1, len(lengths) + 1) * num_before, lengths)
            before = (num_kept + replayed + earlier)[:, None] - np.arange(num_before, 0, -1)
            last = (ends - num_kept - drafts)[:, None] + np.arange(num_kept + drafts.max())
            places = to_device(
                self._device, kept.ravel(), new, np.minimum(last, ends[:, None] - 1), np.maximum(before, 0)
            )
            self._lines[num_kept] = LinePlaces(kept=places[0], new=places[1], last=places[2], before=places[3])
        return self._lines[num_kept]

    @property
    def singles(self) -> tuple[Tensor, Tensor]:
        """Return the indices of the rows of one token, and of their tokens: ``[n]`` int64 each."""
        if self._singles is None:
            rows = np.flatnonzero(np.array(self.lengths) == 1)
            first_tokens = np.cumsum(self.lengths) - self.lengths
            there = to_device(self._device, rows, first_tokens[rows])
            self._singles = there[0], there[1]
        return self._singles

    @cached_property
    def divided(self) -> DividedRows:
        """Return the rows divided by their drafts, of which there must be some; all layers share it."""
        assert self.drafts is not None
        slots, starts = self._on_host
        lengths, (replayed, earlier, new) = np.array(self.lengths), self.drafts.counts
        known = lengths - new
        num_kept = replayed.sum() + earlier.sum()
        first = num_kept + np.cumsum(lengths) - lengths  # of each row's tokens, in the line
        known_tokens = _spans(np.cumsum(replayed) - replayed, replayed, first, known)
        before = replayed.sum() + np.cumsum(earlier) - earlier
        guessed_tokens = _spans(before, earlier, first + known, new)
        places = np.empty(num_kept + lengths.sum(), dtype=np.int64)
        places[np.concatenate((known_tokens, guessed_tokens))] = np.arange(len(places))
        of_known, of_guessed = replayed + known > 0, earlier + new > 0
        places_of_guessed = np.arange(of_guessed.sum())
        there = to_device(
            self._device,
            np.concatenate((np.repeat(slots, replayed), np.repeat(slots, earlier))),
            np.concatenate((_counted(replayed), _counted(earlier))),
            slots[(starts == 0) & ~of_known],
            known_tokens,
            slots[of_guessed],
            guessed_tokens,
            places[num_kept:],
            np.repeat(first + known - num_kept, new) + _counted(new),
            np.repeat(slots, new),
            np.repeat(earlier, new) + _counted(new),
        )
        return DividedRows(
            kept=(there[0], there[1]),
            cleared=there[2],
            known=self._like(slots[of_known], starts[of_known], (replayed + known)[of_known]),
            known_tokens=there[3],
            guessed=self._like(places_of_guessed, places_of_guessed + 1, (earlier + new)[of_guessed]),
            guessed_slots=there[4],
            guessed_tokens=there[5],
            own=there[6],
            new=(there[7], there[8], there[9]),
        )

    def _like(
        self, slots: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> RecurrentRows | None:
        """Return other rows; None: there are none."""
        if not len(slots):
            return None
        return RecurrentRows(slots.tolist(), starts.tolist(), lengths.tolist(), device=self._device)

    def grid(self, most: int) -> ChunkGrid:
        """Return the rows of several tokens in chunks; all layers share it.

        :param most: size of a chunk, unless all rows are shorter
        """
        if self._grid is None:
            self._grid = self._chunked(most)
        return self._grid

    def _chunked(self, most: int) -> ChunkGrid:
        lengths = np.array(self.lengths)
        first_tokens = np.cumsum(lengths) - lengths
        size = int(min(most, lengths.max()))
        num_chunks = -(-lengths // size)
        rows = np.argsort(-num_chunks, kind="stable")
        rows = rows[lengths[rows] > 1]
        counts = [int((num_chunks[rows] > turn).sum()) for turn in range(num_chunks.max())]
        turns = np.repeat(np.arange(len(counts)), counts)
        chunk_rows = np.concatenate([rows[:count] for count in counts])
        offsets = turns[:, None] * size + np.arange(size)
        is_token = offsets < lengths[chunk_rows][:, None]
        tokens = np.where(is_token, first_tokens[chunk_rows][:, None] + offsets, lengths.sum())
        there = to_device(self._device, rows, tokens, tokens[is_token], np.flatnonzero(is_token))
        return ChunkGrid(rows=there[0], tokens=there[1], own=there[2], places=there[3], counts=tuple(counts))


def _counted(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count from 0 to each of the lengths, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _spans(
    first: NDArray[np.int64], lengths: NDArray[np.int64], second: NDArray[np.int64], others: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return, row by row, ``lengths`` numbers from ``first`` on and then ``others`` numbers from ``second`` on."""
    starts, counts = np.stack((first, second), 1).ravel(), np.stack((lengths, others), 1).ravel()
    return np.repeat(starts, counts) + _counted(counts)


@frozen(eq=False)
class RecurrentStep:
    """Holds the states of a model's recurrent layers, and the rows of a step that read and change them.

    :ivar states: by layer, its tensors, ``[num_slots, ...]`` each
    """

    rows: RecurrentRows
    states: Mapping[int, Sequence[Tensor]]
