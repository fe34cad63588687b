"""Read and write arguments that stand between tags: strings as they are, all other values as JSON.

Which of both a value is, is a matter of the tool's schema.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from paged_sdk.chat.answer_format import ToolSchemas
from paged_sdk.chat.grammar_writer import GrammarWriter
from paged_sdk.chat.text_reader import json_of
from paged_sdk.chat.value_grammar import Dialect, ValueGrammar, allows_strings

__all__ = ["tagged_form", "tagged_value"]

_WORDS: Final = {"True": True, "False": False, "None": None}
_JSON: Final = Dialect(words={True: "true", False: "false", None: "null"})


def tagged_value(text: str, name: str, schema: Any) -> Any:
    """Return what an argument's text means: itself where its schema allows strings, or where it is nothing else.

    :param schema: of all arguments
    """
    if allows_strings(schema.get("properties", {}).get(name, {}), schema):
        return text
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    try:
        return json_of(text)
    except ValueError:
        return text


def tagged_form(
    writer: GrammarWriter,
    tools: ToolSchemas,
    begin_call: Callable[[str], str],
    begin: Callable[[str], str],
    end: str,
    end_call: str,
) -> str:
    """Return the expression of a call.

    :param begin_call: returns what begins the call of a tool, by its name
    :param begin: returns what begins an argument, by its name
    :param end: ends an argument; the line break before it belongs to it
    :raises ConstraintError: what a schema says cannot be enforced
    """
    calls = []
    for name, schema in tools.items():
        values = ValueGrammar(writer, _JSON, schema, f"the tool {name}")
        parts = []
        for key, each, is_required in values.arguments():
            if any(character in key for character in "<>\n"):
                values.checked_name(key)
            if allows_strings(each, schema):
                value = values.raw_string(each if isinstance(each, dict) else {}, end)
            else:
                roots = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
                value = f"{writer.json({**roots, **each}, f'the tool {name}, {key}')} {writer.text(end)}"
            part = writer.rule(f"{writer.text(begin(key))} {value} {writer.text(_BREAK)}")
            parts.append((part, is_required))
        calls.append(f"{writer.text(begin_call(name))} {values.members(parts, '')} {writer.text(end_call)}")
    return writer.rule(writer.any_of(calls))


_BREAK: Final = "\n"
