"""Read tool calls in Python syntax: names, and arguments that are literals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from paged_sdk.chat.answer_format import ToolSchemas
from paged_sdk.chat.answer_pieces import Call
from paged_sdk.chat.grammar_writer import GrammarWriter
from paged_sdk.chat.text_reader import Steps, TextReader, float_of
from paged_sdk.chat.value_grammar import Dialect, ValueGrammar
from paged_sdk.chat.value_schemas import properties_of

__all__ = ["PythonCalls", "python_form"]

_MAX_DEPTH: Final = 32
_BETWEEN: Final = re.compile(r"[\s\[\],;]*")
_WORD: Final = re.compile(r"[\w.+-]*")
"""Matches a name, a number or a word such as True."""
_NAME: Final = re.compile(r"[A-Za-z_][\w.-]*")
_INTEGER: Final = re.compile(r"-?\d+")
_NUMBER: Final = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_HEX: Final = "[0-9a-fA-F]"
# Matches complete escapes only. At the end of the text so far, an escape that could continue, or that could be the
# first half of a surrogate pair, does not match.
_WHOLE_ESCAPE: Final = rf"""\\(?:
    u(?![dD][89abAB]){_HEX}{{4}}
  | u[dD][89abAB]{_HEX}{{2}}(?:\\u{_HEX}{{4}} | (?!\\?\Z | \\u{_HEX}{{0,3}}\Z))
  | u(?!{_HEX}{{0,3}}\Z | {_HEX}{{4}})
  | x(?!{_HEX}?\Z)(?:{_HEX}{{2}})?
  | [^ux]
)"""
_INSIDE: Final = {quote: re.compile(rf"(?: [^{quote}\\\n]+ | {_WHOLE_ESCAPE} )+", re.VERBOSE) for quote in ('"', "'")}
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORDS: Final = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_LITERALS: Final = Dialect(words={True: "True", False: "False", None: "None"})


def python_form(writer: GrammarWriter, tools: ToolSchemas) -> str:
    """Return the grammar expression of a call with its arguments by name.

    :raises ConstraintError: a name is not a Python name, or literals cannot express what a schema says
    """
    calls = []
    for name, schema in tools.items():
        values = ValueGrammar(writer, _LITERALS, schema, f"the tool {name}")
        parts = []
        for key, each, is_required in values.arguments():
            parts.append((f"{writer.text(f'{values.checked_name(key)}=')} {values.value(each)}", is_required))
        arguments = values.members(parts, ", ")
        calls.append(f"{writer.text(f'{values.checked_name(name)}(')} {arguments} {writer.text(')')}")
    return writer.rule(writer.any_of(calls))


class PythonCalls:
    """Reads calls while they arrive: a single one, several in a row, or a list; each may be wrapped in ``print(...)``.
    Positional arguments are assigned to the parameters of the tool's schema in order.

    :param begin: begins a call by its name, and returns a function that appends to its arguments, as JSON; None:
        unknown tool
    :param tools: the tools that may be called
    """

    def __init__(self, begin: Callable[[str], Callable[[str], None] | None], tools: ToolSchemas) -> None:
        self._begin = begin
        self._tools = tools
        self._reader = TextReader()
        self._calls: list[Call] = []
        self._has_failed = False
        self._steps = self._read()

    def __call__(self, text: str) -> None:
        """Process the next piece."""
        if not self._has_failed:
            self._reader.feed(text)
            self._go_on()

    def end(self) -> list[Call] | None:
        """Return the calls in the text, which has ended; None if it is something else, or calls an unknown tool."""
        self._reader.has_ended = True
        self._go_on()
        return None if self._has_failed else self._calls or None

    def _go_on(self) -> None:
        try:
            with suppress(StopIteration):
                next(self._steps)
        except ValueError:
            self._has_failed = True

    def _read(self) -> Steps[None]:
        reader = self._reader
        while True:
            yield from reader.run(_BETWEEN)
            if reader.at == len(reader.text):
                return
            reader.forget()
            self._calls.append((yield from self._call()))

    def _call(self) -> Steps[Call]:
        printed = 0
        name = yield from self._name()
        while name == "print" and name not in self._tools:
            printed += 1
            name = yield from self._name()
        name = name.removeprefix("default_api.")
        add = self._begin(name)
        if add is None:
            raise ValueError(f"{name} is not a tool")
        written: list[str] = []

        def show(text: str) -> None:
            written.append(text)
            add(text)

        yield from self._arguments(list(properties_of(self._tools[name])), show)
        for _ in range(printed):
            yield from self._expect(")")
        return Call(name, "".join(written))

    def _name(self) -> Steps[str]:
        """Read a name and the parenthesis after it."""
        name = _checked_name((yield from self._word()))
        yield from self._expect("(")
        return name

    def _arguments(self, parameters: list[str], show: Callable[[str], None]) -> Steps[None]:
        known: set[str] = set()
        show("{")
        while not (yield from self._takes(")")):
            word = yield from self._word()
            if word and (yield from self._takes("=")):
                key, word = _checked_name(word), ""
            else:
                key = next((each for each in parameters if each not in known), "")
            if not key or key in known:
                raise ValueError("more arguments than parameters")
            show(f"{', ' if known else ''}{json.dumps(key, ensure_ascii=False)}: ")
            known.add(key)
            if word:
                show(_written(word))
            else:
                yield from self._value(_MAX_DEPTH, show)
            if not (yield from self._takes(",")):
                yield from self._expect(")")
                break
        show("}")

    def _value(self, depth: int, show: Callable[[str], None]) -> Steps[None]:
        if not depth:
            raise ValueError("nested too deep")
        word = yield from self._word()
        if word:
            show(_written(word))
            return
        quote = yield from self._reader.one_of(_INSIDE)
        if quote is not None:
            show('"')
            while quote is not None:
                yield from self._string(quote, show)
                yield from self._reader.space()
                quote = yield from self._reader.one_of(_INSIDE)
            show('"')
        elif (yield from self._takes("{")):
            yield from self._mapping(depth, show)
        else:
            closing = "]" if (yield from self._takes("[")) else ")"
            if closing == ")":
                yield from self._expect("(")
            yield from self._list(closing, depth, show)

    def _list(self, closing: str, depth: int, show: Callable[[str], None]) -> Steps[None]:
        show("[")
        comma = ""
        while not (yield from self._takes(closing)):
            show(comma)
            yield from self._value(depth - 1, show)
            comma = ", "
            if not (yield from self._takes(",")):
                yield from self._expect(closing)
                break
        show("]")

    def _mapping(self, depth: int, show: Callable[[str], None]) -> Steps[None]:
        known: set[str] = set()
        show("{")
        while not (yield from self._takes("}")):
            quote = yield from self._reader.one_of(_INSIDE)
            parts: list[str] = []
            if quote is None:
                raise ValueError("expected a string as a name")
            yield from self._string(quote, parts.append)
            key = "".join(parts)
            if key in known:
                raise ValueError("a name occurs twice")
            yield from self._expect(":")
            show(f'{", " if known else ""}"{key}": ')
            known.add(key)
            yield from self._value(depth - 1, show)
            if not (yield from self._takes(",")):
                yield from self._expect("}")
                break
        show("}")

    def _string(self, quote: str, show: Callable[[str], None]) -> Steps[None]:
        """Read the rest of a string and its closing quote, and show it as the inside of a JSON string."""
        reader = self._reader
        while not (yield from reader.literal(quote)):
            found = _INSIDE[quote].match(reader.text, reader.at)
            if found is not None:
                show(json.dumps(_unescaped(found.group()), ensure_ascii=False)[1:-1])
                reader.at = found.end()
                reader.forget()
            elif reader.text.startswith("\n", reader.at) or not (yield from reader.more()):
                raise ValueError("a string that is not closed")

    def _word(self) -> Steps[str]:
        """Read a name, number or other word, if one comes next."""
        yield from self._reader.space()
        self._reader.forget()
        return (yield from self._reader.run(_WORD))

    def _takes(self, mark: str) -> Steps[bool]:
        yield from self._reader.space()
        return (yield from self._reader.literal(mark))

    def _expect(self, mark: str) -> Steps[None]:
        if not (yield from self._takes(mark)):
            raise ValueError(f"expected {mark}")


def _checked_name(word: str) -> str:
    if not _NAME.fullmatch(word):
        raise ValueError(f"{word} is not a name")
    return word


def _written(word: str) -> str:
    """Convert a literal without quotes or brackets to JSON."""
    if word in _WORDS:
        return _WORDS[word]
    if not _NUMBER.fullmatch(word):
        raise ValueError(f"{word} is not a literal")
    return json.dumps(int(word) if _INTEGER.fullmatch(word) else float_of(word))


def _unescaped(text: str) -> str:
    text = _ESCAPE.sub(_character, text)
    # Characters beyond U+FFFF may have been written as in JSON, as two escaped surrogates.
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


def _character(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2]
    if code:
        return chr(int(code, 16))
    character: str = _ESCAPED.get(escape[3], escape[3] if escape[3] in "\\'\"/" else escape[0])
    return character
