"""Read tool calls of Llama 3 and 4: an answer that is JSON or a Python list of calls, or a call after a mark."""

from __future__ import annotations

from typing import ClassVar

from attrs import evolve, frozen

from paged_sdk.chat.answer_format import (
    AnswerFormat,
    CallsOrContent,
    MarkedCalls,
    ToolSchemas,
    beginner,
    json_calls,
    json_form,
    read_json_call,
    read_json_calls,
)
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.json_stream import JsonCallsWatch
from paged_sdk.chat.python_calls import PythonCalls, python_form
from paged_sdk.chat.text_reader import Steps, TextReader
from paged_sdk.errors import ConstraintError

__all__ = ["FORMAT"]

_SIGNS = ("<|python_tag|>", "<|python_start|>", "func_name1(")


@frozen
class _Llama(MarkedCalls):
    """Reads the JSON and the Python format.

    :ivar is_python: whether the template asks for a Python list of calls
    :ivar lists_json: whether a list of calls may be JSON too
    """

    is_python: bool = False
    lists_json: bool = True

    openings: ClassVar[tuple[str, ...]] = ("{", "[", ";")
    call_marks: ClassVar[tuple[str, ...]] = ("<|python_tag|>", "<function=")
    fillers: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")

    def is_written_by(self, template: str) -> bool:
        # Llama 3.2's template describes its JSON, without any mark.
        is_32 = "<|start_header_id|>" in template and '"parameters": ' in template
        return (is_32 or any(sign in template for sign in _SIGNS)) and "<tool_call>" not in template

    @property
    def own_mark(self) -> str:
        return "[" if self.is_python else "{"

    def as_written_by(self, template: str) -> AnswerFormat:
        return _Llama(is_python="func_name1(" in template)

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        if self.is_python:
            return CallForm(opening="[", call=python_form(writer, tools), separator=", ", closing="]")
        return CallForm(call=json_form(writer, tools, lambda name: f'{{"name": "{name}", "parameters": ', "}"))

    @property
    def either(self) -> AnswerFormat:
        return CallsOrContent(evolve(self, lists_json=False))

    def calls_or(self, writer: GrammarWriter, tools: ToolSchemas, answer: str) -> str:
        if not self.is_python:
            # llguidance takes the longest beginning of a call for one, and does not go back where it is no call.
            raise ConstraintError(
                "the model writes calls as JSON, which a grammar cannot tell from an answer in JSON: give tool_choice "
                '"none", or no schema',
                kind="json_schema",
            )
        return super().calls_or(writer, tools, answer)

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        if mark == "<function=":
            return (yield from _tagged(reader, pieces, tools))
        if mark == ";":
            yield from reader.space()
        elif mark in self.openings:
            reader.at -= len(mark)
        else:
            yield from reader.space()
        if (yield from reader.literal("{")):
            reader.at -= 1
            return (yield from read_json_calls(reader, pieces, tools))
        found = PythonCalls(beginner(pieces, tools), tools)
        if (yield from reader.literal("[")):
            reader.at -= 1
            in_json = tools if self.lists_json else {}
            listed = JsonCallsWatch(beginner(pieces, in_json))

            def watch(text: str) -> None:  # no text is the beginning of both
                listed(text)
                found(text)

            text = yield from reader.python_text(watch)
            return None if text is None else json_calls(text, in_json) or found.end()
        # <|python_tag|>brave_search.call(query="...") calls a built-in tool. Other Python code is not a call.
        name = yield from reader.until("(", "\n", " ")
        if name is None or name[1] != "(":
            return None
        reader.at -= 1
        found(name[0].removesuffix(".call"))
        return None if (yield from reader.python_text(found)) is None else found.end()


def _tagged(reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas) -> Steps[list[Call] | None]:
    """Read the rest of ``<function=name>{...}</function>`` after ``<function=``."""
    name = yield from reader.until(">", "\n")
    if name is None or name[1] != ">":
        return None
    calls = yield from read_json_call(name[0], reader, pieces, tools)
    yield from reader.literal("</function>")
    return calls


FORMAT = _Llama()
