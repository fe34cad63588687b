"""Read calls as Gemma writes them: Python in a block of code named ``tool_code``."""

from __future__ import annotations

from paged_sdk.chat.answer_format import MarkedCalls, ToolSchemas
from paged_sdk.chat.answer_pieces import Call
from paged_sdk.chat.python_calls import python_calls
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]


class _Gemma(MarkedCalls):
    call_marks = ("```tool_code",)

    def is_written_by(self, template: str) -> bool:
        return "tool_code" in template

    def calls(self, mark: str, reader: TextReader, tools: ToolSchemas) -> Steps[list[Call] | None]:
        start = reader.at
        block = yield from reader.until("```")
        if block is None:  # the end token may come in place of the closing mark
            reader.at = len(reader.text)
        return python_calls(reader.text[start:] if block is None else block[0], tools)


FORMAT = _Gemma()
