"""Starts programs of this package in processes of their own, and has these end with the process that did."""

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
"""What a terminal, also as it is closed, and a supervisor send to all processes of a program."""
_LOOK_MILLISECONDS: Final = 1000


def start_program(module: str, *arguments: str, what: str, files: Sequence[int] = (), **options: Any) -> Child:
    """Start a process that calls a module's ``main``, and imports what this process can.

    The interpreter gets a program of its own and not the application's script, which so needs no guard against being
    run again. Ctrl-C, SIGTERM and SIGHUP do nothing to it, from its start on: it may have texts to finish, and it is
    told to end by other means. Standard streams that this process has not, as some services have none, are empty.

    :param arguments: those of ``main``
    :param what: names the process in the error
    :param files: descriptors that the process inherits, and no others beside its standard streams
    :param options: ``subprocess.Popen``'s
    :raises EngineError: the system gives this process no more of them
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
    """Return ``subprocess.Popen``'s options for the standard streams that a process would not inherit: they are closed,
    or something else, which Python lets no other process inherit, has their number.
    """
    return {
        name: subprocess.DEVNULL
        for number, name in enumerate(("stdin", "stdout", "stderr"))
        if not _is_inheritable(number)
    }


def _is_inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # it is closed
        return False


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Have processes that this thread starts within the block hold back the signals until they can ignore them: to
    import this module takes them a second.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore Ctrl-C, SIGTERM and SIGHUP, also those that :func:`start_program` has held back until now."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def end_with_parent(status: int, *, pipe: int | None = None, tidy_up: Callable[[], object] = lambda: None) -> None:
    """Have this process end when the one that has started it does, whatever it waits for then.

    :param status: what it ends with
    :param pipe: from the other process: when that closes it, this one ends, too. A forked child of the other may hold
        it open
    :param tidy_up: is called first; it does what the other may have been killed before
    """
    parent, ends = os.getppid(), select.poll()
    if pipe is not None:
        ends.register(pipe, 0)  # which tells of the end alone: messages are for who hears them

    def watch() -> None:
        while os.getppid() == parent and not ends.poll(_LOOK_MILLISECONDS):
            pass
        tidy_up()
        os._exit(status)

    threading.Thread(target=watch, daemon=True).start()


def how_it_ended(status: int | None) -> str:
    """Say what a process has ended with, of what ``subprocess`` knows of it."""
    return f"signal {-status}" if status is not None and status < 0 else f"status {status}"
