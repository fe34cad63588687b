"""Read tool calls of DeepSeek's models: JSON between special tokens; for V3 and R1, in a code block."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from paged_sdk.chat.answer_format import AnswerFormat, MarkedCalls, ToolSchemas, json_form, read_json_call
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]

_SEPARATOR, _END = "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@frozen
class _DeepSeek(MarkedCalls):
    """Reads the format of V3 and R1, or of V3.1.

    :ivar has_blocks: whether arguments are in a code block (V3 and R1)
    """

    has_blocks: bool = True

    call_marks: ClassVar[tuple[str, ...]] = ("<｜tool▁call▁begin｜>",)
    arguments_are_text = True
    fillers: ClassVar[tuple[str, ...]] = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

    @property
    def marks(self) -> tuple[str, ...]:
        return (*super().marks, _SEPARATOR, _END)

    def is_written_by(self, template: str) -> bool:
        return "<｜tool▁calls▁begin｜>" in template

    def as_written_by(self, template: str) -> AnswerFormat:
        return _DeepSeek(has_blocks="```json" in template)

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        begin = "<｜tool▁call▁begin｜>" + ("function" + _SEPARATOR if self.has_blocks else "")
        before, after = ("\n```json\n", "\n```") if self.has_blocks else (_SEPARATOR, "")
        return CallForm(
            opening="<｜tool▁calls▁begin｜>" + begin,
            call=json_form(writer, tools, lambda name: name + before, after),
            separator=_END + ("\n" if self.has_blocks else "") + begin,
            closing=_END + "<｜tool▁calls▁end｜>",
        )

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        head = yield from reader.until(_SEPARATOR, _END)
        if head is None or head[1] != _SEPARATOR:
            return None
        name = head[0].strip()
        yield from reader.space()
        if name == "function" and not (yield from reader.literal("{")):
            line = yield from reader.until("\n")  # the name is on a line of its own, before the block
            if line is None:
                return None
            name = line[0].strip()
            yield from reader.literal("```json")
            yield from reader.space()
        elif name == "function":
            reader.at -= 1
        calls = yield from read_json_call(name, reader, pieces, tools)
        yield from reader.space()
        yield from reader.literal("```")
        yield from reader.literal(_END)
        return calls


FORMAT = _DeepSeek()
