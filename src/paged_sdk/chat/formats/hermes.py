"""Read tool calls of Hermes, Qwen and the many models that follow them: JSON between ``<tool_call>`` tags.

Some models omit the tags: Qwen2.5-Coder-1.5B wrote every call as a code block. So an answer that is such JSON, or a
code block of it, is also a call, if it has a name and arguments.
"""

from __future__ import annotations

from typing import ClassVar

from paged_sdk.chat.answer_format import MarkedCalls, ToolSchemas, named_json_form, read_json_calls
from paged_sdk.chat.answer_pieces import AnswerPieces, Call
from paged_sdk.chat.grammar_writer import CallForm, GrammarWriter
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]


class _Hermes(MarkedCalls):
    call_marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "```json")
    openings: ClassVar[tuple[str, ...]] = ("{",)

    def is_written_by(self, template: str) -> bool:
        others = ("<parameter=", "<arg_key>")  # Qwen3-Coder and GLM have other content between these tags
        return "<tool_call>" in template and not any(sign in template for sign in others)

    def call_form(self, writer: GrammarWriter, tools: ToolSchemas) -> CallForm:
        return CallForm(
            opening="<tool_call>\n",
            call=named_json_form(writer, tools),
            separator="\n</tool_call>\n<tool_call>\n",
            closing="\n</tool_call>",
        )

    def calls(
        self, mark: str, reader: TextReader, pieces: AnswerPieces, tools: ToolSchemas
    ) -> Steps[list[Call] | None]:
        if mark == "{":
            reader.at -= 1
        yield from reader.space()
        start = reader.at
        calls = yield from read_json_calls(reader, pieces, tools)
        if calls is None or (mark != "<tool_call>" and '"arguments"' not in reader.text[start : reader.at]):
            return None
        yield from reader.space()
        # The model may end the answer instead of closing the call.
        closed = yield from reader.literal("```" if mark == "```json" else "</tool_call>")
        return calls if closed or reader.at == len(reader.text) else None


FORMAT = _Hermes()
