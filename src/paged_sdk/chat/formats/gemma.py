"""Read calls as Gemma writes them: Python in a block of code named ``tool_code``, or as FunctionGemma and Gemma 4 do,
a name and arguments whose strings stand between special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from attrs import frozen

from paged_sdk.chat.answer_format import AnswerFormat, MarkedCalls, ToolSchemas, json_call
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.python_calls import python_calls, python_form
from paged_sdk.chat.text_reader import Steps, TextReader
from paged_sdk.chat.value_grammar import Dialect, ValueGrammar

__all__ = ["FORMAT"]

_ENDS: Final = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
"""Begins a call: ends it."""
_QUOTES: Final = ('<|"|>', "<escape>")
_WORDS: Final[Mapping[object, str]] = {True: "true", False: "false", None: "null"}
_HEAD: Final = re.compile(r"\s*call:([\w.-]+)\{")
_KEY: Final = re.compile(r"(^|[{,]\s*)([A-Za-z_][\w.-]*)\s*:")


@frozen
class _Gemma(MarkedCalls):
    """Is the format of one of Gemma's families.

    :ivar mark: begins a call
    """

    mark: str = "```tool_code"

    call_marks = ("```tool_code", *_ENDS)

    @property
    def marks(self) -> tuple[str, ...]:
        return (*super().marks, *_ENDS.values(), *_QUOTES)

    def is_written_by(self, template: str) -> bool:
        return any(sign in template for sign in ("tool_code", *_ENDS))

    @property
    def own_mark(self) -> str:
        return self.mark

    def as_written_by(self, template: str) -> AnswerFormat:
        return _Gemma(mark=next((mark for mark in _ENDS if mark in template), "```tool_code"))

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        if self.mark not in _ENDS:
            return CallForm(opening=f"{self.mark}\n", call=python_form(writer, tools), separator="\n", closing="\n```")
        quote, end = _QUOTES[list(_ENDS).index(self.mark)], _ENDS[self.mark]
        dialect = Dialect(words=_WORDS, quote=quote, bare_keys=True, comma=",", colon=":")
        return CallForm(
            opening=self.mark, call=_quoted_form(writer, tools, dialect), separator=end + self.mark, closing=end
        )

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        start = reader.at
        block = yield from reader.until(_ENDS.get(mark, "```"))
        if block is None:  # the end token may come in place of the closing mark
            reader.at = len(reader.text)
        text = reader.text[start:] if block is None else block[0]
        return _quoted_call(text, tools) if mark in _ENDS else python_calls(text, tools)


def _quoted_form(writer: GrammarWriter, tools: ToolSchemas, dialect: Dialect) -> str:
    """Return the expression of a call in which strings stand between special tokens."""
    calls = []
    for name, schema in tools.items():
        values = ValueGrammar(writer, dialect, schema, f"the tool {name}")
        parts = []
        for key, each, is_required in values.arguments():
            parts.append((f"{writer.text(f'{values.checked_name(key)}:')} {values.value(each)}", is_required))
        calls.append(f"{writer.text(f'call:{name}{{')} {values.members(parts, ',')} {writer.text('}')}")
    return writer.rule(writer.any_of(calls))


def _quoted_call(text: str, tools: ToolSchemas) -> list[Call] | None:
    """Read ``call:name{key:<|"|>text<|"|>,other:5}``, of which nothing but strings and keys needs to become JSON."""
    head = _HEAD.match(text)
    if head is None:
        return None
    quote = next((each for each in _QUOTES if each in text), _QUOTES[0])
    parts = text[head.end() :].split(quote)
    for place, part in enumerate(parts):
        parts[place] = json.dumps(part, ensure_ascii=False) if place % 2 else _KEY.sub(r'\1"\2":', part)
    return json_call(head[1], "{" + "".join(parts), tools)


FORMAT = _Gemma()
