"""Read calls as Python writes them: names, and arguments that are literals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from paged_sdk.chat.answer_format import ToolSchemas
from paged_sdk.chat.answer_pieces import Call
from paged_sdk.chat.grammar_writer import GrammarWriter
from paged_sdk.chat.text_reader import float_of
from paged_sdk.chat.value_grammar import Dialect, ValueGrammar

__all__ = ["python_calls", "python_form"]

_MAX_DEPTH: Final = 32
_TOKEN: Final = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<name>[A-Za-z_][\w.-]*)
      | (?P<mark>[\[\](){},:=;])
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORDS: Final = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_LITERALS: Final = Dialect(words={True: "True", False: "False", None: "None"})


def python_calls(text: str | None, tools: ToolSchemas) -> list[Call] | None:
    """Return the calls in a text: one, several after each other, or a list of them; each may stand in ``print(...)``.

    Arguments without a name belong to the parameters of the tool's schema in their order.

    :returns: None: it is something else, or calls what is not a tool
    """
    try:
        calls = list(_Parser(text or "", tools).calls())
        for call in calls:
            call.arguments.encode()
    except (ValueError, RecursionError):
        return None
    return calls or None


def python_form(writer: GrammarWriter, tools: ToolSchemas) -> str:
    """Return the expression of a call with its arguments by name.

    :raises ConstraintError: Python has no such name, or what a schema says cannot be written as literals
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


class _Parser:
    def __init__(self, text: str, tools: ToolSchemas) -> None:
        self._tokens = list(_tokens(text))
        self._place = 0
        self._tools = tools

    def calls(self) -> Iterator[Call]:
        while self._place < len(self._tokens):
            if not self._takes("[") and not self._takes("]") and not self._takes(",") and not self._takes(";"):
                yield self._call()

    def _call(self) -> Call:
        name = self._take("name")
        self._expect("(")
        if name == "print" and name not in self._tools:
            inner = self._call()
            self._expect(")")
            return inner
        name = name.removeprefix("default_api.")
        if name not in self._tools:
            raise ValueError(f"{name} is no tool")
        parameters = list(self._tools[name].get("properties", {}))
        arguments: dict[str, Any] = {}
        while not self._takes(")"):
            if self._kind() == "name" and self._peek(1) == "=":
                key = self._take("name")
                self._expect("=")
            else:
                key = next((each for each in parameters if each not in arguments), "")
            if not key or key in arguments:
                raise ValueError("an argument that no parameter is left for")
            arguments[key] = self._value(_MAX_DEPTH)
            if not self._takes(",") and self._peek() != ")":
                raise ValueError("two arguments without a comma")
        return Call.of(name, arguments)

    def _value(self, depth: int) -> Any:
        if not depth:
            raise ValueError("nested too deep")
        kind = self._kind()
        if kind == "string":
            parts = [_unquoted(self._take("string"))]
            while self._kind() == "string":
                parts.append(_unquoted(self._take("string")))
            return "".join(parts)
        if kind == "number":
            number = self._take("number")
            return int(number) if re.fullmatch(r"-?\d+", number) else float_of(number)
        if kind == "name":
            word = self._take("name")
            if word not in _WORDS:
                raise ValueError(f"{word} is no literal")
            return _WORDS[word]
        if self._takes("{"):
            return self._mapping(depth)
        closing = {"[": "]", "(": ")"}[self._take("mark")]
        values = []
        while not self._takes(closing):
            values.append(self._value(depth - 1))
            if not self._takes(",") and self._peek() != closing:
                raise ValueError("two values without a comma")
        return values

    def _mapping(self, depth: int) -> dict[str, Any]:
        mapping = {}
        while not self._takes("}"):
            key = _unquoted(self._take("string"))
            self._expect(":")
            mapping[key] = self._value(depth - 1)
            if not self._takes(",") and self._peek() != "}":
                raise ValueError("two entries without a comma")
        return mapping

    def _kind(self) -> str:
        return self._tokens[self._place][0] if self._place < len(self._tokens) else ""

    def _peek(self, ahead: int = 0) -> str:
        place = self._place + ahead
        return self._tokens[place][1] if place < len(self._tokens) and self._tokens[place][0] == "mark" else ""

    def _take(self, kind: str) -> str:
        if self._kind() != kind:
            raise ValueError(f"no {kind} where one is due")
        self._place += 1
        return self._tokens[self._place - 1][1]

    def _takes(self, mark: str) -> bool:
        if self._peek() != mark:
            return False
        self._place += 1
        return True

    def _expect(self, mark: str) -> None:
        if not self._takes(mark):
            raise ValueError(f"no {mark} where one is due")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place, end = 0, len(text.rstrip())
    while place < end:
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            raise ValueError("something that is no literal")
        yield match.lastgroup, match[match.lastgroup]
        place = match.end()


def _unquoted(literal: str) -> str:
    text = _ESCAPE.sub(_character, literal[1:-1])
    # Characters beyond U+FFFF may have been written as JSON has them, in two escapes.
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


def _character(escape: re.Match[str]) -> str:
    code = escape[1] or escape[2]
    if code:
        return chr(int(code, 16))
    character: str = _ESCAPED.get(escape[3], escape[3] if escape[3] in "\\'\"/" else escape[0])
    return character
