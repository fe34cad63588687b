"""Render chat templates in a process of their own, which may be killed: the program that :mod:`paged_sdk.chat.renderer`
starts.

It reads requests from standard input and answers on standard output, one at a time, until its input ends. A message is
its length in eight bytes and that many bytes: of a request JSON, of an answer a letter and text in UTF-8.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from contextlib import suppress
from types import CodeType
from typing import Any

from jinja2 import Template

from paged_sdk.chat.sandbox import RenderLimits, TemplateEnvironment, TemplateRefusalError

__all__ = ["FAILED", "LENGTH_BYTES", "OUT_OF_MEMORY", "REFUSED", "RENDERED", "main"]

LENGTH_BYTES = 8
RENDERED, REFUSED, FAILED, OUT_OF_MEMORY = "=", "!", "?", "M"
"""Begin an answer, which goes on with the text, with the template's own message, or with what went wrong."""

_IN, _OUT = 0, 1
_GRACE_SECONDS = 1.0
"""The parent kills first. If it cannot any more, the process ends itself so much later."""
_LOOK_AT_PARENT_SECONDS = 1.0
"""A process that the parent forked may hold the other end of standard input open when the parent is gone."""


def main(arguments: list[str]) -> None:
    """Serve the process that has started this one.

    :param arguments: the parent's process id, and the limits: characters, seconds, bytes
    """
    parent, max_chars, max_bytes = int(arguments[0]), int(arguments[1]), int(arguments[3])
    limits = RenderLimits(max_chars=max_chars, max_seconds=float(arguments[2]), max_bytes=max_bytes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory(max_bytes)
    renderer = _Renderer(limits)
    _write(b"")
    while (request := _read_message(parent)) is not None:
        with _Alarm(limits.max_seconds + _GRACE_SECONDS):
            answer = renderer.answer(request)
        _write(answer.encode("utf-8", "surrogatepass"))


class _Renderer:
    """Renders templates, and keeps the last one compiled."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._source: str | None = None
        self._code: CodeType | None = None

    def answer(self, request: bytes) -> str:
        try:
            content = json.loads(request)
            code = self._compiled(content["source"])
            return RENDERED + ("" if content["variables"] is None else self._render(code, content["variables"]))
        except TemplateRefusalError as exc:
            return REFUSED + str(exc)
        except MemoryError:
            return OUT_OF_MEMORY
        except Exception as exc:  # a stranger's program may fail in any way
            return f"{FAILED}{type(exc).__name__}: {exc}"

    def _compiled(self, source: str) -> CodeType:
        if self._code is None or source != self._source:
            self._code = TemplateEnvironment(self._limits).compile_with_limits(source)
            self._source = source
        return self._code

    def _render(self, code: CodeType, variables: dict[str, Any]) -> str:
        environment = TemplateEnvironment(self._limits)
        template = Template.from_code(environment, code, environment.make_globals(None))
        pieces = []
        size = 0
        for piece in template.generate(**variables):
            size += len(piece)
            environment.check_size(size)
            pieces.append(piece)
        return "".join(pieces)


class _Alarm:
    """Ends the process after some time, wherever it is then; not on Windows, where only the parent does."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *error: object) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory(max_bytes: int) -> None:
    """Limit the process's address space; macOS takes the limit and does not apply it, Windows has none."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))


def _read_message(parent: int) -> bytes | None:
    """Return the next message; None when there will be none."""
    while sys.platform != "win32":
        if select.select([_IN], [], [], _LOOK_AT_PARENT_SECONDS)[0]:
            break
        if os.getppid() != parent:
            return None
    header = _read(LENGTH_BYTES)
    return None if header is None else _read(int.from_bytes(header, "big"))


def _read(size: int) -> bytes | None:
    pieces = []
    while size:
        piece = os.read(_IN, min(size, 1 << 20))
        if not piece:
            return None
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _write(message: bytes) -> None:
    view = memoryview(len(message).to_bytes(LENGTH_BYTES, "big") + message)
    while view:
        view = view[os.write(_OUT, view) :]
