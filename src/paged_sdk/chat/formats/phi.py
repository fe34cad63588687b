"""Read tool calls of Phi-3.5 and Phi-4: a JSON list, after ``functools`` or between tags."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from paged_sdk.chat.answer_format import AnswerFormat, MarkedCalls, ToolSchemas, named_json_form, read_json_calls
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]


@frozen
class _Phi(MarkedCalls):
    """Reads the format of Phi-3.5, or of Phi-4.

    :ivar has_tags: whether calls are between tags (Phi-4)
    """

    has_tags: bool = False

    call_marks: ClassVar[tuple[str, ...]] = ("<|tool_call|>", "functools[")
    fillers: ClassVar[tuple[str, ...]] = ("<|/tool_call|>",)

    def is_written_by(self, template: str) -> bool:
        # Phi-4-mini's template has only the tag around the list of tools. Granite's has the tag of calls, not this one.
        return "functools[" in template or "<|tool|>" in template

    @property
    def own_mark(self) -> str:
        return self.call_marks[0 if self.has_tags else 1]

    def as_written_by(self, template: str) -> AnswerFormat:
        return _Phi(has_tags="functools[" not in template)

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        return CallForm(
            opening="<|tool_call|>[" if self.has_tags else "functools[",
            call=named_json_form(writer, tools),
            separator=", ",
            closing="]<|/tool_call|>" if self.has_tags else "]",
        )

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        if mark == "functools[":
            reader.at -= 1
        yield from reader.space()
        return (yield from read_json_calls(reader, pieces, tools))


FORMAT = _Phi()
