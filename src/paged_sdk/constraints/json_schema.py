"""Prepares JSON schemas for llguidance: rewrites or refuses what it would not enforce."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, NoReturn

from attrs import field, frozen
from attrs.converters import optional

from paged_sdk.constraints.alternatives import Alternatives
from paged_sdk.constraints.endless import endless_reference
from paged_sdk.constraints.numbers import have_common_multiple, inner_bound, is_exact
from paged_sdk.constraints.schema_parts import Place, Schema, schemas_in, target_of
from paged_sdk.errors import shortened, shown
from paged_sdk.types.patterns import portable_pattern

__all__ = ["Problem", "has_open_names", "read_schema"]

_IGNORED: Final = ("x-guidance", "contentEncoding", "contentMediaType", "contentSchema")
"""Refused: llguidance ignores the content keywords, and x-guidance would let a schema override its strictness."""
_COUNTS: Final = frozenset({"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"})
_DIALECTS: Final = re.compile(r"https?://json-schema\.org/(?:draft-0[467]|draft/(?:2019-09|2020-12))/schema#?")

_MAX_PATTERN_PAIRS: Final = 5_000
"""llguidance compares all property name patterns of an object with each other, at 0.2 ms per pair."""
_MAX_BOUND: Final = 1e300
"""Larger bounds are left to llguidance, which refuses them."""
_MAX_DIVISORS: Final = 100_000
"""Bounds the sum of all divisors of multipleOf: each remainder is a grammar state, which takes 7 us and 160 bytes."""

_LEAP_YEAR: Final = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR: Final = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_DAY: Final = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
)
_DATE: Final = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME: Final = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_NAME: Final = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"

_CLOCK: Final = r"T(?:\d{1,4}H(?:\d{1,4}M(?:\d{1,4}S)?)?|\d{1,4}M(?:\d{1,4}S)?|\d{1,4}S)"
_CALENDAR: Final = r"(?:\d{1,4}Y(?:\d{1,2}M(?:\d{1,4}D)?)?|\d{1,4}M(?:\d{1,4}D)?|\d{1,4}D)"

_PATTERNS: Final[Mapping[str, Schema]] = MappingProxyType(
    {
        "date": {"pattern": f"^{_DATE}$"},
        "time": {"pattern": f"^{_TIME}$"},
        "date-time": {"pattern": f"^{_DATE}T{_TIME}$"},
        "duration": {"pattern": f"^P(?:{_CALENDAR}(?:{_CLOCK})?|{_CLOCK}|\\d{{1,4}}W)$"},
        "hostname": {"pattern": rf"^{_NAME}(?:\.{_NAME})*$", "maxLength": 63},
    }
)
"""Replaces formats that llguidance reads too loosely: it allows 29 February in every year, a 61st second in every
minute, durations too long for programs to represent, and any punycode. Host names here have up to 63 characters and no
internationalized labels."""


@frozen
class Problem:
    """Says why a constraint cannot be enforced.

    :ivar message: the reason
    :ivar keyword: the keyword of the JSON schema that causes it, if known
    :ivar position: JSON pointer of the schema that has the keyword, if known
    :ivar kind: the kind of constraint that the schema belongs to, if it is not that of the whole
    """

    message: str
    keyword: str = ""
    position: str | None = field(default=None, converter=optional(str))
    kind: str | None = None


def read_schema(source: str) -> Schema | Problem:
    """Read a schema, and rewrite it so that llguidance enforces what it means.

    Schemas that cannot be enforced, or would take too long to compile, are refused. Every text that the result allows
    is valid under the original schema; where drafts or libraries differ, under all of them.

    :param source: the schema as JSON
    """
    try:
        schema = json.loads(source, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return Problem(f"the schema is not valid JSON: {error}")
    if schema is True:
        return {}
    if schema is False:
        return Problem("the schema is false, which allows no value", "false", "")
    if not isinstance(schema, dict):
        return Problem(f"the schema is a {type(schema).__name__}: expected an object or a boolean")
    reader = _Reader(schema)
    for position, each in list(schemas_in(schema)):
        problem = reader.why_not(each, position) or reader.rewrite(each, position)
        if problem is not None:
            return problem
    references = _references(schema)
    endless = endless_reference(schema, references)
    if endless is not None:
        message = f"no text satisfies {shortened(endless)}: each value would hold another one, without end"
        return Problem(message, "$ref", "{}{}".format(*references[endless]))
    return schema


def has_open_names(schema: Schema) -> bool:
    """Tell whether some object may have properties that the schema does not name.

    Such names may be written with escapes, so that a text could repeat a property under another spelling.
    """
    return any(
        each.keys() & {"properties", "patternProperties", "required"} and each.get("additionalProperties") is not False
        for _, each in schemas_in(schema)
    )


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no number {name}")


class _Reader:
    """Checks and rewrites the schemas of one document, one after the other."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._alternatives = Alternatives(root)
        self._num_pairs = 0
        self._divisors: list[int | float] = []

    def why_not(self, schema: Schema, position: Place) -> Problem | None:
        """Return why llguidance would not enforce a schema, or would take too long to compile it; None if neither."""
        for keyword in schema.keys() & {*_IGNORED}:
            return Problem(f"{keyword} is not supported", keyword, position)
        dialect = schema.pop("$schema", None)
        if dialect is not None and _DIALECTS.fullmatch(str(dialect)) is None:
            message = f"$schema = {shown(dialect)}: expected that of draft 4, 6, 7, 2019-09 or 2020-12"
            return Problem(message, "$schema", position)
        if position.above is not None and "$id" in schema and "$ref" in schema:
            return Problem("drafts differ on $id beside $ref", "$id", position)
        required = schema.get("required")
        least, num_required = schema.get("minProperties"), len(required) if isinstance(required, list) else 0
        if isinstance(least, int | float) and least > num_required + 1:
            message = f"minProperties = {least} with {num_required} required properties: at most one more is allowed, "
            return Problem(message + "since a repeated name would be counted twice", "minProperties", position)
        patterns, divisor = schema.get("patternProperties"), schema.get("multipleOf")
        self._num_pairs += len(patterns) ** 2 // 2 if isinstance(patterns, dict) else 0
        if self._num_pairs > _MAX_PATTERN_PAIRS:
            return Problem(
                f"patternProperties makes more than {_MAX_PATTERN_PAIRS:,} pairs of patterns to compare",
                "patternProperties",
                position,
            )
        if isinstance(divisor, int | float):
            self._divisors.append(divisor)
            if sum(self._divisors) > _MAX_DIVISORS:
                return Problem(
                    f"the values of multipleOf add up to more than {_MAX_DIVISORS:,}", "multipleOf", position
                )
            if not have_common_multiple(self._divisors):
                return Problem(
                    "the least common multiple of all values of multipleOf is too large", "multipleOf", position
                )
        for keyword in ("const", "enum"):
            inexact = next((number for number in _numbers_in(schema.get(keyword)) if not is_exact(number)), None)
            if inexact is not None:
                return Problem(
                    f"{keyword} has {inexact}, which not every JSON library reads exactly; numbers of 15 digits are",
                    keyword,
                    position,
                )
        return None

    def rewrite(self, schema: Schema, position: Place) -> Problem | None:
        """Rewrite a schema in place so that llguidance reads it as meant; return why this is not possible, or None."""
        try:
            if isinstance(schema.get("pattern"), str):
                schema["pattern"] = portable_pattern(schema["pattern"])
        except ValueError as error:
            return Problem(f"pattern: {error}", "pattern", position)
        patterns = schema.get("patternProperties")
        try:
            if isinstance(patterns, dict):
                said = [(portable_pattern(pattern), each) for pattern, each in patterns.items()]
                if len(dict(said)) < len(said):
                    raise ValueError("two patterns are the same")
                schema["patternProperties"] = dict(said)
        except ValueError as error:
            return Problem(f"patternProperties: {error}", "patternProperties", position)
        name = schema.get("format")
        if isinstance(name, str) and name in _PATTERNS:
            del schema["format"]
            _add(schema, _PATTERNS[name])
        for keyword in _COUNTS & schema.keys():
            if isinstance(schema[keyword], float) and schema[keyword].is_integer():
                schema[keyword] = int(schema[keyword])
        _rewrite_bounds(schema)
        one_of = schema.get("oneOf")
        if isinstance(one_of, list) and self._alternatives.exclude_each_other(one_of):
            _add(schema, {"anyOf": schema.pop("oneOf")})
        return None


def _rewrite_bounds(schema: Schema) -> None:
    """Round bounds inward to 15 digits, since 0.99999999999999999 would be read as 1, and make the exclusive bounds of
    non-integers inclusive.
    """
    for keyword, strict, is_upper in (("minimum", "exclusiveMinimum", False), ("maximum", "exclusiveMaximum", True)):
        bounds = []
        for each, is_strict in ((keyword, False), (strict, True)):
            bound = schema.get(each)
            if isinstance(bound, bool) or not isinstance(bound, int | float) or abs(bound) > _MAX_BOUND:
                continue
            if is_strict and schema.get("type") == "integer" and inner_bound(bound, is_upper=is_upper) == bound:
                continue
            bounds.append(inner_bound(bound, is_upper=is_upper, is_strict=is_strict))
            del schema[each]
        if bounds:
            schema[keyword] = min(bounds) if is_upper else max(bounds)


def _numbers_in(value: object) -> Iterator[int | float]:
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            pending += each.values()
        elif isinstance(each, list):
            pending += each
        elif isinstance(each, int | float) and not isinstance(each, bool):
            yield each


def _add(schema: Schema, more: Schema) -> None:
    """Add keywords to a schema, or an "allOf" of them if it has one of these keywords already."""
    if not schema.keys() & more.keys():
        schema.update(more)
    elif isinstance(schema.setdefault("allOf", []), list):
        schema["allOf"].append(more)


def _references(root: Schema) -> dict[str, tuple[str, Place]]:
    """Return the references that validating a value may follow, each with a place where it is used: the JSON pointer of
    the target that contains it (empty: the document), and the place within that target.
    """
    found: dict[str, tuple[str, Place]] = {}
    used = {key: value for key, value in root.items() if key not in {"$defs", "definitions"}}
    seen: set[int] = set()  # several references may lead to the same schema, or to one that contains it
    pending: list[tuple[str, object]] = [("", used)]
    while pending:
        at, target = pending.pop()
        for place, each in schemas_in(target, seen) if isinstance(target, dict) else ():
            reference = each.get("$ref")
            if isinstance(reference, str) and reference not in found:
                found[reference] = at, place
                if reference != "#":  # the document itself, of which unused definitions would count, too
                    pending.append((reference.removeprefix("#"), target_of(root, reference)))
    return found
