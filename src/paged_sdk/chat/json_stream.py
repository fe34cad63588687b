"""Stream JSON while a model writes it, normalized as :func:`json.dumps` would write the complete value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from paged_sdk.chat.text_reader import json_of

__all__ = ["JsonCallsWatch", "JsonStream", "StringStream"]

_OUTSIDE: Final = re.compile(r'[{\[}\],:"]|[^\s{\[}\],:"]+|\s+')
_PLAIN_ESCAPES: Final = '"\\bfnrt'
"""Escapes that are written as they come."""
_INSIDE: Final = re.compile(
    r'(?:[^"\\\x00-\x1f]++|\\["\\bfnrt])++|"|[\x00-\x1f]|\\u[dD][89abAB]..\\u....|\\u(?![dD][89abAB])....|\\[^u]',
    re.DOTALL,
)
_MARKS: Final = {",": ", ", ":": ": "}
_LONGEST_NUMBER: Final = 400
_LONGEST_HEAD: Final = 400
"""Limits the characters before the arguments; a tool's name has up to 128."""
_NAMED: Final = r'\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'


class JsonStream:
    """Normalizes a JSON object to the form of :func:`json.dumps`, while it arrives. For invalid JSON, the output is
    undefined.

    :param show: gets the normalized text
    :ivar has_ended: whether the object is closed, or turned out to be invalid
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self.has_ended: bool = False
        self._show = show
        self._rest = ""
        self._depth = 0
        self._in_string = False

    def push(self, text: str) -> str:
        """Process the next piece.

        :returns: the text after the object
        """
        text, position, shown = self._rest + text, 0, []
        self._rest = ""
        while position < len(text) and not self.has_ended:
            found = (_INSIDE if self._in_string else _OUTSIDE).match(text, position)
            if found is None:  # an incomplete escape
                break
            part = found.group()
            if not self._in_string and found.end() == len(text) and part[0] not in '{[}],:"' and not part.isspace():
                break  # a number or word, which may continue in the next piece
            position = found.end()
            shown.append(self._written(part))
        self._show("".join(shown))
        if self.has_ended:
            return text[position:]
        self._rest = text[position:]
        self.has_ended = len(self._rest) > _LONGEST_NUMBER
        return ""

    def _written(self, part: str) -> str:
        if part == '"':
            self._in_string = not self._in_string
            return part
        try:
            if self._in_string:
                is_plain = len(part) > 1 and (part[0] != "\\" or part[1] in _PLAIN_ESCAPES)
                return part if is_plain else _rewritten(f'"{part}"')[1:-1]
            if part in "{[":
                self._depth += 1
            elif part in "}]":
                self._depth -= 1
                self.has_ended = not self._depth
            elif part not in _MARKS and not part.isspace():
                return _rewritten(part)
        except ValueError:
            self.has_ended = True
            return ""
        return "" if part.isspace() else _MARKS.get(part, part)


def _rewritten(text: str) -> str:
    return json.dumps(json_of(text), ensure_ascii=False)


class StringStream:
    """Escapes a text as a JSON string, while it arrives.

    :param show: gets the escaped text, without quotes
    :param trims: whether to drop one line break at the beginning and one at the end
    """

    def __init__(self, show: Callable[[str], None], *, trims: bool) -> None:
        self._show = show
        self._trims = trims
        self._held = ""
        self._has_begun = False

    def __call__(self, text: str) -> None:
        """Process the next piece."""
        if self._trims:
            if not self._has_begun and text:
                self._has_begun = True
                text = text.removeprefix("\n")
            text = self._held + text
            self._held = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        self._show(json.dumps(text, ensure_ascii=False)[1:-1])


class JsonCallsWatch:
    """Finds calls in JSON while it arrives, and streams their arguments, as long as each call has its keys in the usual
    order: name, then arguments.

    :param begin: begins a call by its name, and returns a function that appends to its arguments; None: unknown tool
    :param named: regular expression of a call up to its arguments, with the name as its only group
    """

    def __init__(self, begin: Callable[[str], Callable[[str], None] | None], named: str = _NAMED) -> None:
        self._begin = begin
        self._buffer = ""
        self._head = re.compile(rf"\[?\s*{named}")
        self._next = re.compile(rf'\s*(?:,\s*"id"\s*:\s*"\w*"\s*)?\}}\s*,\s*{named}')
        self._arguments: JsonStream | None = None
        self._gives_up = False

    def __call__(self, text: str) -> None:
        """Process the next piece."""
        while text and not self._gives_up:
            if self._arguments is not None:
                text = self._arguments.push(text)
                if self._arguments.has_ended:
                    self._arguments = None
                continue
            self._buffer += text
            found = self._head.match(self._buffer, 0, _LONGEST_HEAD)
            show = None if found is None else self._begin(found[1])
            if found is None or show is None:
                self._gives_up = found is not None or len(self._buffer) >= _LONGEST_HEAD
                return
            text, self._buffer, self._head = self._buffer[found.end() :], "", self._next
            self._arguments = JsonStream(show)
