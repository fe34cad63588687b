"""Read calls as Hermes, Qwen and the many models that follow them write them: JSON between ``<tool_call>`` tags."""

from __future__ import annotations

from paged_sdk.chat.answer_format import MarkedCalls, ToolSchemas, json_calls
from paged_sdk.chat.answer_pieces import Call
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]


class _Hermes(MarkedCalls):
    call_marks = ("<tool_call>",)

    def is_written_by(self, template: str) -> bool:
        others = ("<parameter=", "<arg_key>")  # Qwen3-Coder and GLM put no JSON between these tags
        return "<tool_call>" in template and not any(sign in template for sign in others)

    def calls(self, mark: str, reader: TextReader, tools: ToolSchemas) -> Steps[list[Call] | None]:
        yield from reader.space()
        calls = json_calls((yield from reader.json_text()), tools)
        if calls is None:
            return None
        yield from reader.space()
        # The end token may come in place of the closing tag.
        closed = yield from reader.literal("</tool_call>")
        return calls if closed or reader.at == len(reader.text) else None


FORMAT = _Hermes()
