"""Starts child processes that run programs of this package and end with their parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from paged_sdk.errors import EngineError

__all__ = ["Child", "end_with_parent", "how_it_ended", "ignore_signals", "start_program"]

Child: TypeAlias = "subprocess.Popen[bytes]"

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, *(() if sys.platform == "win32" else (signal.SIGHUP,)))
"""Signals that a terminal (Ctrl-C, or when closed) or a supervisor sends to all processes of a program."""
_LOOK_MILLISECONDS: Final = 1000


def start_program(module: str, *arguments: str, what: str, files: Sequence[int] = (), **options: Any) -> Child:
    """Start a process that calls a module's ``main``, with this process's ``sys.path``.

    The child does not run the application's script, which therefore needs no ``__main__`` guard. From its start on it
    ignores Ctrl-C, SIGTERM and SIGHUP: it may have requests to finish, and is ended by other means. Standard streams
    that this process lacks, as under some services, are ``/dev/null``.

    :param arguments: arguments of ``main``
    :param what: name of the process in the error
    :param files: file descriptors to inherit; no others are inherited besides the standard streams
    :param options: options of ``subprocess.Popen``
    :raises EngineError: the process cannot be started
    """
    end = 1 + len(arguments)
    program = (
        f"import sys; sys.path[:] = sys.argv[{end}:]; from {__name__} import ignore_signals; ignore_signals(); "
        f"from {module} import main; main(*sys.argv[1:{end}])"
    )
    command = [sys.executable, "-c", program, *arguments, *sys.path]
    try:
        with _signals_held_back():
            return subprocess.Popen(command, pass_fds=files, **_empty_streams() | options)
    except (OSError, MemoryError) as error:
        raise EngineError(f"the process of {what} cannot be started: {error}") from error


def _empty_streams() -> dict[str, Any]:
    """Return ``subprocess.Popen``'s options for standard streams that a child would not inherit: the descriptor is
    closed, or belongs to another file, which Python marks as not inheritable.
    """
    return {
        name: subprocess.DEVNULL
        for number, name in enumerate(("stdin", "stdout", "stderr"))
        if not _is_inheritable(number)
    }


def _is_inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # closed
        return False


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Block the signals in processes that this thread starts within the block, until they ignore them: importing this
    module takes a child one second.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore Ctrl-C, SIGTERM and SIGHUP, including those that :func:`start_program` has blocked until now."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def end_with_parent(status: int, *, pipe: int | None = None, tidy_up: Callable[[], object] = lambda: None) -> None:
    """End this process when its parent ends, whatever this process is waiting for.

    :param status: exit status
    :param pipe: a pipe from the parent: this process also ends when it is closed. This alone would not suffice, since a
        forked child of the parent may hold the pipe open
    :param tidy_up: called first, for clean-up that a killed parent could not do
    """
    parent, ends = os.getppid(), select.poll()
    if pipe is not None:
        ends.register(pipe, 0)  # reports only that the pipe is closed: its messages are read elsewhere

    def watch() -> None:
        while os.getppid() == parent and not ends.poll(_LOOK_MILLISECONDS):
            pass
        tidy_up()
        os._exit(status)

    threading.Thread(target=watch, daemon=True).start()


def how_it_ended(status: int | None) -> str:
    """Describe a ``subprocess`` return code: the signal or the status."""
    return f"signal {-status}" if status is not None and status < 0 else f"status {status}"
