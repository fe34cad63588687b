"""Read tool calls of Cohere's Command R7B and Command A: a JSON list between special tokens."""

from __future__ import annotations

from typing import ClassVar, Final

from paged_sdk.chat.answer_format import MarkedCalls, ToolSchemas, beginner, json_form
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.json_stream import JsonCallsWatch
from paged_sdk.chat.text_reader import Steps, TextReader, json_of

__all__ = ["FORMAT"]

_ID: Final = r'"tool_call_id"\s*:\s*"\w*"\s*,\s*'
_NAMED: Final = rf'\{{\s*(?:{_ID})?"tool_name"\s*:\s*"([\w.-]+)"\s*,\s*"parameters"\s*:\s*(?=\{{)'


class _Command(MarkedCalls):
    call_marks: ClassVar[tuple[str, ...]] = ("<|START_ACTION|>",)
    fillers: ClassVar[tuple[str, ...]] = (
        "<|END_ACTION|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
    )

    def is_written_by(self, template: str) -> bool:
        return "<|START_ACTION|>" in template

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        number = writer.pattern("/[0-9]{1,3}/")
        call = json_form(writer, tools, lambda name: f'", "tool_name": "{name}", "parameters": ', "}")
        begin = writer.text('{"tool_call_id": "')
        return CallForm(
            opening="<|START_ACTION|>[\n    ",
            call=writer.rule(f"{begin} {number} {call}"),
            separator=",\n    ",
            closing="\n]<|END_ACTION|>",
        )

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        yield from reader.space()
        text = yield from reader.json_text(JsonCallsWatch(beginner(pieces, tools), _NAMED))
        try:
            found = json_of(text or "")
            calls = [(each["tool_name"], each.get("parameters", {})) for each in found]
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        for name, arguments in calls:
            if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
                return None
        yield from reader.space()
        yield from reader.literal("<|END_ACTION|>")
        return [Call.of(name, arguments) for name, arguments in calls] or None


FORMAT = _Command()
