"""Records steps for a grid of sizes and context bounds, and finds the smallest recorded step that fits a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Final, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from attrs import frozen

from paged_sdk.guard import drop_tracebacks
from paged_sdk.kernels.triton.availability import launch_errors

__all__ = ["Record", "RecordableStep", "RecordedStep", "StepTable"]

Record: TypeAlias = Callable[[Callable[[], None]], Callable[[], None]]
"""Records a function and returns a function that replays it: the same operations on the same memory."""

# Recording stops after this many failures: a smaller step needs less memory, but a third failure has another cause.
_MOST_ERRORS: Final = 3


class RecordableStep(Protocol):
    """Describes a step of a fixed size, whose input stays at the same memory."""

    def run(self) -> None:
        """Launch the step's operations."""
        ...


StepT = TypeVar("StepT", bound=RecordableStep)


@frozen(eq=False)
class RecordedStep(Generic[StepT]):
    """Holds a step and the function that replays it.

    :ivar size: the size that the step was recorded for
    """

    step: StepT
    replay: Callable[[], None]
    size: int


class StepTable(Generic[StepT]):
    """Holds recorded steps by size and context bound.

    :param sizes: sizes to record
    :param bounds: context lengths to record each size for
    :param make: makes a step from a size and a bound
    :param record: records a step; may call the step's function any number of times
    :param on_progress: called with the number of recorded steps and their total
    :ivar errors: errors of failed recordings; the next larger step or context bound is used in place of each
    :ivar largest: the largest size with a step for the longest context
    :raises Exception: the first of these errors, if no step for the longest context could be recorded
    """

    def __init__(
        self,
        sizes: Iterable[int],
        bounds: Iterable[int],
        make: Callable[[int, int], StepT],
        record: Record,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        all_sizes, self._bounds = sorted(sizes), sorted(bounds)
        self.errors: list[Exception] = []
        made: dict[tuple[int, int], RecordedStep[StepT]] = {}
        # The largest first: the others fit into its memory.
        wanted = list(itertools.product(all_sizes[::-1], self._bounds[::-1]))
        for done, (size, bound) in enumerate(wanted, 1):
            step = make(size, bound)
            try:
                made[size, bound] = RecordedStep(step, record(step.run), size)
            except launch_errors() as error:
                drop_tracebacks(error)  # their frames would keep all recorded steps alive
                self.errors.append(error)
                if len(self.errors) == _MOST_ERRORS:
                    break
                continue
            if on_progress is not None:
                on_progress(done, len(wanted))
        whole = [size for size, bound in made if bound == self._bounds[-1]]
        if not whole:
            raise self.errors[0]
        self.largest: int = max(whole)
        self._sizes = np.array([size for size in all_sizes if size <= self.largest])
        # A failed recording is replaced by the next larger one; at least that with the longest bound exists.
        self._steps = {
            (size, bound): next(
                made[one, other]
                for one, other in itertools.product(self._sizes.tolist(), self._bounds)
                if one >= size and other >= bound and (one, other) in made
            )
            for size, bound in itertools.product(self._sizes.tolist(), self._bounds)
        }

    def find(self, size: int, longest: int) -> RecordedStep[StepT]:
        """Return the smallest step that fits.

        :param size: at most :attr:`largest`
        :param longest: the longest context, at most the largest bound
        """
        own = int(self._sizes[np.searchsorted(self._sizes, size)])
        return self._steps[own, next(bound for bound in self._bounds if bound >= longest)]

    def replay_all(self) -> None:
        """Replay every step once, on its current input."""
        for recorded in dict.fromkeys(self._steps.values()):
            recorded.replay()
