"""Read tool calls of Mistral's models: ``[TOOL_CALLS]`` and a JSON list; for newer ones, a name and arguments."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from attrs import frozen

from paged_sdk.chat.answer_format import (
    AnswerFormat,
    MarkedCalls,
    ToolSchemas,
    json_form,
    named_json_form,
    read_json_call,
    read_json_calls,
)
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]

_NAME: Final = re.compile(r"[\w.-]*")


@frozen
class _Mistral(MarkedCalls):
    """Reads the older format, a JSON list, and the newer one.

    :ivar has_list: whether the template writes the older format
    :ivar space: the text before the list, in the older format
    """

    has_list: bool = True
    space: str = " "

    call_marks: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.call_marks, "[ARGS]", "[CALL_ID]")

    def is_written_by(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    def as_written_by(self, template: str) -> AnswerFormat:
        return _Mistral(has_list="[ARGS]" not in template, space="" if "[TOOL_CALLS][" in template else " ")

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        mark = "[TOOL_CALLS]"
        if not self.has_list:
            return CallForm(opening=mark, call=json_form(writer, tools, lambda name: f"{name}[ARGS]"), separator=mark)
        return CallForm(
            opening=f"{mark}{self.space}[",
            call=named_json_form(writer, tools),
            separator=", ",
            closing="]",
        )

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        yield from reader.space()
        name = yield from reader.run(_NAME)
        if not name:
            return (yield from read_json_calls(reader, pieces, tools))
        if (yield from reader.literal("[CALL_ID]")):
            yield from reader.run(_NAME)
        yield from reader.literal("[ARGS]")
        yield from reader.space()
        return (yield from read_json_call(name, reader, pieces, tools))


FORMAT = _Mistral()
