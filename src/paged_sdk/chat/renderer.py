"""Render chat templates in helper processes, which can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import attr
import jinja2
import markupsafe

import paged_sdk
from paged_sdk.chat.framing import read_message, write_message
from paged_sdk.chat.render_process import FAILED, OUT_OF_MEMORY, REFUSED
from paged_sdk.chat.sandbox import RenderLimits, TemplateRefusalError
from paged_sdk.config.env import interpreter_variables
from paged_sdk.system.owner import Owner

__all__ = ["Interruption", "RenderError", "Renderer"]

_MAX_PROCESSES = 2
"""Two, so that one still serves other requests while a template that does not end occupies the other."""
_START_SECONDS = 10.0
_GRACE_SECONDS = 0.25
"""The process checks the time limit itself and reports it where it can; it is killed this much later."""
_PROGRAM = "import sys; sys.path += sys.argv[5:]; from paged_sdk.chat.render_process import main; main(sys.argv[1:5])"
_PACKAGES = (paged_sdk, jinja2, markupsafe, attr)


class RenderError(Exception):
    """Says why a template could not be rendered."""


class Interruption:
    """Lets another thread end a rendering, permanently."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._action: Callable[[], None] | None = None

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """End the current rendering, and refuse later ones."""
        with self._lock:
            self._is_set = True
            if self._action is not None:
                self._action()

    def set_action(self, action: Callable[[], None] | None) -> None:
        """Set the action that ends the current wait or rendering; None if there is none.

        :raises RenderError: :meth:`set` has been called already
        """
        with self._lock:
            self._action = action
            if self._is_set and action is not None:
                self._action = None
                raise RenderError("the request has ended")


class Renderer:
    """Renders any template, within limits that are enforced from outside. Thread-safe.

    At most two processes run at a time. They are started on demand, reused, and end with this object or with the
    program. A process that exceeds a limit is killed.

    :param limits: the limits of one rendering
    """

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._pool = _ProcessPool()

    def check(self, source: str) -> None:
        """Check that a template compiles.

        :raises RenderError: it does not, or exceeds a limit
        """
        self._ask({"source": source, "variables": None}, Interruption())

    def render(self, source: str, variables: Mapping[str, Any], interruption: Interruption) -> str:
        """Render a template.

        :param variables: plain data
        :raises TemplateRefusalError: the template calls ``raise_exception``
        :raises RenderError: rendering fails, exceeds a limit, or is interrupted
        """
        return self._ask({"source": source, "variables": variables}, interruption)

    def close(self) -> None:
        """End idle processes at once, and the others after their current rendering. A later rendering starts a process
        of its own.
        """
        self._pool.close()

    def _ask(self, content: Mapping[str, Any], interruption: Interruption) -> str:
        request = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
        if not self._pool.owner.is_here:  # forked: these processes and locks are the parent's
            self._pool = _ProcessPool()
        pool = self._pool
        process = pool.take(self._limits, interruption)
        start = time.monotonic()
        try:
            interruption.set_action(process.kill)
            try:
                answer = process.ask(request, self._limits.max_seconds + _GRACE_SECONDS)
            finally:
                interruption.set_action(None)
        finally:
            pool.give_back(process)
        if answer is None and interruption.is_set:
            raise RenderError("the request has ended")
        if answer is None and time.monotonic() - start > self._limits.max_seconds:
            raise RenderError(f"rendering takes longer than {self._limits.max_seconds:g} seconds")
        if answer is None:
            raise RenderError("the process that renders templates has ended, possibly because memory ran out")
        return self._text_of(answer)

    def _text_of(self, answer: str) -> str:
        kind, text = answer[:1], answer[1:]
        if kind == REFUSED:
            raise TemplateRefusalError(text)
        if kind == OUT_OF_MEMORY:
            raise RenderError(f"rendering takes more than {self._limits.max_bytes >> 20} MiB of memory")
        if kind == FAILED:
            raise RenderError(text)
        return text


class _ProcessPool:
    """Manages a pool of helper processes, and lends each to one thread at a time."""

    def __init__(self) -> None:
        self.owner = Owner()
        self._changed = threading.Condition()
        self._idle: list[_Process] = []
        self._num_lent = 0
        self._is_closed = False

    def take(self, limits: RenderLimits, interruption: Interruption) -> _Process:
        """Return an idle process or a new one; if all are busy, wait for at most the time limit of a rendering.

        :raises RenderError: no process becomes free or can be started, or the rendering is interrupted
        """
        interruption.set_action(self._wake)
        with self._changed:
            is_free = self._changed.wait_for(
                lambda: interruption.is_set or self._num_lent < _MAX_PROCESSES, limits.max_seconds
            )
            if interruption.is_set or not is_free:
                raise RenderError("the request has ended" if interruption.is_set else "other renderings take too long")
            self._num_lent += 1
            while self._idle:
                if (process := self._idle.pop()).is_alive:
                    return process
        try:
            return _Process(limits)
        except BaseException:
            self._end_loan(None)
            raise

    def give_back(self, process: _Process) -> None:
        self._end_loan(process if process.is_alive else None)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _end_loan(self, process: _Process | None) -> None:
        with self._changed:
            self._num_lent -= 1
            is_kept = process is not None and not self._is_closed
            if process is not None and is_kept:
                self._idle.append(process)
            self._changed.notify()
        if process is not None and not is_kept:
            process.end()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class _Process:
    """Runs one helper process, which renders one template at a time."""

    def __init__(self, limits: RenderLimits) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise RenderError(
                "rendering it needs a helper process, and this program has no Python interpreter to start one"
            )
        arguments = (os.getpid(), limits.max_chars, limits.max_seconds, limits.max_bytes)
        try:
            self._popen = subprocess.Popen(
                # Isolated (-I): neither the working directory nor the user's site-packages are searched.
                [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, arguments), *_package_roots()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=interpreter_variables(),
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except (OSError, MemoryError) as exc:
            raise RenderError(f"the process that renders templates cannot be started: {exc}") from exc
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._input, self._output = self._popen.stdin, self._popen.stdout
        # Garbage collection of this object and the end of the program also end the process.
        self._finalizer = weakref.finalize(self, _end, self._popen, Owner())
        self._is_killed = False
        if self._within(_START_SECONDS, self._receive) is None:
            self._finalizer()
            raise RenderError("the process that renders templates has failed to start")

    @property
    def is_alive(self) -> bool:
        # A killed process may take a while to exit. It must not be lent meanwhile.
        return self._finalizer.alive and not self._is_killed and self._popen.poll() is None

    def ask(self, request: bytes, seconds: float) -> str | None:
        """Return the answer to a request, or None if the process has ended. It is killed after ``seconds``."""

        def exchange() -> bytes | None:
            try:
                write_message(self._input.write, request)
            except OSError:
                return None
            return self._receive()

        answer = self._within(seconds, exchange)
        text = None if answer is None else answer.decode("utf-8", "surrogatepass")
        if text is None or text.startswith(OUT_OF_MEMORY):  # it would stay out of memory
            self._finalizer()
        return text

    def kill(self) -> None:
        """Kill the process, from any thread; :meth:`ask` then returns None."""
        self._is_killed = True
        self._popen.kill()

    def end(self) -> None:
        self._finalizer()

    def _within(self, seconds: float, exchange: Callable[[], bytes | None]) -> bytes | None:
        """Run an exchange, and kill the process if that takes too long, which ends any wait on every platform."""
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as exc:
            self._finalizer()
            raise RenderError(f"no thread can be started to limit the time of rendering: {exc}") from exc
        try:
            return exchange()
        except BaseException:
            self._finalizer()  # an answer left unread would be taken for the next one
            raise
        finally:
            timer.cancel()

    def _receive(self) -> bytes | None:
        return read_message(self._output.read)


def _end(process: subprocess.Popen[bytes], owner: Owner) -> None:
    """Kill a process and close its pipes; in a forked child of its owner, only close the pipes."""
    if owner.is_here:
        process.kill()
        with suppress(OSError, subprocess.TimeoutExpired):
            process.wait(timeout=_START_SECONDS)
    else:
        process.returncode = 0
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _package_roots() -> list[str]:
    """Return the directories of the packages that the process imports."""
    return list(dict.fromkeys(_root(package) for package in _PACKAGES))


def _root(package: ModuleType) -> str:
    assert package.__file__ is not None
    return str(Path(package.__file__).resolve().parents[1])
