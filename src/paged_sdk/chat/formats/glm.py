"""Read tool calls of GLM 4.5 and later: a name, and tags around the name and the value of each argument."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from paged_sdk.chat.answer_format import AnswerFormat, MarkedCalls, ToolSchemas
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.tagged_values import TaggedArguments, tagged_form
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]

_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@frozen
class _Glm(MarkedCalls):
    """Reads the format of GLM 4.5, or of 4.7.

    :ivar line_break: the text between tags
    """

    line_break: str = "\n"

    call_marks: ClassVar[tuple[str, ...]] = ("<tool_call>",)

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.call_marks, "</tool_call>", *_TAGS)

    def is_written_by(self, template: str) -> bool:
        return "<arg_key>" in template

    def as_written_by(self, template: str) -> AnswerFormat:
        return _Glm(line_break="" if "</arg_key><arg_value>" in template else "\n")

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        line = self.line_break
        call = tagged_form(
            writer,
            tools,
            begin_call=lambda name: f"{name}{line}",
            begin=lambda key: f"<arg_key>{key}</arg_key>{line}<arg_value>",
            end="</arg_value>",
            after=line,
        )
        return CallForm(
            opening="<tool_call>",
            call=call,
            separator=f"</tool_call>{line}<tool_call>",
            closing="</tool_call>",
        )

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        head = yield from reader.until("<arg_key>", "</tool_call>")
        name = "" if head is None else head[0].strip()
        if head is None or name not in tools:
            return None
        arguments = TaggedArguments(pieces.begin_call(name), tools[name], has_breaks=False)
        tag: str | None = head[1]
        while tag == "<arg_key>":
            key = yield from reader.until("</arg_key>", "\n")
            yield from reader.space()
            if key is None or key[1] != "</arg_key>" or not (yield from reader.literal("<arg_value>")):
                return None
            if not (yield from arguments.read(key[0].strip(), reader, "</arg_value>")):
                return None
            yield from reader.space()
            tag = yield from reader.one_of(("<arg_key>", "</tool_call>"))
        return None if tag is None else [Call.of(name, arguments.values)]


FORMAT = _Glm()
