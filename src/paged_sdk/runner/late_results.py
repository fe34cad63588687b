"""Collects a step's results other than tokens, which a device computes while the next step is launched."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial

from paged_sdk.guard import RequestGuard
from paged_sdk.runner.output import RunnerOutput
from paged_sdk.scheduler.output import ScheduledSequence

__all__ = ["LateResults"]


class LateResults:
    """Holds the results of a step, known and pending. Pending results are mostly copies from the device, which run
    while the next step is launched.

    :param scheduled: the rows of the step
    :param output: the known results; pending ones are added to it
    :param waits: True: every result is completed at once, as on the CPU, where results are there already
    """

    def __init__(self, scheduled: Sequence[ScheduledSequence], output: RunnerOutput, *, waits: bool) -> None:
        self.scheduled = scheduled
        self.output = output
        self.waits = waits
        self._left: list[tuple[int, Callable[[], None]]] = []

    @property
    def is_done(self) -> bool:
        """Tell whether no result is pending."""
        return not self._left

    def guard(self, index: int) -> RequestGuard:
        """Return a guard within which an exception ends only the request of a row.

        :param index: the index of the row in the step
        """
        request_id = self.scheduled[index].sequence.request.request_id
        return RequestGuard(request_id, partial(self.output.failed.__setitem__, index))

    def add(self, index: int, take_in: Callable[[], None]) -> None:
        """Add a pending result; it is completed at once if :attr:`waits`, otherwise by :meth:`finish`.

        :param index: the index of its row in the step
        :param take_in: waits for the device, if needed, and writes the result to :attr:`output`. If it raises, the row
            fails
        """
        if self.waits:
            self._take_in(index, take_in)
        else:
            self._left.append((index, take_in))

    def finish(self, rows: Container[int] | None = None) -> None:
        """Complete the pending results, in the order in which they were added. Call this in step order, since a
        prompt's results accumulate chunk by chunk.

        Rows that have failed, and those whose sequence has ended or restarted since, get nothing and are not waited
        for.

        :param rows: the indices of the rows to complete; None: all
        """
        left, self._left = self._left, []
        for index, take_in in left:
            if rows is not None and index not in rows:
                self._left.append((index, take_in))
            elif self.scheduled[index].is_current:
                self._take_in(index, take_in)

    def _take_in(self, index: int, take_in: Callable[[], None]) -> None:
        if index not in self.output.failed:
            with self.guard(index):
                take_in()
