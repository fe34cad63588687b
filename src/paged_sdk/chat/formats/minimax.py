"""Read tool calls of MiniMax M2: tags with names as attributes."""

from __future__ import annotations

from typing import ClassVar

from paged_sdk.chat.answer_format import MarkedCalls, ToolSchemas
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.tagged_values import TaggedArguments, tagged_form
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]

_OPENING, _CLOSING = "<minimax:tool_call>", "</minimax:tool_call>"
_PARAMETER = '<parameter name="'


class _MiniMax(MarkedCalls):
    call_marks: ClassVar[tuple[str, ...]] = ('<invoke name="',)
    fillers: ClassVar[tuple[str, ...]] = (_OPENING, _CLOSING)

    def is_written_by(self, template: str) -> bool:
        return _OPENING in template

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        call = tagged_form(
            writer,
            tools,
            begin_call=lambda name: f'<invoke name="{name}">\n',
            begin=lambda key: f'{_PARAMETER}{key}">',
            end="</parameter>",
            after="\n",
            end_call="</invoke>",
        )
        return CallForm(opening=f"{_OPENING}\n", call=call, separator="\n", closing=f"\n{_CLOSING}")

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        name = yield from reader.until('">', "\n")
        if name is None or name[1] != '">' or name[0] not in tools:
            return None
        arguments = TaggedArguments(pieces.begin_call(name[0]), tools[name[0]], has_breaks=False)
        while True:
            yield from reader.space()
            tag = yield from reader.one_of(("</invoke>", _PARAMETER))
            if tag != _PARAMETER:
                return None if tag is None else [Call.of(name[0], arguments.values)]
            key = yield from reader.until('">', "\n")
            if key is None or key[1] != '">' or not (yield from arguments.read(key[0], reader, "</parameter>")):
                return None


FORMAT = _MiniMax()
