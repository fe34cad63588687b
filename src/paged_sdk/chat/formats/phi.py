"""Read calls as Phi-3.5 and Phi-4 write them: a JSON list, after ``functools`` or between tags."""

from __future__ import annotations

from paged_sdk.chat.answer_format import MarkedCalls, ToolSchemas, json_calls
from paged_sdk.chat.answer_pieces import Call
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]


class _Phi(MarkedCalls):
    call_marks = ("<|tool_call|>", "functools[")
    fillers = ("<|/tool_call|>",)

    def is_written_by(self, template: str) -> bool:
        # Phi-4-mini's template has the tag around the tools only. Granite's has the tag of calls, and other tools.
        return "functools[" in template or "<|tool|>" in template

    def calls(self, mark: str, reader: TextReader, tools: ToolSchemas) -> Steps[list[Call] | None]:
        if mark == "functools[":
            reader.at -= 1
        yield from reader.space()
        return json_calls((yield from reader.json_text()), tools)


FORMAT = _Phi()
