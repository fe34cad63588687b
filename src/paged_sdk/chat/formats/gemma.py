"""Read tool calls of Gemma: Python in a code block named ``tool_code``; for FunctionGemma and Gemma 4, a name, and
arguments whose strings are between special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from attrs import frozen

from paged_sdk.chat.answer_format import AnswerFormat, MarkedCalls, ToolSchemas, beginner, json_call
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.json_stream import JsonStream, StringStream
from paged_sdk.chat.python_calls import PythonCalls, python_form
from paged_sdk.chat.text_reader import Steps, TextReader
from paged_sdk.chat.value_grammar import Dialect, ValueGrammar

__all__ = ["FORMAT"]

_ENDS: Final = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
"""Maps the mark that begins a call to the mark that ends it."""
_QUOTES: Final = ('<|"|>', "<escape>")
_WORDS: Final[Mapping[object, str]] = {True: "true", False: "false", None: "null"}
_NAME: Final = re.compile(r"[\w.-]*")
_KEY: Final = re.compile(r"[A-Za-z_][\w.-]*")
_WORD: Final = re.compile(r"[\w.+-]*")


@frozen
class _Gemma(MarkedCalls):
    """Reads the format of one generation of Gemma.

    :ivar mark: the mark that begins a call
    """

    mark: str = "```tool_code"

    call_marks: ClassVar[tuple[str, ...]] = ("```tool_code", *_ENDS)

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
        if mark in _ENDS:
            return (yield from _quoted_call(reader, _QUOTES[list(_ENDS).index(mark)], _ENDS[mark], pieces, tools))
        found = PythonCalls(beginner(pieces, tools), tools)
        yield from _python_block(reader, found)
        return found.end()


def _python_block(reader: TextReader, watch: Callable[[str], None]) -> Steps[None]:
    """Read Python up to the end of its code block. Within a string, which ends at the end of its line at the latest,
    the block's end mark is text.

    :param watch: gets the text as it arrives
    """
    quote = ""
    while True:
        ends = (quote, "\\", "\n") if quote else ("```", '"', "'")
        found = yield from _up_to(reader, *ends, watch=watch)
        if found in ("", "```"):
            return
        watch(found)
        if found != "\\":
            quote = "" if quote else found
        elif reader.at < len(reader.text) or (yield from reader.more()):
            watch(reader.text[reader.at])
            reader.at += 1


def _quoted_form(writer: GrammarWriter, tools: ToolSchemas, dialect: Dialect) -> str:
    """Return the grammar expression of a call whose strings are between special tokens."""
    calls = []
    for name, schema in tools.items():
        values = ValueGrammar(writer, dialect, schema, f"the tool {name}")
        parts = []
        for key, each, is_required in values.arguments():
            parts.append((f"{writer.text(f'{values.checked_name(key)}:')} {values.value(each)}", is_required))
        calls.append(f"{writer.text(f'call:{name}{{')} {values.members(parts, ',')} {writer.text('}')}")
    return writer.rule(writer.any_of(calls))


def _quoted_call(
    reader: TextReader, quote: str, end: str, pieces: AnswerPieces, tools: ToolSchemas
) -> Steps[list[Call] | None]:
    """Read ``call:name{key:<|"|>text<|"|>,other:5}`` up to its end mark, valid or not. Only its strings and keys have
    to be converted to JSON.
    """
    yield from reader.space()
    name = (yield from reader.run(_NAME)) if (yield from reader.literal("call:")) else ""
    if name not in tools or not (yield from reader.literal("{")):
        yield from _up_to(reader, end)
        return None
    written = []
    stream = JsonStream(pieces.begin_call(name))

    def add(text: str) -> None:
        written.append(text)
        stream.push(text)

    add("{")
    while (yield from _unquoted(reader, quote, end, add)) == quote:
        add('"')
        if (yield from _up_to(reader, quote, end, watch=StringStream(add, trims=False))) != quote:
            return None
        add('"')
    return json_call(name, "".join(written), tools)


def _unquoted(reader: TextReader, quote: str, end: str, add: Callable[[str], None]) -> Steps[str]:
    """Read the text outside of quotes, and convert it to JSON.

    :param add: gets the JSON
    :returns: the quote or end mark that follows, which has been read; empty: the answer ends
    """
    while reader.at < len(reader.text) or (yield from reader.more()):
        mark = yield from reader.one_of((quote, end))
        if mark is not None:
            return mark
        word = yield from reader.run(_WORD)
        if word:
            space = yield from reader.space()
            is_key = _KEY.fullmatch(word) and reader.text.startswith(":", reader.at)
            add((json.dumps(word, ensure_ascii=False) if is_key else word) + space)
        elif (yield from reader.literal('"')):  # a JSON string
            add('"')
            mark = yield from _up_to(reader, '"', "\\", end, watch=add)
            while mark == "\\":
                add(mark + ((yield from reader.one_of(('"', "\\"))) or ""))
                mark = yield from _up_to(reader, '"', "\\", end, watch=add)
            if mark != '"':
                return mark
            add('"')
        else:
            add(reader.text[reader.at])
            reader.at += 1
    return ""


def _up_to(reader: TextReader, *words: str, watch: Callable[[str], None] | None = None) -> Steps[str]:
    """Read the text up to the first of these words, and the word; without one, to the end of the answer.

    :returns: the word; empty: the answer ends
    """
    found = yield from reader.until(*words, watch=watch)
    if found is not None:
        return found[1]
    reader.at = len(reader.text)
    return ""


FORMAT = _Gemma()
