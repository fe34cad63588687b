"""Read and write arguments between tags: strings verbatim, all other values as JSON.

The tool's schema decides whether a value is a string.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from paged_sdk.chat.answer_format import ToolSchemas
from paged_sdk.chat.grammar_writer import GrammarWriter
from paged_sdk.chat.json_stream import StringStream
from paged_sdk.chat.text_reader import Steps, TextReader, json_of
from paged_sdk.chat.value_grammar import Dialect, ValueGrammar
from paged_sdk.chat.value_schemas import allows_strings, properties_of

__all__ = ["TaggedArguments", "tagged_form"]

_WORDS: Final = {"True": True, "False": False, "None": None}
_JSON: Final = Dialect(words={True: "true", False: "false", None: "null"})


class TaggedArguments:
    """Reads the arguments of a call, and streams them as JSON while they arrive.

    :param show: gets the text of a JSON object of the arguments, without the closing brace
    :param schema: the schema of all arguments
    :param has_breaks: whether line breaks separate values from their tags
    :ivar values: the arguments by name
    """

    def __init__(self, show: Callable[[str], None], schema: Mapping[str, Any], *, has_breaks: bool = True) -> None:
        self.values: dict[str, Any] = {}
        self._show = show
        self._schema = schema
        self._has_breaks = has_breaks

    def read(self, name: str, reader: TextReader, end: str) -> Steps[bool]:
        """Read the value of an argument.

        :param end: the tag that ends the value
        :returns: False if the value does not end, or the argument has been read before
        """
        if name in self.values:
            return False
        head = f"{', ' if self.values else '{'}{json.dumps(name, ensure_ascii=False)}: "
        is_text = self._is_text(name)
        if is_text:
            self._show(f'{head}"')
        value = yield from reader.until(
            end, watch=StringStream(self._show, trims=self._has_breaks) if is_text else None
        )
        if value is None:
            return False
        text = value[0].removeprefix("\n").removesuffix("\n") if self._has_breaks else value[0]
        self.values[name] = text if is_text else _value_of(text)
        self._show('"' if is_text else head + json.dumps(self.values[name], ensure_ascii=False))
        return True

    def _is_text(self, name: str) -> bool:
        return allows_strings(properties_of(self._schema).get(name, {}), self._schema)


def _value_of(text: str) -> Any:
    """Return the value that a text means if it need not be a string: JSON or a Python constant, otherwise the text."""
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
    *,
    after: str,
    end_call: str = "",
) -> str:
    """Return the grammar expression of a call.

    :param begin_call: maps the name of a tool to the text that begins its call
    :param begin: maps the name of an argument to the text before its value
    :param end: the text that ends a value, including a line break before the tag
    :param after: the text after ``end``
    :param end_call: the text that ends a call
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
            part = writer.rule(f"{writer.text(begin(key))} {value} {writer.text(after)}")
            parts.append((part, is_required))
        calls.append(f"{writer.text(begin_call(name))} {values.members(parts, '')} {writer.text(end_call)}")
    return writer.rule(writer.any_of(calls))
