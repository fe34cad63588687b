"""Have chat templates rendered by processes that can be killed."""

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
from paged_sdk.chat.render_process import FAILED, LENGTH_BYTES, OUT_OF_MEMORY, REFUSED
from paged_sdk.chat.sandbox import RenderLimits, TemplateRefusalError
from paged_sdk.config.env import interpreter_variables
from paged_sdk.system.owner import Owner

__all__ = ["Interruption", "RenderError", "Renderer"]

_MAX_PROCESSES = 2
"""One may be busy with a template that does not end while the other serves everybody else."""
_START_SECONDS = 10.0
_GRACE_SECONDS = 0.25
"""The process looks at the clock itself where it can, and says so; then it is killed."""
_PROGRAM = "import sys; sys.path += sys.argv[5:]; from paged_sdk.chat.render_process import main; main(sys.argv[1:5])"
_PACKAGES = (paged_sdk, jinja2, markupsafe, attr)


class RenderError(Exception):
    """Says why a template could not be rendered."""


class Interruption:
    """Ends a rendering from another thread, once for all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._action: Callable[[], None] | None = None

    @property
    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """End the rendering that is under way, and any that would begin."""
        with self._lock:
            self._is_set = True
            if self._action is not None:
                self._action()

    def do(self, action: Callable[[], None] | None) -> None:
        """Say how to end what is under way now; None when nothing is.

        :raises RenderError: it is to end already
        """
        with self._lock:
            self._action = action
            if self._is_set and action is not None:
                self._action = None
                raise RenderError("the request has ended")


class Renderer:
    """Renders any template, within limits that are kept from outside, from any thread.

    Two processes at most serve at a time; they are started when they are needed, kept for the next rendering, and end
    with this object or with the program. One that meets a limit is killed.

    :param limits: how far one rendering may go
    """

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._crew = _Crew()

    def check(self, source: str) -> None:
        """Compile a template only.

        :raises RenderError: it is none, or it meets a limit
        """
        self._ask({"source": source, "variables": None}, Interruption())

    def render(self, source: str, variables: Mapping[str, Any], interruption: Interruption) -> str:
        """Render a template.

        :param variables: plain data
        :raises TemplateRefusalError: the template says so
        :raises RenderError: it fails, meets a limit, or is interrupted
        """
        return self._ask({"source": source, "variables": variables}, interruption)

    def close(self) -> None:
        """End the processes, those that are rendering with what they render. Another rendering would have one of its
        own.
        """
        self._crew.close()

    def _ask(self, content: Mapping[str, Any], interruption: Interruption) -> str:
        request = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
        if not self._crew.owner.is_here:  # forked: the processes answer the parent, and its locks may be held for ever
            self._crew = _Crew()
        crew = self._crew
        process = crew.take(self._limits, interruption)
        start = time.monotonic()
        try:
            interruption.do(process.kill)
            try:
                answer = process.ask(request, self._limits.max_seconds + _GRACE_SECONDS)
            finally:
                interruption.do(None)
        finally:
            crew.give_back(process)
        if answer is None and interruption.is_set:
            raise RenderError("the request has ended")
        if answer is None and time.monotonic() - start > self._limits.max_seconds:
            raise RenderError(f"rendering takes longer than {self._limits.max_seconds:g} seconds")
        if answer is None:
            raise RenderError("the process that renders it has ended, as it may when memory runs out")
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


class _Crew:
    """Lends processes to threads."""

    def __init__(self) -> None:
        self.owner = Owner()
        self._changed = threading.Condition()
        self._idle: list[_Process] = []
        self._num_lent = 0
        self._is_closed = False

    def take(self, limits: RenderLimits, interruption: Interruption) -> _Process:
        """Return an idle process, or a new one; wait for one as long as a rendering may take.

        :raises RenderError: none is free or can be started, or the rendering is interrupted
        """
        interruption.do(self._wake)
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
    """Runs one process, which renders one template at a time."""

    def __init__(self, limits: RenderLimits) -> None:
        if not sys.executable or getattr(sys, "frozen", False):
            raise RenderError("it needs a process of its own, and this program has no Python interpreter to start")
        arguments = (os.getpid(), limits.max_chars, limits.max_seconds, limits.max_bytes)
        try:
            self._popen = subprocess.Popen(
                # Isolated: neither the directory the program runs in nor the user's own packages are looked into.
                [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, arguments), *_package_roots()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env=interpreter_variables(),
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except (OSError, MemoryError) as exc:
            raise RenderError(f"the process that is to render it cannot be started: {exc}") from exc
        # Garbage collection and the end of the program end the process, too.
        self._finalizer = weakref.finalize(self, _end, self._popen, Owner())
        self._is_killed = False
        if self._within(_START_SECONDS, self._receive) is None:
            self._finalizer()
            raise RenderError("the process that is to render it does not start")

    @property
    def is_alive(self) -> bool:
        # The system may take a while to end what was killed: nobody is to get it meanwhile.
        return self._finalizer.alive and not self._is_killed and self._popen.poll() is None

    def ask(self, request: bytes, seconds: float) -> str | None:
        """Return the answer to a request, or None if the process has ended: after that time it is killed."""

        def exchange() -> bytes | None:
            try:
                self._send(request)
            except OSError:
                return None
            return self._receive()

        answer = self._within(seconds, exchange)
        text = None if answer is None else answer.decode("utf-8", "surrogatepass")
        if text is None or text.startswith(OUT_OF_MEMORY):  # its heap would fail the next one, too
            self._finalizer()
        return text

    def kill(self) -> None:
        """End it, from any thread; who waits for its answer gets none."""
        self._is_killed = True
        self._popen.kill()

    def end(self) -> None:
        self._finalizer()

    def _within(self, seconds: float, exchange: Callable[[], bytes | None]) -> bytes | None:
        """Run an exchange, and kill the process when it takes too long: that ends any wait, on every platform."""
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError as exc:
            self._finalizer()
            raise RenderError(f"no thread can be started to watch over it: {exc}") from exc
        try:
            return exchange()
        except BaseException:
            self._finalizer()  # an answer that nobody has read would be taken for the next one
            raise
        finally:
            timer.cancel()

    def _send(self, message: bytes) -> None:
        assert self._popen.stdin is not None
        view = memoryview(len(message).to_bytes(LENGTH_BYTES, "big") + message)
        while view:
            view = view[self._popen.stdin.write(view) :]

    def _receive(self) -> bytes | None:
        header = self._read(LENGTH_BYTES)
        return None if header is None else self._read(int.from_bytes(header, "big"))

    def _read(self, size: int) -> bytes | None:
        assert self._popen.stdout is not None
        pieces = []
        while size:
            piece = self._popen.stdout.read(min(size, 1 << 20))
            if not piece:
                return None
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)


def _end(process: subprocess.Popen[bytes], owner: Owner) -> None:
    """End a process and forget it; in a forked child of its owner only forget it."""
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
    """Return the directories that hold what the process imports."""
    return list(dict.fromkeys(_root(package) for package in _PACKAGES))


def _root(package: ModuleType) -> str:
    assert package.__file__ is not None
    return str(Path(package.__file__).resolve().parents[1])
