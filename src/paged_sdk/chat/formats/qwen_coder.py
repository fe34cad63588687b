"""Read calls as Qwen3-Coder and Seed-OSS write them: one tag for the function, and one for each argument.

A value stands in its tag as it is. Whether it is a string or JSON is a matter of the tool's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_sdk.chat.answer_format import MarkedCalls, ToolSchemas
from paged_sdk.chat.answer_pieces import Call
from paged_sdk.chat.text_reader import Steps, TextReader, json_of

__all__ = ["FORMAT"]

_WORDS = {"True": True, "False": False, "None": None}


class _QwenCoder(MarkedCalls):
    # The model leaves the outer tag out at times.
    call_marks = ("<tool_call>", "<function=")
    fillers = ("<seed:tool_call>", "</seed:tool_call>")

    def is_written_by(self, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template

    def calls(self, mark: str, reader: TextReader, tools: ToolSchemas) -> Steps[list[Call] | None]:
        if mark == "<tool_call>":
            yield from reader.space()
            if not (yield from reader.literal("<function=")):
                return None
        name = yield from reader.until(">", "\n")
        if name is None or name[1] != ">" or name[0] not in tools:
            return None
        arguments: dict[str, Any] = {}
        while True:
            yield from reader.space()
            tag = yield from reader.one_of(("</function>", "<parameter="))
            if tag is None:
                return None
            if tag == "</function>":
                break
            key = yield from reader.until(">", "\n")
            value = yield from reader.until("</parameter>")
            if key is None or value is None or key[1] != ">" or key[0] in arguments:
                return None
            schema = tools[name[0]].get("properties", {}).get(key[0], {})
            arguments[key[0]] = _value_of(value[0].removeprefix("\n").removesuffix("\n"), schema)
        if mark == "<tool_call>":
            yield from reader.space()
            yield from reader.literal("</tool_call>")
        return [Call.of(name[0], arguments)]


def _value_of(text: str, schema: Any) -> Any:
    """Return what a value's text means: itself where its schema allows strings, or where it is nothing else."""
    if _allows_strings(schema):
        return text
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    try:
        return json_of(text)
    except ValueError:
        return text


def _allows_strings(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return True
    parts = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(parts, list):
        return any(map(_allows_strings, parts))
    if "enum" in schema and "type" not in schema:
        return any(isinstance(value, str) for value in schema["enum"])
    kind = schema.get("type", "string")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


FORMAT = _QwenCoder()
