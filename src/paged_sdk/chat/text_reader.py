"""Parse a text that arrives in pieces as if it were complete."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

from paged_sdk.types.tool_call import MAX_DEPTH

__all__ = ["Steps", "TextReader", "float_of", "json_of"]

_T = TypeVar("_T")

Steps: TypeAlias = Generator[None, None, _T]
"""A parsing coroutine: yields when it needs more text, continues when resumed, and returns its result."""

_SPACE: Final = re.compile(r"\s*")

_MAX_DEPTH: Final = MAX_DEPTH + 2
"""The limit for arguments, plus two for a call object in a list. The json module's own limit is 994 levels in Python
3.11, 1,497 in 3.12 and 9,998 in 3.13, and less on a deep stack, so it would make results depend on the interpreter.
"""


class _Syntax:
    """Holds the patterns that find brackets outside of strings.

    :param quotes: characters that delimit strings
    :ivar in_string: maps a quote to the pattern of what is special within its strings
    :ivar outside: the pattern of brackets, quotes and characters that are not allowed outside of strings
    """

    def __init__(self, quotes: str) -> None:
        self.in_string = {quote: re.compile(rf"[{quote}\\]") for quote in quotes}
        # Other characters outside of strings are numbers, words, white space and the punctuation .,:+=-
        self.outside = re.compile(rf"[\[\](){{}}{quotes}]|[^\s\w.,:+=-]")


_JSON: Final = _Syntax('"')
_PYTHON: Final = _Syntax("\"'")


class TextReader:
    """Buffers a text that arrives in pieces, and reads it from left to right.

    Its methods are generators that yield when the text so far does not decide the result. So results do not depend on
    how the text is cut. Each character is examined a bounded number of times.

    A position is a character's index in the whole text, including the part that has been dropped.

    :ivar at: index in ``text`` of the next character to read
    :ivar start: position of the first character of ``text``
    :ivar text: the text that has arrived, without the part that has been dropped
    :ivar has_ended: whether no more text will arrive
    """

    __slots__ = ("at", "has_ended", "start", "text")

    def __init__(self) -> None:
        self.text: str = ""
        self.at: int = 0
        self.start: int = 0
        self.has_ended: bool = False

    @property
    def position(self) -> int:
        """Return the position of the next character to read."""
        return self.start + self.at

    def feed(self, text: str) -> None:
        """Append a piece of text."""
        self.text += text

    def forget(self) -> None:
        """Drop the text that has been read."""
        self.start += self.at
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Steps[bool]:
        """Wait for more text; return False if the text has ended."""
        size = len(self.text)
        while len(self.text) == size and not self.has_ended:
            yield
        return len(self.text) > size

    def literal(self, word: str) -> Steps[bool]:
        """Read a word if it comes next; return whether it does."""
        while len(self.text) - self.at < len(word) and word.startswith(self.text[self.at :]):
            if not (yield from self.more()):
                return False
        if not self.text.startswith(word, self.at):
            return False
        self.at += len(word)
        return True

    def one_of(self, words: Iterable[str]) -> Steps[str | None]:
        """Read and return the first of these words that comes next, if any."""
        for word in words:
            if (yield from self.literal(word)):
                return word
        return None

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read all characters that come next and match.

        :param pattern: matches a run of characters of some class, possibly empty
        """
        start = end = self.at
        while True:
            match = pattern.match(self.text, end)
            assert match is not None
            end = match.end()
            if end < len(self.text) or not (yield from self.more()):
                self.at = end
                return self.text[start:end]

    def space(self) -> Steps[str]:
        """Read white space, if any comes next."""
        return (yield from self.run(_SPACE))

    def until(self, *words: str, watch: Callable[[str], None] | None = None) -> Steps[tuple[str, str] | None]:
        """Read the text up to the first of these words, and the word.

        :param watch: gets the text before the word as it arrives
        :returns: the text and the word; None: the text ends without one, and nothing has been read
        """
        pattern = re.compile("|".join(map(re.escape, words)))
        longest = max(map(len, words))
        looked_at = self.at
        while True:
            found = pattern.search(self.text, looked_at)
            seen = looked_at
            if found is not None:
                if watch is not None:
                    watch(self.text[seen : found.start()])
                text = self.text[self.at : found.start()]
                self.at = found.end()
                return text, found.group()
            looked_at = max(looked_at, len(self.text) - longest + 1)
            if watch is not None:
                watch(self.text[seen:looked_at])
            if not (yield from self.more()):
                if watch is not None:
                    watch(self.text[looked_at:])
                return None

    def pass_until(self, marks: tuple[str, ...], show: Callable[[str, int], None]) -> Steps[str | None]:
        """Read and show text up to the first of these marks, and read the mark. Text that could be the beginning of a
        mark is held back. May drop the text that has been read.

        :param show: gets pieces of the text, and the position of each
        :returns: the mark; None: the text ends without one, and all of it has been shown
        """
        pattern = re.compile("|".join(map(re.escape, marks)))
        while True:
            found = pattern.search(self.text, self.at)
            if found is not None:
                show(self.text[self.at : found.start()], self.start + self.at)
                self.at = found.end()
                return found.group()
            end = len(self.text) - max((_size_of_beginning(self.text, self.at, mark) for mark in marks), default=0)
            show(self.text[self.at : end], self.start + self.at)
            self.at = end
            self.forget()
            if not (yield from self.more()):
                show(self.text, self.start)
                self.at = len(self.text)
                return None

    def pass_all(self, show: Callable[[str, int], None]) -> Steps[None]:
        """Read and show all text until its end.

        :param show: gets pieces of the text, and the position of each
        """
        is_there = True
        while is_there:
            show(self.text[self.at :], self.start + self.at)
            self.at = len(self.text)
            self.forget()
            is_there = yield from self.more()

    def json_text(self, watch: Callable[[str], None] | None = None) -> Steps[str | None]:
        """Read an object or list up to its closing bracket, without checking that it is valid JSON.

        :param watch: gets the text as it arrives
        :returns: the text; None: something else follows, the brackets are not closed, or a character outside of strings
            is not JSON. The text up to there has been read
        """
        return (yield from self._bracketed("{[", _JSON, watch))

    def python_text(self, watch: Callable[[str], None]) -> Steps[str | None]:
        """Read a Python list, or arguments in parentheses, as :meth:`json_text` does."""
        return (yield from self._bracketed("[(", _PYTHON, watch))

    def _bracketed(
        self, openings: str, syntax: _Syntax, watch: Callable[[str], None] | None = None
    ) -> Steps[str | None]:
        if self.at == len(self.text) and not (yield from self.more()):
            return None
        if self.text[self.at] not in openings:
            return None
        start = end = shown = self.at
        depth, quote = 0, ""
        while True:
            found = (syntax.in_string[quote] if quote else syntax.outside).search(self.text, end)
            if found is None or (found.group() == "\\" and found.end() == len(self.text)):
                end = len(self.text) if found is None else found.start()
                if watch is not None:
                    watch(self.text[shown:end])
                    shown = end
                if (yield from self.more()):
                    continue
                self.at = len(self.text)
                return None
            end = found.end()
            character = found.group()
            if character == "\\" and quote:
                end += 1
            elif character in syntax.in_string:
                quote = "" if quote else character
            elif character in "{[(":
                depth += 1
            elif character in ")]}":
                depth -= 1
            else:
                self.at = found.start()
                if watch is not None:
                    watch(self.text[shown : self.at])
                return None
            if depth == 0 and not quote:
                self.at = end
                if watch is not None:
                    watch(self.text[shown:end])
                return self.text[start:end]


def _size_of_beginning(text: str, start: int, mark: str) -> int:
    """Return the length of the longest proper prefix of a mark that the text from ``start`` on ends with."""
    index = text.find(mark[0], max(start, len(text) - len(mark) + 1))
    while index >= 0 and not mark.startswith(text[index:]):
        index = text.find(mark[0], index + 1)
    return len(text) - index if index >= 0 else 0


def json_of(text: str) -> Any:
    """Parse JSON; strings may contain line breaks, as models write them.

    :raises ValueError: the text is not JSON, is nested too deep, or holds NaN, infinity, lone surrogates or duplicate
        keys
    """
    try:
        value = json.loads(
            text, strict=False, parse_constant=_refuse, parse_float=float_of, object_pairs_hook=_without_repetition
        )
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("nested too deep") from None
    if _is_deeper(value, _MAX_DEPTH):
        raise ValueError(f"nested more than {_MAX_DEPTH} deep")
    return value


def _is_deeper(value: Any, most: int) -> bool:
    """Tell whether lists and objects are nested more than ``most`` deep."""
    level = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return True


def float_of(text: str) -> float:
    """Parse a float, clamped to the finite range: 1e999 is valid JSON, but infinity cannot be written as JSON."""
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
