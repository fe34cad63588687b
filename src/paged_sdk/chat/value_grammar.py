"""Write grammars of arguments that are no JSON: Python's literals, and texts that stand between marks as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from attrs import frozen

from paged_sdk.chat.grammar_writer import GrammarWriter
from paged_sdk.errors import ConstraintError
from paged_sdk.types.patterns import portable_pattern

__all__ = ["Dialect", "ValueGrammar", "allows_strings"]

_SAYS_NOTHING: Final = frozenset(
    {"title", "description", "default", "examples", "$comment", "$schema", "$id", "$defs", "definitions", "deprecated"}
    | {"readOnly", "writeOnly", "nullable"}
)
_OF_STRINGS: Final = frozenset({"minLength", "maxLength", "pattern", "format"})
_OF_NUMBERS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_OF_LISTS: Final = frozenset({"items", "minItems", "maxItems"})
_OF_OBJECTS: Final = frozenset({"properties", "required", "additionalProperties"})
_ALL_TYPES: Final = ("string", "number", "boolean", "null", "array", "object")


@frozen(kw_only=True)
class Dialect:
    """Says how values are written.

    :ivar words: how true, false and null are
    :ivar quote: strings stand as they are between two of these; None: as in JSON
    :ivar bare_keys: names of properties are not quoted
    :ivar comma: between items, and
    :ivar colon: between a name and its value
    """

    words: Mapping[object, str]
    quote: str | None = None
    bare_keys: bool = False
    comma: str = ", "
    colon: str = ": "


class ValueGrammar:
    """Writes the values that a JSON schema describes.

    :param root: the schema of all arguments, to which references lead
    :param label: says whose arguments they are
    """

    def __init__(self, writer: GrammarWriter, dialect: Dialect, root: Mapping[str, Any], label: str) -> None:
        self._writer = writer
        self._dialect = dialect
        self._root = root
        self._label = label
        self._known: dict[str, str] = {}

    def arguments(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield name, schema and whether it is required of each argument.

        :raises ConstraintError: the tool's schema says something else, too
        """
        self._check(self._root, _OF_OBJECTS | {"type"})
        properties = self._root.get("properties", {})
        required = self._root.get("required", ())
        for name in required:
            if name not in properties:
                raise self._refusal("required", f"{name!r} is required, and not among the properties")
        yield from ((name, schema, name in required) for name, schema in properties.items())

    def checked_name(self, name: str) -> str:
        """Return a name that stands without quotes.

        :raises ConstraintError: it needs some
        """
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name):
            raise self._refusal("properties", f"the name {name!r} cannot be written in the model's format")
        return name

    def value(self, schema: Any) -> str:
        """Return the expression of a value.

        :raises ConstraintError: the schema says what cannot be written here
        """
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise self._refusal("", f"{schema!r} describes no value")
        known = json.dumps(schema)
        if known not in self._known:
            self._known[known] = name = self._writer.name()
            self._writer.define(name, self._any_of(schema))
        return self._known[known]

    def raw_string(self, schema: Mapping[str, Any], ending: str) -> str:
        """Return the expression of a string that stands as it is before an ending, which it does not hold.

        :param ending: a text, or a mark
        """
        writer = self._writer
        options = list(self._strings(schema))
        expressions = []
        for option in options:
            if isinstance(option, str):
                if ending.strip() in option:
                    raise self._refusal("enum", f"{option!r} holds {ending.strip()}")
                expressions.append(writer.text(option + ending))
            elif writer.is_mark(ending):
                expressions.append(f"{writer.pattern(self._pattern(option, ending))} {writer.text(ending)}")
            else:
                expressions.append(writer.pattern_before(self._pattern(option, ending.strip()), ending))
        if not expressions:
            raise self._refusal("type", "it allows no string")
        return writer.any_of(expressions)

    def members(self, parts: list[tuple[str, bool]], comma: str) -> str:
        """Return the expression of things in order with commas between them, those left out that are not required."""
        writer = self._writer
        comma = writer.text(comma) if comma else '""'
        rest, whole = '""', '""'
        for part, is_required in reversed(parts):
            later, alone = f"{comma} {part} {rest}", f"{part} {rest}"
            whole = alone if is_required else writer.any_of((alone, whole))
            rest = later if is_required else writer.any_of((later, rest))
            rest, whole = writer.rule(rest), writer.rule(whole)
        return whole

    def _any_of(self, schema: Mapping[str, Any]) -> str:
        writer, words = self._writer, self._dialect.words
        options = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if options is not None:
            self._check(schema, {"enum", "const", "type"})
            return writer.any_of([self._constant(each) for each in options])
        if "anyOf" in schema:
            self._check(schema, {"anyOf"})
            return writer.any_of([self.value(each) for each in schema["anyOf"]])
        if "$ref" in schema:
            self._check(schema, {"$ref"})
            return self.value(self._target(schema["$ref"]))
        types = schema.get("type", _ALL_TYPES)
        types = [types] if isinstance(types, str) else list(types)
        expressions = []
        self._check(schema, {"type"} | _OF_STRINGS | _OF_NUMBERS | _OF_LISTS | _OF_OBJECTS)
        for kind in types:
            match kind:
                case "string":
                    expressions.append(self._string({"type": kind} | _only(schema, _OF_STRINGS)))
                case "integer" | "number":
                    expressions.append(writer.json({"type": kind} | _only(schema, _OF_NUMBERS), self._label))
                case "boolean":
                    expressions += [writer.text(words[True]), writer.text(words[False])]
                case "null":
                    expressions.append(writer.text(words[None]))
                case "array":
                    expressions.append(self._list(schema))
                case "object":
                    expressions.append(self._object(schema))
                case _:
                    raise self._refusal("type", f"{kind!r} is no type")
        return writer.any_of(expressions)

    def _string(self, schema: Mapping[str, Any]) -> str:
        quote = self._dialect.quote
        if quote is None:
            return self._writer.json(schema, self._label)
        return f"{self._writer.text(quote)} {self.raw_string(schema, quote)}"

    def _list(self, schema: Mapping[str, Any]) -> str:
        text = self._writer.text
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return text("[]")
        items = item = self.value(schema.get("items", True))
        if most != 1:
            more = f"{max(0, least - 1)},{'' if most is None else most - 1}"
            items = f"{item} ({text(self._dialect.comma)} {item}){{{more}}}"
        return f"{text('[')} {items if least else self._writer.any_of((items, chr(34) * 2))} {text(']')}"

    def _object(self, schema: Mapping[str, Any]) -> str:
        text, dialect = self._writer.text, self._dialect
        properties, required = schema.get("properties", {}), schema.get("required", ())
        extra = schema.get("additionalProperties", not properties)
        for name in required:
            if name not in properties:
                raise self._refusal("required", f"{name!r} is required, and not among the properties")
        if properties:
            parts = [
                (f"{text(self._key(name) + dialect.colon)} {self.value(each)}", name in required)
                for name, each in properties.items()
            ]
            inner = self.members(parts, dialect.comma)
        elif extra is False:
            inner = '""'
        else:
            key = self._writer.pattern("/[A-Za-z_][A-Za-z0-9_]*/" if dialect.bare_keys else r'/"[^"\\\x00-\x1f]*"/')
            entry = self._writer.name()
            self._writer.define(entry, f"{key} {text(dialect.colon)} {self.value(extra)}")
            inner = self._writer.any_of((f"{entry} ({text(dialect.comma)} {entry})*", '""'))
        return f"{text('{')} {inner} {text('}')}"

    def _constant(self, value: Any) -> str:
        """Return the expression of one value."""
        return self._writer.text(self._written(value))

    def _written(self, value: Any) -> str:
        dialect, written = self._dialect, self._written
        if isinstance(value, str):
            if dialect.quote is None:
                return json.dumps(value, ensure_ascii=False)
            if dialect.quote in value:
                raise self._refusal("enum", f"{value!r} holds {dialect.quote}")
            return dialect.quote + value + dialect.quote
        if isinstance(value, Mapping):
            entries = (self._key(name) + dialect.colon + written(each) for name, each in value.items())
            return "{" + dialect.comma.join(entries) + "}"
        if isinstance(value, list):
            return "[" + dialect.comma.join(map(written, value)) + "]"
        return dialect.words[value] if value is None or isinstance(value, bool) else json.dumps(value)

    def _key(self, name: str) -> str:
        return self.checked_name(name) if self._dialect.bare_keys else json.dumps(name, ensure_ascii=False)

    def _strings(self, schema: Any) -> Iterator[str | Mapping[str, Any]]:
        """Yield the strings that a schema allows: such as are named, and schemas of others."""
        if schema is True:
            yield {}
        elif not isinstance(schema, Mapping):
            return
        elif "$ref" in schema:
            self._check(schema, {"$ref"})
            yield from self._strings(self._target(schema["$ref"]))
        elif "anyOf" in schema:
            self._check(schema, {"anyOf"})
            for part in schema["anyOf"]:
                yield from self._strings(part)
        elif "enum" in schema or "const" in schema:
            self._check(schema, {"enum", "const", "type"})
            options = schema.get("enum", [schema.get("const")])
            yield from (each for each in options if isinstance(each, str))
        elif "string" in (kind := schema.get("type", "string")) or kind == "string":
            self._check(schema, {"type"} | _OF_STRINGS | _OF_NUMBERS | _OF_LISTS | _OF_OBJECTS)
            yield _only(schema, _OF_STRINGS)

    def _pattern(self, schema: Mapping[str, Any], ending: str) -> str:
        """Return the expression of the strings of a schema that do not hold an ending."""
        parts = [rf"~/(?s:.*){_escaped(re.escape(ending))}(?s:.*)/"]
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        parts.insert(
            0, f"/(?s:.{{{least},{'' if most is None else most}}})/" if least or most is not None else "/(?s:.*)/"
        )
        if "format" in schema:
            raise self._refusal("format", "it cannot be enforced in the model's format")
        if "pattern" in schema:
            parts.append(f"/{_escaped(self._whole(schema['pattern']))}/")
        return " & ".join(parts)

    def _whole(self, pattern: Any) -> str:
        """Return an expression that matches a whole text in which another one is found."""
        if not isinstance(pattern, str):
            raise self._refusal("pattern", f"{pattern!r} is no expression")
        try:
            pattern = portable_pattern(pattern)
        except ValueError as error:
            raise self._refusal("pattern", f"{pattern!r}: {error}") from None
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        if (begins or ends) and _has_alternatives(pattern):
            raise self._refusal("pattern", f"{pattern!r} has alternatives beside ^ or $: put them in parentheses")
        inner = pattern[begins : len(pattern) - ends]
        return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"

    def _target(self, reference: Any) -> Any:
        """Return the schema that a reference leads to."""
        target: Any = self._root
        parts = reference.split("/") if isinstance(reference, str) else [""]
        if parts[0] != "#":
            raise self._refusal("$ref", f"{reference!r} leads out of the schema")
        for part in parts[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or key not in target:
                raise self._refusal("$ref", f"{reference!r} leads nowhere")
            target = target[key]
        return target

    def _check(self, schema: Mapping[str, Any], known: frozenset[str] | set[str]) -> None:
        for keyword in schema:
            if keyword not in known and keyword not in _SAYS_NOTHING:
                raise self._refusal(keyword, f"{keyword} cannot be enforced in the model's format")

    def _refusal(self, keyword: str, reason: str) -> ConstraintError:
        return ConstraintError(
            f"the constraint (tools) cannot be enforced: {self._label}: {reason}", kind="tools", keyword=keyword
        )


def allows_strings(schema: Any, root: Mapping[str, Any] | None = None, depth: int = 8) -> bool:
    """Tell whether a schema allows strings.

    :param root: to which references lead
    """
    if not isinstance(schema, Mapping) or not depth:
        return True
    inner = partial(allows_strings, root=root, depth=depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and root is not None:
        target: Any = root
        for part in reference.split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return inner(target)
    parts = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(parts, list):
        return any(map(inner, parts))
    if "const" in schema:
        return isinstance(schema["const"], str)
    if "enum" in schema and "type" not in schema:
        return any(isinstance(value, str) for value in schema["enum"])
    kind = schema.get("type", "string")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def _only(schema: Mapping[str, Any], keywords: frozenset[str]) -> dict[str, Any]:
    return {keyword: value for keyword, value in schema.items() if keyword in keywords}


def _escaped(expression: str) -> str:
    """Return an expression as it stands between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression).replace("\n", r"\n")


def _has_alternatives(pattern: str) -> bool:
    depth, in_class, escaped = 0, False, False
    for character in pattern:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and not depth:
            return True
    return False
