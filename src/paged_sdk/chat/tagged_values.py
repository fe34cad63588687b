"""Read and write arguments that stand between tags: strings as they are, all other values as JSON.

Which of both a value is, is a matter of the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from paged_sdk.chat.answer_format import ToolSchemas
from paged_sdk.chat.grammar_writer import GrammarWriter
from paged_sdk.chat.json_stream import StringStream
from paged_sdk.chat.text_reader import Steps, TextReader, json_of
from paged_sdk.chat.value_grammar import Dialect, ValueGrammar, allows_strings, properties_of

__all__ = ["TaggedArguments", "tagged_form"]

_WORDS: Final = {"True": True, "False": False, "None": None}
_JSON: Final = Dialect(words={True: "true", False: "false", None: "null"})


class TaggedArguments:
    """Reads the arguments of a call, and shows them as they arrive.

    :param show: gets JSON of an object that holds them
    :param schema: of all arguments
    :param has_breaks: a value has lines of its own between its tags
    :ivar values: the arguments by name
    """

    def __init__(self, show: Callable[[str], None], schema: Mapping[str, Any], *, has_breaks: bool = True) -> None:
        self.values: dict[str, Any] = {}
        self._show = show
        self._schema = schema
        self._has_breaks = has_breaks

    def read(self, name: str, reader: TextReader, end: str) -> Steps[bool]:
        """Read a value up to the tag that ends it.

        :returns: whether there is one, and none of that name before it
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
    """Return what the text of a value means that is no string: itself where it is nothing else."""
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
    """Return the expression of a call.

    :param begin_call: returns what begins the call of a tool, by its name
    :param begin: returns what begins an argument, by its name
    :param end: ends an argument; the line break before it belongs to it
    :param after: stands behind that
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
