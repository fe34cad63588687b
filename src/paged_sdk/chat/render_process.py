"""Render chat templates in a helper process, which can be killed: the program that :mod:`paged_sdk.chat.renderer`
starts.

It reads requests from standard input and answers on standard output, one at a time, until its input ends. A request is
JSON, an answer a letter and UTF-8 text.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import Any

from jinja2 import Template

from paged_sdk.chat.framing import read_message, write_message
from paged_sdk.chat.sandbox import RenderLimits, TemplateEnvironment, TemplateRefusalError

__all__ = ["FAILED", "OUT_OF_MEMORY", "REFUSED", "RENDERED", "main"]

RENDERED, REFUSED, FAILED, OUT_OF_MEMORY = "=", "!", "?", "M"
"""The letters that answers begin with. The rendered text, the template's message or the error follows."""

_IN, _OUT = 0, 1
_GRACE_SECONDS = 1.0
"""The parent kills this process at the time limit. If the parent is gone, the process ends itself this much later."""
_LOOK_AT_PARENT_SECONDS = 1.0
"""Interval of checks that the parent still lives. The end of standard input does not always tell: another process that
the parent has forked may hold it open."""


def main(arguments: list[str]) -> None:
    """Serve the parent process.

    :param arguments: the parent's process id, and the limits: characters, seconds, bytes
    """
    parent, max_chars, max_bytes = int(arguments[0]), int(arguments[1]), int(arguments[3])
    limits = RenderLimits(max_chars=max_chars, max_seconds=float(arguments[2]), max_bytes=max_bytes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory(max_bytes)
    renderer = _Renderer(limits)
    write = partial(os.write, _OUT)
    write_message(write, b"")
    while (request := _next_request(parent)) is not None:
        with _Alarm(limits.max_seconds + _GRACE_SECONDS):
            answer = renderer.answer(request)
        write_message(write, answer.encode("utf-8", "surrogatepass"))


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
        except Exception as exc:  # an untrusted template may fail in any way
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
    """Ends the process after a time limit, whatever it is doing; not on Windows, where only the parent can end it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *error: object) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory(max_bytes: int) -> None:
    """Limit the process's address space. macOS accepts the limit without applying it; Windows has none."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    allowed = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))


def _next_request(parent: int) -> bytes | None:
    """Return the next request; None if the parent or its end of the pipe is gone."""
    while sys.platform != "win32":
        if select.select([_IN], [], [], _LOOK_AT_PARENT_SECONDS)[0]:
            break
        if os.getppid() != parent:
            return None
    return read_message(partial(os.read, _IN))
