"""Starts programs of this package in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

from paged_sdk.errors import EngineError

__all__ = ["Child", "start_program"]

Child: TypeAlias = "subprocess.Popen[bytes]"


def start_program(module: str, *arguments: str, what: str, files: Sequence[int] = (), **options: Any) -> Child:
    """Start a process that calls a module's ``main``, and imports what this process can.

    The interpreter gets a program of its own and not the application's script, which so needs no guard against being
    run again.

    :param arguments: those of ``main``
    :param what: names the process in the error
    :param files: descriptors that the process inherits, and no others beside its standard streams
    :param options: ``subprocess.Popen``'s
    :raises EngineError: the system gives this process no more of them
    """
    end = 1 + len(arguments)
    program = f"import sys; sys.path[:] = sys.argv[{end}:]; from {module} import main; main(*sys.argv[1:{end}])"
    command = [sys.executable, "-c", program, *arguments, *sys.path]
    try:
        return subprocess.Popen(command, pass_fds=files, **options)
    except (OSError, MemoryError) as error:
        raise EngineError(f"the process of {what} cannot be started: {error}") from error
