"""Writes the model's text to stdout, and everything else to stderr."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType

import typer
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from paged_sdk import PagedError, Usage
from paged_sdk.cli.advice import told
from paged_sdk.cli.exit_codes import FAILED, INTERRUPTED, INVALID
from paged_sdk.cli.usage_error import UsageError

__all__ = ["Progress", "Terminal", "usage_line"]


class Terminal:
    """Writes to the terminal and reads from it.

    :param quiet: whether to leave out notes
    :param spellings: of the command's options, by names of their settings, which errors name
    """

    def __init__(self, *, quiet: bool, spellings: Mapping[str, str] = MappingProxyType({})) -> None:
        self._quiet = quiet
        self._spellings = spellings
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._in_line = False
        self._in_thought = False
        self._log: logging.Logger | None = None

    def log_as_json(self) -> None:
        """Write notes, replies and errors as the server's log lines in JSON from now on, and all other log lines of the
        process, too. Idempotent. Without what the server needs, nothing changes, and the command says what is missing.
        """
        try:
            from paged_sdk.server import log_as_json
            from paged_sdk.server.errors import LOGGER_NAME
        except ImportError:
            return
        if self._log is None:
            log_as_json()
            self._log = logging.getLogger(LOGGER_NAME)

    def text(self, text: str) -> None:
        """Print a piece of the model's text, and flush."""
        if text:
            self._end_thought()
            sys.stdout.write(text)
            sys.stdout.flush()
            self._in_line = not text.endswith("\n")

    def thought(self, text: str) -> None:
        """Print a piece of the model's reasoning to stderr."""
        if text and not self._quiet:
            self._console.print(text, style="dim", end="")
            self._in_thought = True

    def end_line(self) -> None:
        """Start a new line, unless at the start of one."""
        if self._in_line:
            self.text("\n")
        self._end_thought()

    def _end_thought(self) -> None:
        if self._in_thought:
            self._in_thought = False
            self._console.print()

    def note(self, text: str) -> None:
        """Print information to stderr, unless quiet."""
        if not self._quiet:
            self.reply(text)

    def reply(self, text: str) -> None:
        """Print information that the user requested to stderr, even if quiet."""
        if self._log is not None:
            self._log.info("%s", text)
            return
        self._console.print(text, style="dim")

    def error(self, text: str, *, cause: BaseException | None = None, kind: str | None = None) -> None:
        """Print an error in one line.

        :param cause: exception whose traceback is shown too; None: no traceback
        :param kind: the name of the error's class, for log lines; None: they have none
        """
        line = " ".join(text.split())
        if self._log is not None:
            self._log.error("%s", line, exc_info=cause, extra={"fields": {} if kind is None else {"error": kind}})
            return
        if cause is not None:
            traceback.print_exception(cause)
        self._console.print(f"error: {line}", style="red")

    def told(self, error: PagedError) -> str:
        """Return what to tell of an error."""
        return told(error, self._spellings)

    def read_line(self) -> str:
        """Read the next line that the user types.

        :raises EOFError: stdin has ended
        :raises typer.BadParameter: stdin is not valid text
        """
        if not sys.stdin.isatty():
            try:
                return input()
            except UnicodeDecodeError as error:
                raise typer.BadParameter(f"stdin is not valid text in {error.encoding}") from None
        with suppress(ImportError):  # missing on Windows, whose terminal edits lines itself
            import readline  # noqa: F401  (importing it gives input() line editing and history)
        if sys.stdout.isatty():
            return input("> ")
        self._console.print("> ", end="")
        return input()

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Show that a model is being loaded. Within this context, Ctrl-C and SIGTERM end the process at once: loading
        runs in threads that cannot be interrupted, and leaves nothing to clean up.
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
        """Show a progress bar, if stderr is a terminal.

        :param total: number of parts of the work
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
        """Turn exceptions into an error line and an exit code.

        :param verbose: whether to show tracebacks
        :raises typer.Exit: instead of a PagedError or a KeyboardInterrupt, and of any other error if output goes to a
            logger
        """
        try:
            yield
        except PagedError as error:
            self.error(self.told(error), cause=error if verbose else None, kind=type(error).__name__)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (typer.Exit, typer.Abort):
            raise
        except UsageError as error:
            if self._log is None:
                raise
            cause = error.__cause__
            kind = type(cause if isinstance(cause, PagedError) else error).__name__
            self.error(error.format_message(), cause=cause if verbose else None, kind=kind)
            raise typer.Exit(INVALID) from None
        except Exception as error:  # a bug: its report needs the traceback
            if self._log is None:
                raise
            self.error(f"{type(error).__name__}: {error}", cause=error, kind=type(error).__name__)
            raise typer.Exit(FAILED) from None


class Progress:
    """Advances a progress bar."""

    def __init__(self, bar: Bar, task: TaskID) -> None:
        self._bar = bar
        self._task = task

    def begin(self, text: str) -> None:
        """Show what is being done."""
        self._bar.update(self._task, description=text)

    def advance(self, parts: int = 1) -> None:
        """Count finished parts."""
        self._bar.advance(self._task, parts)


def usage_line(usage: Usage) -> str:
    """Return an answer's usage and speed as one line."""
    line = (
        f"{usage.completion_tokens} tokens, {usage.avg_compl_tok_per_sec:.1f} tok/s, "
        f"first token after {usage.time_to_first_token_sec:.2f} s"
    )
    return f"{line}, {usage.prompt_tokens_details.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
