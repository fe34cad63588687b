"""Has the other ranks of a model compute it in step with this process, the first of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from paged_sdk.errors import EngineError
from paged_sdk.kernels.step import InsertedRows
from paged_sdk.parallel.group import Group
from paged_sdk.parallel.messages import END, WAY, StepWriter
from paged_sdk.system.owner import Owner
from paged_sdk.types.step import Step

__all__ = ["Followers", "Ranks"]

_END_SECONDS: Final = 5.0

GoOn = Callable[[], None]


class Ranks(Protocol):
    """Stands for how the other ranks were started, and for how they end.

    :ivar group: all ranks, of which this process is the first
    """

    group: Group

    def check(self) -> None:
        """Look whether the others can still load their parts; not to be asked once they are connected.

        :raises ModelLoadError: one of them cannot
        """
        ...

    def join(self, go_on: GoOn) -> None:
        """Wait until all have loaded their parts, and connect to them.

        :param go_on: called from time to time; what it raises ends the waiting
        :raises ModelLoadError: one of them cannot load its part
        """
        ...

    def end(self, seconds: float, error: BaseException | None) -> None:
        """Let the others end, or make them.

        :param seconds: how long they may take to end by themselves; 0: they have not been told to
        :param error: what has ended this process's part; None: nothing has
        """
        ...


class Followers:
    """Sends what is to be computed to the other ranks, however they were started.

    A follower ends when it is told so, when its connections to the others break, and when this process ends, however
    that may be.

    :ivar group: all ranks, of which this process is the first
    """

    def __init__(self, ranks: Ranks) -> None:
        self.group: Group = ranks.group
        self._ranks = ranks
        self._writer = StepWriter()
        self._owner = Owner()
        self._is_open = True

    def watched(self, go_on: GoOn) -> GoOn:
        """Return what to call while this rank loads its part and sets it up, which raises if another has ended: a
        ModelLoadError while that loads its own part, and an EngineDeadError from then on.
        """

        def going_on() -> None:
            if self.group.is_joined:
                self.group.check()
            else:
                self._ranks.check()
            go_on()

        return going_on

    def join(self, go_on: GoOn) -> None:
        """Wait until all have loaded their parts, and connect to them.

        :param go_on: called from time to time; what it raises ends the waiting
        :raises ModelLoadError: one of them cannot load its part
        """
        self._ranks.join(go_on)

    def run(self, step: Step, inserted: InsertedRows | None) -> None:
        """Have the others begin a step, which this process must compute, too.

        :param inserted: what takes the place of its tokens' embeddings
        :raises EngineDeadError: one of them has ended
        """
        self.group.tell(self._writer.message(step, inserted))

    def choose(self, way: str) -> None:
        """Have the others run the next step another way than one operation at a time."""
        self.group.tell((WAY, way))

    def check(self) -> None:
        """Look whether all that the others had to compute since is whole.

        :raises EngineDeadError: one of them has ended
        """
        self.group.check()

    def close(self, error: BaseException | None = None) -> None:
        """Have the others end; a second call does nothing, and neither does one in a forked child.

        :param error: what has ended this process's part; None: nothing has
        """
        if not self._is_open or not self._owner.is_here:
            return
        self._is_open = False
        seconds = 0.0
        if error is None and self.group.is_joined:
            with suppress(EngineError):
                self.group.tell((END,))
                seconds = _END_SECONDS
        self._ranks.end(seconds, error)
        self.group.end()
        self.group.leave()
