"""Collect the reasoning, content and calls of an answer while it is parsed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from attrs import Factory, define, evolve, field, frozen

__all__ = ["AnswerPiece", "AnswerPieces", "Call", "CallPart"]

_REASONING, _CONTENT, _CALLS = range(3)
"""The order of the parts of an :class:`AnswerPiece`."""


@frozen
class Call:
    """Holds a tool call that a model has written.

    :ivar arguments: JSON text of an object
    :ivar index: index of the call in its answer
    """

    name: str
    arguments: str
    index: int = 0

    @classmethod
    def of(cls, name: str, arguments: dict[str, Any]) -> Call:
        """Make a call; the arguments must be representable as JSON."""
        return cls(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


@frozen
class CallPart:
    """Holds a delta of a call.

    :ivar index: index of the call in its answer
    :ivar name: the tool's name, in the first part of a call; None in later parts
    :ivar arguments: text to append to the arguments so far
    """

    index: int
    name: str | None
    arguments: str


@define
class AnswerPiece:
    """Holds a delta of an answer: reasoning, then content, then calls. Parts in another order take several pieces.

    :ivar calls: calls that are complete
    :ivar call_parts: deltas of calls, some of which may turn out to be content
    :ivar runs: the positions of the content in the answer's text, as (begin, end) of each run of characters
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
    """Collects the parts of an answer into pieces, and trims white space around reasoning and calls. White space before
    a call is kept if content follows the call.

    White space at the end of the content so far is held back until it is known what follows.
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
        """Tell whether there has been any content other than white space."""
        return self._content.has_begun

    def content(self, text: str, position: int | None) -> None:
        """Add content.

        :param position: its position in the answer's text; None: the model did not write it
        """
        self._show(self._content.push(text, position))

    def reasoning(self, text: str, position: int | None) -> None:
        """Add reasoning; parameters are as for :meth:`content`."""
        shown = self._reasoning.push(text, position)
        if shown:
            self._piece(_REASONING).reasoning += shown

    def end_reasoning(self) -> None:
        """End the reasoning; content follows."""
        self._content.trim()

    def begin_call(self, name: str) -> Callable[[str], None]:
        """Begin a call of a tool. It is completed by :meth:`call`, or dropped by :meth:`drop_calls`.

        :returns: a function that appends text to the call's arguments
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
        """Drop the calls that have begun: they turned out to be content."""
        self._begun.clear()

    def call(self, call: Call) -> None:
        """Add a complete call: the first one that has begun, if any, otherwise a new one."""
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
        """Add the white space that was held back, as the answer has ended."""
        self._show(self._content.flush())

    def take(self) -> list[AnswerPiece]:
        """Return the pieces since the last call, in order."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _show(self, content: str) -> None:
        if content:
            piece = self._piece(_CONTENT)
            piece.content += content
            for begin, end in self._content.runs:
                _add_run(piece.runs, begin, end)

    def _piece(self, kind: int) -> AnswerPiece:
        """Return the piece to add a part of this kind to: a new one if the last piece has parts of a later kind."""
        if not self._pieces or kind < self._last_kind:
            self._pieces.append(AnswerPiece())
        self._last_kind = kind
        return self._pieces[-1]


class _Trimmed:
    """Holds back white space at the end of a text that arrives in pieces.

    :param trims: whether to drop white space before the first other character
    :ivar runs: positions of the text that :meth:`push` or :meth:`flush` returned last, as runs of characters
    """

    __slots__ = ("_held", "_held_runs", "_trims", "has_begun", "runs")

    def __init__(self, *, trims: bool) -> None:
        self._held = ""
        self._held_runs: list[tuple[int, int]] = []
        self._trims = trims
        self.has_begun: bool = False
        self.runs: list[tuple[int, int]] = []

    def push(self, text: str, position: int | None) -> str:
        if self._trims:
            size = len(text)
            text = text.lstrip()
            if position is not None:
                position += size - len(text)
        body = text.rstrip()
        end = len(body)
        if not body:
            self._held += text
            if position is not None and text:
                _add_run(self._held_runs, position, position + len(text))
            return ""
        shown = self._held + body
        self._held = text[end:]
        self.runs, self._held_runs = self._held_runs, []
        if position is not None:
            _add_run(self.runs, position, position + end)
            if self._held:
                self._held_runs.append((position + end, position + len(text)))
        self._trims = False
        self.has_begun = True
        return shown

    def trim(self) -> None:
        """Drop the white space that follows; also the white space that is held back, if no other text follows."""
        self._trims = True

    def flush(self) -> str:
        held, self._held = self._held, ""
        self.runs, self._held_runs = self._held_runs, []
        return "" if self._trims else held


def _add_run(runs: list[tuple[int, int]], begin: int, end: int) -> None:
    """Add a run of characters; merge it with the last run if it continues that one."""
    if runs and runs[-1][1] == begin:
        runs[-1] = (runs[-1][0], end)
    else:
        runs.append((begin, end))
