"""Write grammars of arguments that are not JSON: Python literals, and strings that are verbatim between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from attrs import frozen

from paged_sdk.chat.grammar_writer import GrammarWriter
from paged_sdk.chat.value_schemas import names_string, whole_pattern, why_malformed
from paged_sdk.errors import ConstraintError
from paged_sdk.types.schema_references import resolve_reference

__all__ = ["Dialect", "ValueGrammar"]

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
    """Describes how values are written.

    :ivar words: how true, false and null are written
    :ivar quote: the mark before and after strings, which are verbatim; None: strings are as in JSON
    :ivar bare_keys: whether names of properties are not quoted
    :ivar comma: text between items
    :ivar colon: text between a name and its value
    """

    words: Mapping[object, str]
    quote: str | None = None
    bare_keys: bool = False
    comma: str = ", "
    colon: str = ": "


class ValueGrammar:
    """Writes grammar expressions of the values that fit a JSON schema.

    :param root: the schema of all arguments, in which references are resolved
    :param label: names the owner of the arguments in errors
    """

    def __init__(self, writer: GrammarWriter, dialect: Dialect, root: Mapping[str, Any], label: str) -> None:
        self._writer = writer
        self._dialect = dialect
        self._root = root
        self._label = label
        self._known: dict[str, str] = {}

    def arguments(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield the name and schema of each argument, and whether it is required.

        :raises ConstraintError: the tool's schema has keywords that cannot be enforced here
        """
        self._check_shapes(self._root)
        self._check(self._root, _OF_OBJECTS | {"type"})
        properties = self._root.get("properties", {})
        required = self._root.get("required", ())
        for name in required:
            if name not in properties:
                raise self._refusal("required", f"{name!r} is required, and not among the properties")
        yield from ((name, schema, name in required) for name, schema in properties.items())

    def checked_name(self, name: str) -> str:
        """Return a name to be written without quotes.

        :raises ConstraintError: it would need quotes
        """
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name):
            raise self._refusal("properties", f"the name {name!r} cannot be written in the model's format")
        return name

    def value(self, schema: Any) -> str:
        """Return the expression of a value.

        :raises ConstraintError: the schema cannot be enforced here
        """
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise self._refusal("", f"the schema of a value is {schema!r}: expected an object or true")
        known = json.dumps(schema)
        if known not in self._known:
            self._known[known] = name = self._writer.name()
            self._writer.define(name, self._any_of(schema))
        return self._known[known]

    def raw_string(self, schema: Mapping[str, Any], ending: str) -> str:
        """Return the expression of a verbatim string and the ending after it, which the string must not contain.

        :param ending: a text, or a mark
        """
        writer = self._writer
        options = list(self._strings(schema, set()))
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
        """Return the expression of parts in order, with commas between them; each may be omitted unless it is required.

        :param parts: expressions, and whether each is required
        """
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
        self._check_shapes(schema)
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
                    raise self._refusal("type", f"{kind!r} is not a type of JSON")
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
        """Return the expression of a single constant."""
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

    def _strings(self, schema: Any, known: set[str]) -> Iterator[str | Mapping[str, Any]]:
        """Yield the strings that a schema allows: single strings, and schemas of strings.

        :param known: references that have already been followed, so that their strings have been yielded; extended here
        """
        if schema is True:
            yield {}
        if not isinstance(schema, Mapping):
            return
        self._check_shapes(schema)
        if "$ref" in schema:
            self._check(schema, {"$ref"})
            target = self._target(schema["$ref"])
            if schema["$ref"] not in known:
                known.add(schema["$ref"])
                yield from self._strings(target, known)
        elif "anyOf" in schema:
            self._check(schema, {"anyOf"})
            for part in schema["anyOf"]:
                yield from self._strings(part, known)
        elif "enum" in schema or "const" in schema:
            self._check(schema, {"enum", "const", "type"})
            options = schema.get("enum", [schema.get("const")])
            yield from (each for each in options if isinstance(each, str))
        elif names_string(schema):
            self._check(schema, {"type"} | _OF_STRINGS | _OF_NUMBERS | _OF_LISTS | _OF_OBJECTS)
            yield _only(schema, _OF_STRINGS)

    def _pattern(self, schema: Mapping[str, Any], ending: str) -> str:
        """Return the terminal expression of the strings that fit a schema and do not contain an ending."""
        parts = [rf"~/(?s:.*){_escaped(re.escape(ending))}(?s:.*)/"]
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        parts.insert(
            0, f"/(?s:.{{{least},{'' if most is None else most}}})/" if least or most is not None else "/(?s:.*)/"
        )
        if "format" in schema:
            raise self._refusal("format", "it cannot be enforced in the model's format")
        if "pattern" in schema:
            try:
                parts.append(f"/{_escaped(whole_pattern(schema['pattern']))}/")
            except ValueError as error:
                raise self._refusal("pattern", str(error)) from None
        return " & ".join(parts)

    def _target(self, reference: Any) -> Any:
        """Return the schema that a reference leads to."""
        try:
            return resolve_reference(self._root, reference)
        except LookupError as error:
            raise self._refusal("$ref", str(error)) from None

    def _check(self, schema: Mapping[str, Any], known: frozenset[str] | set[str]) -> None:
        for keyword in schema:
            if keyword not in known and keyword not in _SAYS_NOTHING:
                raise self._refusal(keyword, f"{keyword} cannot be enforced in the model's format")

    def _check_shapes(self, schema: Mapping[str, Any]) -> None:
        wrong = why_malformed(schema)
        if wrong is not None:
            raise self._refusal(*wrong)

    def _refusal(self, keyword: str, reason: str) -> ConstraintError:
        return ConstraintError(
            f"the constraint (tools) cannot be enforced: {self._label}: {reason}", kind="tools", keyword=keyword
        )


def _only(schema: Mapping[str, Any], keywords: frozenset[str]) -> dict[str, Any]:
    return {keyword: value for keyword, value in schema.items() if keyword in keywords}


def _escaped(expression: str) -> str:
    """Escape a regular expression for use between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", expression).replace("\n", r"\n")
