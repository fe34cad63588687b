"""Collect what an answer consists of, while it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from attrs import Factory, define, evolve, field, frozen

__all__ = ["AnswerPiece", "AnswerPieces", "Call", "CallPart"]

_REASONING, _CONTENT, _CALLS = range(3)
"""The order in which a piece says what it holds."""


@frozen
class Call:
    """Holds a call of a tool, as a model has written it.

    :ivar arguments: JSON text of an object
    :ivar index: its place among the calls of an answer
    """

    name: str
    arguments: str
    index: int = 0

    @classmethod
    def of(cls, name: str, arguments: dict[str, Any]) -> Call:
        """Make a call of arguments that JSON can hold."""
        return cls(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


@frozen
class CallPart:
    """Holds what has become known of a call.

    :ivar index: the call's place among those of an answer
    :ivar name: the tool's; None: it is known from an earlier part
    :ivar arguments: what follows the arguments so far
    """

    index: int
    name: str | None
    arguments: str


@define
class AnswerPiece:
    """Holds what has become known of an answer since the last piece: thoughts, then content, then calls. What comes in
    another order is in several pieces.

    :ivar calls: those that have become whole
    :ivar call_parts: what there is of calls, some of which may turn out to be text
    :ivar runs: where the content stands in the answer's text: the beginning and end of each run of characters
    """

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = Factory(list)
    call_parts: list[CallPart] = field(factory=list, eq=False)
    runs: list[tuple[int, int]] = field(factory=list, eq=False)


@define
class _BegunCall:
    index: int
    name: str
    arguments: list[str] = Factory(list)


class AnswerPieces:
    """Sorts what is read of an answer, and leaves out white space around thoughts and calls, but for that between the
    content before a call and more content.

    White space at the end of what is known so far waits for what follows.
    """

    def __init__(self) -> None:
        self._content = _Trimmed(trims=False)
        self._reasoning = _Trimmed(trims=True)
        self._pieces: list[AnswerPiece] = []
        self._last_kind = _REASONING
        self._begun: list[_BegunCall] = []
        self._num_calls = 0

    @property
    def has_content(self) -> bool:
        """Tell whether anything but white space was content."""
        return self._content.has_begun

    def content(self, text: str, place: int | None) -> None:
        """Add to the content.

        :param place: where it stands in the answer's text; None: the model has not written it
        """
        self._show(self._content.push(text, place))

    def reasoning(self, text: str, place: int | None) -> None:
        """Add to the thoughts, as :meth:`content` does to the content."""
        shown = self._reasoning.push(text, place)
        if shown:
            self._piece(_REASONING).reasoning += shown

    def end_reasoning(self) -> None:
        """Say that content follows."""
        self._content.trim()

    def begin_call(self, name: str) -> Callable[[str], None]:
        """Show that a call of a tool is being written, which becomes whole with :meth:`call`, or is text after all.

        :returns: adds to its arguments
        """
        begun = _BegunCall(self._num_calls, name)
        self._begun.append(begun)
        self._num_calls += 1
        self._piece(_CALLS).call_parts.append(CallPart(begun.index, name, ""))

        def add(text: str) -> None:
            if text:
                begun.arguments.append(text)
                self._piece(_CALLS).call_parts.append(CallPart(begun.index, None, text))

        return add

    def drop_calls(self) -> None:
        """Say that what has begun are no calls."""
        self._begun.clear()

    def call(self, call: Call) -> None:
        """Add a call: the first one that has begun, or another one if none has."""
        self._content.trim()
        begun = self._begun.pop(0) if self._begun else None
        shown = "" if begun is None else "".join(begun.arguments)
        piece = self._piece(_CALLS)
        if begun is None or begun.name != call.name or not call.arguments.startswith(shown):
            piece.call_parts.append(CallPart(self._num_calls, call.name, call.arguments))
            piece.calls.append(evolve(call, index=self._num_calls))
            self._num_calls += 1
            return
        if call.arguments != shown:
            piece.call_parts.append(CallPart(begun.index, None, call.arguments[len(shown) :]))
        piece.calls.append(evolve(call, index=begun.index))

    def end(self) -> None:
        """Add what has waited."""
        self._show(self._content.flush())

    def take(self) -> list[AnswerPiece]:
        """Return what has been added since the last time, in order."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _show(self, content: str) -> None:
        if content:
            piece = self._piece(_CONTENT)
            piece.content += content
            for begin, end in self._content.runs:
                _add_run(piece.runs, begin, end)

    def _piece(self, kind: int) -> AnswerPiece:
        """Return the piece to which something of a kind is added: another one if the last holds what comes later."""
        if not self._pieces or kind < self._last_kind:
            self._pieces.append(AnswerPiece())
        self._last_kind = kind
        return self._pieces[-1]


class _Trimmed:
    """Holds back the white space at the end of a text.

    :param trims: whether that before its first character goes
    :ivar runs: where the text stands that was shown last, as runs of characters
    """

    __slots__ = ("_held", "_held_runs", "_trims", "has_begun", "runs")

    def __init__(self, *, trims: bool) -> None:
        self._held = ""
        self._held_runs: list[tuple[int, int]] = []
        self._trims = trims
        self.has_begun: bool = False
        self.runs: list[tuple[int, int]] = []

    def push(self, text: str, place: int | None) -> str:
        if self._trims:
            size = len(text)
            text = text.lstrip()
            if place is not None:
                place += size - len(text)
        body = text.rstrip()
        end = len(body)
        if not body:
            self._held += text
            if place is not None and text:
                _add_run(self._held_runs, place, place + len(text))
            return ""
        shown = self._held + body
        self._held = text[end:]
        self.runs, self._held_runs = self._held_runs, []
        if place is not None:
            _add_run(self.runs, place, place + end)
            if self._held:
                self._held_runs.append((place + end, place + len(text)))
        self._trims = False
        self.has_begun = True
        return shown

    def trim(self) -> None:
        """Drop the white space that follows, and what is held if nothing else does."""
        self._trims = True

    def flush(self) -> str:
        held, self._held = self._held, ""
        self.runs, self._held_runs = self._held_runs, []
        return "" if self._trims else held


def _add_run(runs: list[tuple[int, int]], begin: int, end: int) -> None:
    """Add the next run of characters, or lengthen the last one that it goes on from."""
    if runs and runs[-1][1] == begin:
        runs[-1] = (runs[-1][0], end)
    else:
        runs.append((begin, end))
