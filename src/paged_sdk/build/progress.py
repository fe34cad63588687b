"""Shows a progress bar while a model loads, on a terminal only."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["LoadingBar"]


class LoadingBar:
    """Shows a bar while its context is open; :meth:`update` moves it. Without a terminal nothing is shown.

    :param title: the text before the bar
    """

    def __init__(self, title: str, *, visible: bool) -> None:
        console = Console(file=sys.stderr)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not (visible and console.is_terminal),
        )
        self._task = self._progress.add_task(title, total=None)

    def update(self, done: int, total: int) -> None:
        """Move the bar to ``done`` loaded tensors of ``total``."""
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> LoadingBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
