"""Shows a progress bar while a model loads, on a terminal only."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["LoadingBar"]


class LoadingBar:
    """Shows a bar while its context is open; :meth:`update` moves it. Without a terminal nothing is shown.

    :param title: the text before the bar
    """

    def __init__(self, title: str, *, visible: bool) -> None:
        self._progress = _progress() if visible else None
        self._task = None if self._progress is None else self._progress.add_task(title, total=None)

    def update(self, done: int, total: int) -> None:
        """Move the bar to ``done`` loaded tensors of ``total``."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> LoadingBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def _progress() -> Progress:
    # Imported here: importing takes 40 ms, and most starts show no bar.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(file=sys.stderr)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
