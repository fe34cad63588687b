"""Read tool calls of Kimi K2: JSON between special tokens, after an id that contains the tool's name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Final

from attrs import evolve

from paged_sdk.chat.answer_format import MarkedCalls, ToolSchemas, read_json_call
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.text_reader import Steps, TextReader
from paged_sdk.types.messages import Message

__all__ = ["FORMAT"]

_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID: Final = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*")


class _Kimi(MarkedCalls):
    arguments_are_text = True
    call_marks: ClassVar[tuple[str, ...]] = (_BEGIN,)
    fillers: ClassVar[tuple[str, ...]] = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

    @property
    def marks(self) -> tuple[str, ...]:
        return (*super().marks, _ARGUMENTS, _END)

    def is_written_by(self, template: str) -> bool:
        return self.fillers[0] in template

    def chat_as_template_takes(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose calls have ids in the model's own form: the template writes only the id of a call, and
        the model reads the tool's name from it.
        """
        ids: dict[str | None, str] = {}
        changed = []
        num_calls = 0
        for message in super().chat_as_template_takes(messages):
            calls = []
            for call in message.tool_calls:
                ids[call.id] = f"functions.{call.name}:{num_calls}"
                calls.append(evolve(call, id=ids[call.id]))
                num_calls += 1
            answered = message.tool_call_id
            changed.append(evolve(message, tool_calls=calls, tool_call_id=ids.get(answered, answered)))
        return changed

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        number = writer.pattern("/[0-9]{1,3}/")
        calls = []
        for name, schema in tools.items():
            arguments = writer.json({"additionalProperties": False, **schema}, f"the tool {name}")
            calls.append(f"{writer.text(f'{name}:')} {number} {writer.text(_ARGUMENTS)} {arguments}")
        begin = f"{_BEGIN}functions."
        return CallForm(
            opening=f"{self.fillers[0]}{begin}",
            call=writer.rule(writer.any_of(calls)),
            separator=f"{_END}{begin}",
            closing=f"{_END}{self.fillers[1]}",
        )

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        head = yield from reader.until(_ARGUMENTS, _END)
        found = None if head is None or head[1] != _ARGUMENTS else _ID.fullmatch(head[0])
        if found is None:
            return None
        yield from reader.space()
        calls = yield from read_json_call(found[1], reader, pieces, tools)
        yield from reader.space()
        yield from reader.literal(_END)
        return calls


FORMAT = _Kimi()
