"""Block tables that stay on the device from step to step: what a step uploads is what has changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paged_sdk.kernels.transfer import to_device

__all__ = ["BlockTables"]


class BlockTables:
    """The tables of recent rows, each in a seat. A table that finds no free seat takes the least recently used one.

    Tables are told apart by the list that holds them, and are expected to change at their ends alone: one whose earlier
    entries change has to come as another list (see :class:`~paged_sdk.kv.manager.KvTable`).

    :param num_seats: tables at once, at least as many as a step has rows
    :param width: entries of the longest table
    :ivar tensor: ``[num_seats + 1, width]`` int32. What lies behind a table's end is arbitrary
    :ivar nobody: the last seat, which stays empty: for rows that only fill up a batch
    """

    def __init__(self, num_seats: int, width: int, device: torch.device) -> None:
        self.tensor = torch.zeros(num_seats + 1, width, dtype=torch.int32, device=device)
        self.nobody = num_seats
        self._seats: dict[int, int] = {}
        # Holding the lists keeps their identities from being used again.
        self._tables: list[Sequence[int] | None] = [None] * num_seats
        self._lengths = [0] * num_seats
        self._last_used = np.zeros(num_seats, dtype=np.int64)
        self._time = 0
        # The last step's, because most steps have the same rows as the one before.
        self._placed: list[int] = []
        self._placed_lengths: list[int] = []
        self._placed_seats = np.zeros(0, dtype=np.int64)

    def place(self, tables: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
        """The seats of a step's tables, once the device has been sent what it does not have of them.

        :returns: ``[len(tables)]``
        """
        assert len(tables) <= len(self._tables), f"{len(tables)} tables, {len(self._tables)} seats"
        identities = [id(table) for table in tables]
        lengths = [len(table) for table in tables]
        if identities != self._placed:
            self._placed, self._placed_lengths = identities, []
            self._placed_seats = self._find_seats(identities, tables)
        if lengths != self._placed_lengths:
            self._placed_lengths = lengths
            self._send_what_has_grown(tables)
        return self._placed_seats

    def _find_seats(self, identities: Sequence[int], tables: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
        self._time += 1
        seats = [self._seats.get(identity, -1) for identity in identities]
        known = np.array(seats, dtype=np.int64)
        self._last_used[known[known >= 0]] = self._time
        if -1 in seats:
            self._seat_newcomers(tables, seats)
        return np.array(seats, dtype=np.int64)

    def _seat_newcomers(self, tables: Sequence[Sequence[int]], seats: list[int]) -> None:
        """Fill in the seats of tables that have none."""
        free = iter(np.argsort(self._last_used, kind="stable").tolist())
        for row, table in enumerate(tables):
            if seats[row] >= 0:
                continue
            seat = next(free)
            evicted = self._tables[seat]
            if evicted is not None:
                del self._seats[id(evicted)]
            self._tables[seat] = table
            self._seats[id(table)] = seat
            self._lengths[seat] = 0
            self._last_used[seat] = self._time
            seats[row] = seat

    def _send_what_has_grown(self, tables: Sequence[Sequence[int]]) -> None:
        width = self.tensor.shape[1]
        places, entries = [], []
        for seat, table in zip(self._placed_seats.tolist(), tables, strict=True):
            start = self._lengths[seat]
            if start < len(table):
                places.append(np.arange(seat * width + start, seat * width + len(table)))
                entries.append(np.array(table[start:], dtype=np.int32))
                self._lengths[seat] = len(table)
        if places:
            index, values = to_device(self.tensor.device, np.concatenate(places), np.concatenate(entries))
            self.tensor.view(-1).index_copy_(0, index, values)
