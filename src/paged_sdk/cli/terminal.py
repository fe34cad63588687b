"""Show the person at the terminal the model's text on stdout, and everything else on stderr."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from paged_sdk import PagedError, Usage

__all__ = ["Progress", "Terminal", "usage_line"]

FAILED = 1
INTERRUPTED = 128 + signal.SIGINT
"""What a shell reports."""


class Terminal:
    """Writes to the terminal and reads from it.

    :param quiet: whether to leave out notes
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._in_line = False
        self._in_thought = False
        self._log: logging.Logger | None = None

    def log_to(self, logger: logging.Logger) -> None:
        """Have what would be a line beside the text, errors too, be one of the log from now on."""
        self._log = logger

    def text(self, text: str) -> None:
        """Print a piece of the model's text at once."""
        if text:
            self._end_thought()
            sys.stdout.write(text)
            sys.stdout.flush()
            self._in_line = not text.endswith("\n")

    def thought(self, text: str) -> None:
        """Print a piece of what the model thinks, beside the text."""
        if text and not self._quiet:
            self._console.print(text, style="dim", end="")
            self._in_thought = True

    def end_line(self) -> None:
        """Make what comes next begin a line of its own."""
        if self._in_line:
            self.text("\n")
        self._end_thought()

    def _end_thought(self) -> None:
        if self._in_thought:
            self._in_thought = False
            self._console.print()

    def note(self, text: str) -> None:
        """Print something beside the text that nobody requested."""
        if not self._quiet:
            self.reply(text)

    def reply(self, text: str) -> None:
        """Print something beside the text that the person requested."""
        if self._log is not None:
            self._log.info("%s", text)
            return
        self._console.print(text, style="dim")

    def error(self, text: str, *, cause: BaseException | None = None) -> None:
        """Print what went wrong, in one line.

        :param cause: whose traceback to show, too; None: none
        """
        line = " ".join(text.split())
        if self._log is not None:
            self._log.error("%s", line, exc_info=cause)
            return
        if cause is not None:
            traceback.print_exception(cause)
        self._console.print(f"error: {line}", style="red")

    def read_line(self) -> str:
        """Return what the person types next.

        :raises EOFError: nothing more will come
        :raises typer.BadParameter: what is piped in is no text
        """
        if not sys.stdin.isatty():
            try:
                return input()
            except UnicodeDecodeError as error:
                raise typer.BadParameter(f"what is piped in is no text in {error.encoding}") from None
        with suppress(ImportError):  # not on Windows, whose terminal does it itself
            import readline  # noqa: F401  (being imported, it lets input() edit its line and recall earlier ones)
        if sys.stdout.isatty():
            return input("> ")
        self._console.print("> ", end="")
        return input()

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Show that a model is being loaded. Ctrl-C and SIGTERM then end the process at once: loading happens in
        threads that cannot be interrupted, and leaves nothing to clean up.
        """

        def leave(signal_number: int, frame: object) -> None:
            self._console.show_cursor()
            os._exit(128 + signal_number)

        if self._console.is_terminal:
            self.note(f"Loading {name} ...")
        previous = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def progress(self, total: int) -> Iterator[Progress]:
        """Show how much of some work is done, where a person sees it.

        :param total: how many parts it has
        """
        bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=self._quiet or not self._console.is_terminal,
        )
        with bar:
            yield Progress(bar, bar.add_task("", total=total))

    @contextmanager
    def reporting(self, *, verbose: bool) -> Iterator[None]:
        """Turn what ends the command into a line and an exit code.

        :param verbose: whether to show tracebacks
        """
        try:
            yield
        except PagedError as error:
            self.error(str(error), cause=error if verbose else None)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


class Progress:
    """Counts the parts of some work that are done."""

    def __init__(self, bar: Bar, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def begin(self, text: str) -> None:
        """Say what is being done."""
        self._bar.update(self._task, description=text)

    def advance(self, parts: int = 1) -> None:
        """Count parts that are done."""
        self._bar.advance(self._task, parts)


def usage_line(usage: Usage) -> str:
    """Say what an answer cost."""
    line = (
        f"{usage.completion_tokens} tokens, {usage.avg_compl_tok_per_sec:.1f} tok/s, "
        f"first token after {usage.time_to_first_token_sec:.2f} s"
    )
    return f"{line}, {usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
