"""Keeps block tables on the device across steps, so that a step uploads only new entries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paged_sdk.kernels.transfer import to_device

__all__ = ["BlockTables"]


class BlockTables:
    """Keeps the block tables of recent sequences, each in a seat (a row of :attr:`tensor`). A new sequence takes the
    least recently used seat.

    Only entries added to a table since it was last sent are sent, or all of them if the table's version has changed.

    :param num_seats: number of tables kept at once, at least the maximum number of rows in a step
    :param width: number of entries of the longest table
    :ivar tensor: ``[num_seats + 1, width]`` int32. Entries after a table's end are arbitrary
    :ivar padding_seat: the last seat, which belongs to no sequence and serves padding rows
    """

    def __init__(self, num_seats: int, width: int, device: torch.device) -> None:
        self.tensor: torch.Tensor = torch.zeros(num_seats + 1, width, dtype=torch.int32, device=device)
        self.padding_seat = num_seats
        self._seats: dict[int, int] = {}
        self._owners: list[int | None] = [None] * num_seats
        self._versions = [0] * num_seats
        self._lengths = [0] * num_seats
        self._last_used = np.zeros(num_seats, dtype=np.int64)
        self._time = 0
        # The seats of the last step are kept, because most steps have the same rows as the one before.
        self._placed: list[int] = []
        self._placed_versions: list[int] = []
        self._placed_lengths: list[int] = []
        self._placed_seats = np.zeros(0, dtype=np.int64)

    def place(
        self, seq_ids: Sequence[int], versions: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> npt.NDArray[np.int64]:
        """Send new entries of a step's block tables to the device, and return the seats of the tables.

        :param seq_ids: the owners of the tables
        :param versions: versions of the tables: see :attr:`~paged_sdk.types.step.StepRow.kv_version`
        :returns: ``[len(tables)]``
        """
        assert len(tables) <= len(self._owners), f"{len(tables)} tables, {len(self._owners)} seats"
        if seq_ids != self._placed:
            self._placed, self._placed_lengths = list(seq_ids), []
            self._placed_seats = self._find_seats(seq_ids)
        lengths = [len(table) for table in tables]
        if lengths != self._placed_lengths or versions != self._placed_versions:
            self._send_what_is_new(versions, tables)
            self._placed_versions, self._placed_lengths = list(versions), lengths
        return self._placed_seats

    def _find_seats(self, seq_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        self._time += 1
        seats = [self._seats.get(seq_id, -1) for seq_id in seq_ids]
        known = np.array(seats, dtype=np.int64)
        self._last_used[known[known >= 0]] = self._time
        if -1 in seats:
            self._seat_newcomers(seq_ids, seats)
        return np.array(seats, dtype=np.int64)

    def _seat_newcomers(self, seq_ids: Sequence[int], seats: list[int]) -> None:
        """Assign seats to the sequences that have none."""
        free = iter(np.argsort(self._last_used, kind="stable").tolist())
        for row, seq_id in enumerate(seq_ids):
            if seats[row] >= 0:
                continue
            seat = next(free)
            evicted = self._owners[seat]
            if evicted is not None:
                del self._seats[evicted]
            self._owners[seat] = seq_id
            self._seats[seq_id] = seat
            self._lengths[seat] = 0
            self._last_used[seat] = self._time
            seats[row] = seat

    def _send_what_is_new(self, versions: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        width = self.tensor.shape[1]
        seats, places, entries = self._placed_seats.tolist(), [], []
        for seat, version, table in zip(seats, versions, tables, strict=True):
            start = self._lengths[seat] if version == self._versions[seat] else 0
            if start < len(table):
                places.append(np.arange(seat * width + start, seat * width + len(table)))
                entries.append(np.array(table[start:], dtype=np.int32))
        if places:
            index, values = to_device(self.tensor.device, np.concatenate(places), np.concatenate(entries))
            self.tensor.view(-1).index_copy_(0, index, values)
        # Recorded only after sending, so that entries do not count as sent if sending fails.
        for seat, version, table in zip(seats, versions, tables, strict=True):
            self._versions[seat], self._lengths[seat] = version, len(table)
