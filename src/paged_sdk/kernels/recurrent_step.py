"""Define a step's rows and states as recurrent layers take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.transfer import to_device

__all__ = ["ChunkGrid", "LinePlaces", "RecurrentRows", "RecurrentStep"]


@frozen(eq=False, kw_only=True)
class LinePlaces:
    """Locates the tokens of a step in a line that has each row's last inputs of earlier steps before its new ones.

    :ivar kept: ``[num_rows * num_kept]`` int64: places of the earlier inputs
    :ivar new: ``[num_tokens]`` int64: places of the new tokens
    :ivar last: ``[num_rows * num_kept]`` int64: places of the inputs to keep for the next step
    """

    kept: Tensor
    new: Tensor
    last: Tensor


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


class RecurrentRows:
    """Describes the rows of a step: prefill chunks and decodes in any order, without padding.

    :param slots: the slot of each row's state
    :param starts: tokens of each row's sequence before its first one here; at 0 the state is zero, whatever its slot
        holds
    :param lengths: number of tokens of each row, at least 1
    :ivar slots: ``[num_rows]`` int64
    :ivar is_new: ``[num_rows]`` bool: whether the state before the row is zero
    :ivar lengths: number of tokens of each row
    """

    def __init__(
        self, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int], *, device: torch.device
    ) -> None:
        slots_there, starts_there = to_device(device, np.array(slots), np.array(starts))
        self.lengths: tuple[int, ...] = tuple(lengths)
        self.slots: Tensor = slots_there
        self.is_new: Tensor = starts_there == 0
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

    def line(self, num_kept: int) -> LinePlaces:
        """Return the places of a line with the last ``num_kept`` inputs of each row; all layers share it."""
        if num_kept not in self._lines:
            lengths = np.array(self.lengths)
            ends = np.cumsum(lengths + num_kept)  # of each row in the line
            kept = (ends - lengths - num_kept)[:, None] + np.arange(num_kept)
            new = np.arange(lengths.sum()) + np.repeat(np.arange(1, len(lengths) + 1) * num_kept, lengths)
            last = (ends - num_kept)[:, None] + np.arange(num_kept)
            places = to_device(self._device, kept.ravel(), new, last.ravel())
            self._lines[num_kept] = LinePlaces(kept=places[0], new=places[1], last=places[2])
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


@frozen(eq=False)
class RecurrentStep:
    """Holds the states of a model's recurrent layers, and the rows of a step that read and change them.

    :ivar states: by layer, its tensors, ``[num_slots, ...]`` each
    """

    rows: RecurrentRows
    states: Mapping[int, Sequence[Tensor]]
