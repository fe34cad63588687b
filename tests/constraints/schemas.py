"""Make JSON schemas at random, and judge texts by them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from decimal import Context, Decimal
from typing import Any, Final, TypeAlias

from jsonschema import Draft7Validator, Draft202012Validator, ValidationError
from jsonschema.validators import extend

from paged_sdk.constraints.grammar import Grammar

__all__ = ["JUDGES", "check_text", "make_schema", "random_text"]

Schema: TypeAlias = dict[str, Any]

_NAMES: Final = ("id", "name", "x y", "größe", "tags", 'quo"te', "a/b")
_FORMATS: Final = ("date", "date-time", "email", "hostname", "ipv4", "ipv6", "time", "uuid")
_PATTERNS: Final = ("^[a-z]{2,4}[0-9]$", "^(foo|ba+r)$", "^\\d{3}-\\d{4}$", "^[^a]{0,4}$")


def _multiple_of(judge: object, divisor: float, value: object, schema: object) -> Iterator[ValidationError]:
    """Judge in decimals, and of what is read exactly: with floating-point numbers, 4.35 is no multiple of 0.01."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    exact = Decimal(str(value))
    is_read_exactly = isinstance(value, int) or len(exact.as_tuple().digits) <= 15
    if is_read_exactly and Context(prec=1000).remainder(exact, Decimal(str(divisor))):
        yield ValidationError(f"{value!r} is not a multiple of {divisor}")


JUDGES: Final[Mapping[int, Any]] = {
    7: extend(Draft7Validator, {"multipleOf": _multiple_of}),
    2020: extend(Draft202012Validator, {"multipleOf": _multiple_of}),
}
"""Validators by draft."""


def random_text(grammar: Grammar, rng: random.Random, max_bytes: int) -> str | None:
    """Choose bytes that a grammar allows until it is satisfied; None if it is not in time.

    :param grammar: of a vocabulary of bytes, whose end token comes after these
    """
    matcher, text = grammar.matcher.deep_copy(), bytearray()
    while len(text) < max_bytes:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(257) if mask[token >> 3] >> (token & 7) & 1]
        assert allowed, (bytes(text), matcher.get_error())
        ends = [token for token in allowed if token == 256 or token in b'"}]']
        token = rng.choice(ends if ends and rng.random() < 0.3 else allowed)
        if token == 256:
            return text.decode()
        text.append(token)
        assert matcher.consume_token(token)
    return None


def make_schema(seed: int) -> Schema:
    """Return the schema of an object, with texts that are bounded in length but for numbers and white space."""
    rng = random.Random(seed)
    schema = _object(rng, 3)
    if rng.random() < 0.3:
        schema["$defs"] = {"tree": _tree(rng)}
        schema["properties"]["tree"] = {"$ref": "#/$defs/tree"}
        schema["required"].append("tree")
    Draft202012Validator.check_schema(schema)
    return schema


def check_text(text: str, schema: Schema) -> None:
    """Raise what is wrong with a text that is to be JSON of a schema."""
    judge = JUDGES[2020](schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    judge.validate(json.loads(text))


def _any(rng: random.Random, depth: int) -> Schema:
    makers = [_string, _integer, _number, _fixed, _plain]
    if depth:
        makers += [_array, _object, _union]
    return rng.choice(makers)(rng, depth)


def _plain(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _string(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(4)
    kinds: list[Schema] = [
        {"minLength": least, "maxLength": least + rng.randrange(8)},
        {"pattern": rng.choice(_PATTERNS)},
        {"format": rng.choice(_FORMATS), "maxLength": 60},
    ]
    return {"type": "string", **rng.choice(kinds)}


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(-2000, 1000)
    kinds: list[Schema] = [
        {"minimum": low, "maximum": low + rng.randrange(5000)},
        {"exclusiveMinimum": 0, "maximum": 10**6, "multipleOf": rng.choice([2, 5, 12])},
        {"maximum": low, "minimum": -(10**9)},
    ]
    return {"type": "integer", **rng.choice(kinds)}


def _number(rng: random.Random, depth: int) -> Schema:
    return {"type": "number", "minimum": -rng.randrange(10), "exclusiveMaximum": rng.choice([1, 2.5, 1000])}


def _fixed(rng: random.Random, depth: int) -> Schema:
    values = [1, -2.5, "one", "zwölf", None, True, [1, "a"], {"k": []}]
    return {"const": rng.choice(values)} if rng.random() < 0.3 else {"enum": rng.sample(values, 3)}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randrange(3)
    bounds = {"minItems": least, "maxItems": least + rng.randrange(3)}
    if rng.random() < 0.3:
        return {"type": "array", "prefixItems": [_any(rng, depth - 1) for _ in range(2)], "items": False, "maxItems": 2}
    return {"type": "array", "items": _any(rng, depth - 1), **bounds}


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randrange(1, 5))
    schema: Schema = {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        schema["patternProperties"] = {"^z[0-9]$": {"type": "integer", "minimum": 0, "maximum": 9}}
        schema["required"], schema["maxProperties"] = names, len(names) + 2
    return schema


def _union(rng: random.Random, depth: int) -> Schema:
    return {rng.choice(["anyOf", "anyOf", "oneOf"]): [{"type": "null"}, _object(rng, depth - 1), {"enum": [3, "x"]}]}


def _tree(rng: random.Random) -> Schema:
    children = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": rng.randrange(1, 3)}
    return {
        "type": "object",
        "properties": {"value": _string(rng, 0), "children": children},
        "required": ["value", "children"],
        "additionalProperties": False,
    }
