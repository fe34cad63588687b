"""Takes in what a device computes of a step beside its tokens, once it is there."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial

from paged_sdk.guard import RequestGuard
from paged_sdk.runner.output import RunnerOutput
from paged_sdk.scheduler.output import ScheduledSequence

__all__ = ["LateResults"]


class LateResults:
    """Holds the results of a step, and what is still to become of them: copies from the device, in most cases, which
    are under way while the next step is launched.

    :param scheduled: the rows of the step
    :param output: the results that are known, which all others are put into
    :param waits: whether nothing comes late: every result is waited for, as on the CPU, where that takes no time
    """

    def __init__(self, scheduled: Sequence[ScheduledSequence], output: RunnerOutput, *, waits: bool) -> None:
        self.scheduled = scheduled
        self.output = output
        self.waits = waits
        self._left: list[tuple[int, Callable[[], None]]] = []

    @property
    def is_done(self) -> bool:
        """Say whether nothing is left to be taken in."""
        return not self._left

    def guard(self, index: int) -> RequestGuard:
        """Have an exception end the request of a row, and nothing else.

        :param index: the index of the row in the step
        """
        request_id = self.scheduled[index].sequence.request.request_id
        return RequestGuard(request_id, partial(self.output.failed.__setitem__, index))

    def add(self, index: int, take_in: Callable[[], None]) -> None:
        """Have a result taken in: at once where that waits for nothing, otherwise by :meth:`finish`.

        :param index: the index of its row in the step
        :param take_in: waits for the device, if it has to, and puts the result into :attr:`output`. If it raises, the
            row fails
        """
        if self.waits:
            self._take_in(index, take_in)
        else:
            self._left.append((index, take_in))

    def finish(self, rows: Container[int] | None = None) -> None:
        """Take in what is left, in the order in which it was added. To be called once that is done of the steps before:
        what is gathered of a prompt comes chunk by chunk.

        A row that has failed gets nothing, and neither does one whose text has ended or begun anew meanwhile; no device
        is waited for on their account.

        :param rows: the indices of the rows whose results are wanted; None: of all
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
