"""Read a text that arrives in pieces, as if it were there at once."""

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
"""Reads on whenever it is resumed, waits where the text ends, and returns what it has read."""

_SPACE: Final = re.compile(r"\s*")

_MAX_DEPTH: Final = MAX_DEPTH + 2
"""Arguments, in a call that is an object in a list. The json module's own limit is 994 levels in Python 3.11, 1,497 in
3.12 and 9,998 in 3.13, and less where calls are nested: a text would be a call or none by what reads it.
"""


class _Syntax:
    """Says where brackets count.

    :param quotes: begin and end strings
    """

    def __init__(self, quotes: str) -> None:
        self.in_string = {quote: re.compile(rf"[{quote}\\]") for quote in quotes}
        # What comes outside of strings beside these are numbers, words and punctuation.
        self.outside = re.compile(rf"[\[\](){{}}{quotes}]|[^\s\w.,:+=-]")


_JSON: Final = _Syntax('"')
_PYTHON: Final = _Syntax("\"'")


class TextReader:
    """Holds the part of a text that has arrived and is still needed, and reads it from left to right.

    Its methods are steps of a generator: where the text so far does not decide, they wait for more. So what is read
    does not depend on how the text was cut. Each character is looked at a bounded number of times.

    A place is the number of characters before it in all of the text, whatever is forgotten.

    :ivar at: where it reads next, in ``text``
    :ivar start: the place where ``text`` begins
    :ivar text: what has arrived, from the oldest character that is needed
    :ivar has_ended: no more text comes
    """

    __slots__ = ("at", "has_ended", "start", "text")

    def __init__(self) -> None:
        self.text: str = ""
        self.at: int = 0
        self.start: int = 0
        self.has_ended: bool = False

    @property
    def place(self) -> int:
        """Return the place where it reads next."""
        return self.start + self.at

    def feed(self, text: str) -> None:
        """Add what has arrived."""
        self.text += text

    def forget(self) -> None:
        """Drop what has been read."""
        self.start += self.at
        self.text, self.at = self.text[self.at :], 0

    def more(self) -> Steps[bool]:
        """Wait for more text; tell whether some has come."""
        size = len(self.text)
        while len(self.text) == size and not self.has_ended:
            yield
        return len(self.text) > size

    def literal(self, word: str) -> Steps[bool]:
        """Take a word, if it comes next."""
        while len(self.text) - self.at < len(word) and word.startswith(self.text[self.at :]):
            if not (yield from self.more()):
                return False
        if not self.text.startswith(word, self.at):
            return False
        self.at += len(word)
        return True

    def one_of(self, words: Iterable[str]) -> Steps[str | None]:
        """Take the first of these words that comes next."""
        for word in words:
            if (yield from self.literal(word)):
                return word
        return None

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take all characters that follow and match.

        :param pattern: matches any run of characters of a kind, an empty one too
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
        """Take white space, if any comes next."""
        return (yield from self.run(_SPACE))

    def until(self, *words: str, watch: Callable[[str], None] | None = None) -> Steps[tuple[str, str] | None]:
        """Take the text before the first of these words, and the word.

        :param watch: gets the text as it arrives
        :returns: both; None: the text ends without one, and nothing is taken
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
        """Show text up to the first of these marks, and take the mark. What could be a mark's beginning is held back.

        What was read before is forgotten.

        :param show: gets pieces of the text, and the place of each
        :returns: the mark; None: the text ends without one, and all of it is shown
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
        """Show all text there is and will be.

        :param show: gets pieces of the text, and the place of each
        """
        is_there = True
        while is_there:
            show(self.text[self.at :], self.start + self.at)
            self.at = len(self.text)
            self.forget()
            is_there = yield from self.more()

    def json_text(self, watch: Callable[[str], None] | None = None) -> Steps[str | None]:
        """Take an object or list that follows, up to the bracket that closes it. Whether it is JSON is not checked.

        :param watch: gets the text as it arrives
        :returns: its text; None: something else follows, or a character outside of strings that JSON does not have, or
            it is not closed. What comes before that is taken.
        """
        return (yield from self._bracketed("{[", _JSON, watch))

    def python_text(self, watch: Callable[[str], None]) -> Steps[str | None]:
        """Take a list or arguments in parentheses as Python writes them, as :meth:`json_text` does."""
        return (yield from self._bracketed("[(", _PYTHON, watch))

    def _bracketed(
        self, openings: str, syntax: _Syntax, watch: Callable[[str], None] | None = None
    ) -> Steps[str | None]:
        if self.at == len(self.text) and not (yield from self.more()):
            return None
        if self.text[self.at] not in openings:
            return None
        start = place = shown = self.at
        depth, quote = 0, ""
        while True:
            found = (syntax.in_string[quote] if quote else syntax.outside).search(self.text, place)
            if found is None or (found.group() == "\\" and found.end() == len(self.text)):
                place = len(self.text) if found is None else found.start()
                if watch is not None:
                    watch(self.text[shown:place])
                    shown = place
                if (yield from self.more()):
                    continue
                self.at = len(self.text)
                return None
            place = found.end()
            character = found.group()
            if character == "\\" and quote:
                place += 1
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
                self.at = place
                if watch is not None:
                    watch(self.text[shown:place])
                return self.text[start:place]


def _size_of_beginning(text: str, start: int, mark: str) -> int:
    """Return how much of a mark's beginning, short of all of it, the text from ``start`` ends with."""
    place = text.find(mark[0], max(start, len(text) - len(mark) + 1))
    while place >= 0 and not mark.startswith(text[place:]):
        place = text.find(mark[0], place + 1)
    return len(text) - place if place >= 0 else 0


def json_of(text: str) -> Any:
    """Return a JSON value; strings may hold line breaks, as models write them.

    :raises ValueError: it is none, NaN or infinite, nested too deep, or holds lone surrogates or a name twice
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
    """Tell whether more than so many lists and objects lie in each other."""
    level = [value]
    for _ in range(most + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
    return True


def float_of(text: str) -> float:
    """Return a number, the largest there is for one that is larger: JSON has 1e999, and cannot hold infinity."""
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
