"""Read calls as Mistral's models write them: ``[TOOL_CALLS]`` and a JSON list, or newer, a name and its arguments."""

from __future__ import annotations

import re
from typing import Final

from paged_sdk.chat.answer_format import MarkedCalls, ToolSchemas, json_call, json_calls
from paged_sdk.chat.answer_pieces import Call
from paged_sdk.chat.text_reader import Steps, TextReader

__all__ = ["FORMAT"]

_NAME: Final = re.compile(r"[\w.-]*")


class _Mistral(MarkedCalls):
    call_marks = ("[TOOL_CALLS]",)

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.call_marks, "[ARGS]", "[CALL_ID]")

    def is_written_by(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    def calls(self, mark: str, reader: TextReader, tools: ToolSchemas) -> Steps[list[Call] | None]:
        yield from reader.space()
        name = yield from reader.run(_NAME)
        if not name:
            return json_calls((yield from reader.json_text()), tools)
        if (yield from reader.literal("[CALL_ID]")):
            yield from reader.run(_NAME)
        yield from reader.literal("[ARGS]")
        yield from reader.space()
        return json_call(name, (yield from reader.json_text()), tools)


FORMAT = _Mistral()
