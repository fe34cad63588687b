"""Read tool calls of Granite 3: a JSON list after a special token. Granite 4 uses the Hermes format."""

from __future__ import annotations

from typing import ClassVar

from paged_sdk.chat.answer_format import MarkedCalls, ToolSchemas, named_json_form, read_json_calls
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]


class _Granite(MarkedCalls):
    call_marks: ClassVar[tuple[str, ...]] = ("<|tool_call|>",)

    def is_written_by(self, template: str) -> bool:
        return "<|start_of_role|>" in template and "<|tool_call|>" in template

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        return CallForm(
            opening="<|tool_call|>[",
            call=named_json_form(writer, tools),
            separator=", ",
            closing="]",
        )

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        yield from reader.space()
        return (yield from read_json_calls(reader, pieces, tools))


FORMAT = _Granite()
