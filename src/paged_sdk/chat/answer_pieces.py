"""Collect what an answer consists of, while it is read."""

from __future__ import annotations

import json
from typing import Any

from attrs import Factory, define, frozen

__all__ = ["AnswerPiece", "AnswerPieces", "Call"]


@frozen
class Call:
    """Holds a call of a tool, as a model has written it.

    :ivar arguments: JSON text of an object
    """

    name: str
    arguments: str

    @classmethod
    def of(cls, name: str, arguments: dict[str, Any]) -> Call:
        """Make a call of arguments that JSON can hold."""
        return cls(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


@define
class AnswerPiece:
    """Holds what has become known of an answer since the last piece."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = Factory(list)

    def __add__(self, later: AnswerPiece) -> AnswerPiece:
        return AnswerPiece(self.content + later.content, self.reasoning + later.reasoning, self.calls + later.calls)


class AnswerPieces:
    """Sorts what is read of an answer, and leaves out white space around thoughts and calls, but for that between the
    content before a call and more content.

    White space at the end of what is known so far waits for what follows.
    """

    def __init__(self) -> None:
        self._content = _Trimmed(trims=False)
        self._reasoning = _Trimmed(trims=True)
        self._piece = AnswerPiece()

    @property
    def has_content(self) -> bool:
        """Tell whether anything but white space was content."""
        return self._content.has_begun

    def content(self, text: str) -> None:
        """Add to the content."""
        self._piece.content += self._content.push(text)

    def reasoning(self, text: str) -> None:
        """Add to the thoughts."""
        self._piece.reasoning += self._reasoning.push(text)

    def end_reasoning(self) -> None:
        """Say that content follows."""
        self._content.trim()

    def call(self, call: Call) -> None:
        """Add a call."""
        self._content.trim()
        self._piece.calls.append(call)

    def end(self) -> None:
        """Add what has waited."""
        self._piece.content += self._content.flush()

    def take(self) -> AnswerPiece:
        """Return what has been added since the last time."""
        piece, self._piece = self._piece, AnswerPiece()
        return piece


class _Trimmed:
    """Holds back the white space at the end of a text.

    :param trims: whether that before its first character goes
    """

    __slots__ = ("_held", "_trims", "has_begun")

    def __init__(self, *, trims: bool) -> None:
        self._held = ""
        self._trims = trims
        self.has_begun: bool = False

    def push(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            self._held += text
            return ""
        shown = self._held + body
        self._held = text[len(body) :]
        self._trims = False
        self.has_begun = True
        return shown

    def trim(self) -> None:
        """Drop the white space that follows, and what is held if nothing else does."""
        self._trims = True

    def flush(self) -> str:
        held, self._held = self._held, ""
        return "" if self._trims else held
