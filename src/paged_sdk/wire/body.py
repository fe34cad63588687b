"""Validates JSON objects against TypedDicts, and makes JSON schemas of the TypedDicts.

The TypedDict's annotations are the only definition (:mod:`paged_sdk.wire.shapes`). Unknown keys are refused, so that no
field is silently ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Generic, NoReturn, TypeVar, cast

from paged_sdk import InvalidRequestError
from paged_sdk.wire.shapes import Bounds, Fields, NamedSchemas, shape_of

__all__ = ["BodyReader", "Bounds", "read_json", "schema_of"]

BodyT = TypeVar("BodyT")

MAX_CONTAINERS: Final = 1_000_000
"""Maximum number of opening brackets in a body, including those in strings. Parsing a million lists takes a quarter of
a second, during which Python's JSON parser holds the GIL.
"""


def schema_of(kind: Any, schemas: NamedSchemas = None) -> dict[str, Any]:
    """Return the JSON schema of a type: a TypedDict, the type of one of its fields, or a union of such types.

    :param schemas: collects the schemas of objects by name, to which others then refer; None: objects are inlined
    """
    return shape_of(kind).schema(schemas)


def read_json(data: bytes) -> object:
    """Parse JSON.

    :raises InvalidRequestError: it is not JSON, has NaN, Infinity or lone surrogates, or has too many or too deeply
        nested lists and objects
    """
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        raise InvalidRequestError(f"the body has more than {MAX_CONTAINERS} lists and objects", field="body")
    try:
        text = data.decode()
        value: object = json.loads(text, parse_constant=_no_number)
        if "\\ud" in text.lower():  # escapes can spell lone surrogates, which are not valid Unicode
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidRequestError("the body is nested too deep", field="body") from None
    except ValueError as error:
        raise InvalidRequestError(f"the body is not JSON: {str(error)[:120]}", field="body") from None
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


class BodyReader(Generic[BodyT]):
    """Validates values against one TypedDict.

    :param kind: the TypedDict
    """

    def __init__(self, kind: type[BodyT]) -> None:
        self._shape = Fields.of(kind)

    def read(self, value: object, *, at: str = "") -> BodyT:
        """Return the value itself after checking it against the TypedDict.

        :param at: the value's path in the body, for errors
        :raises InvalidRequestError: the value does not match; the error names the field or the unknown key
        """
        if not isinstance(value, Mapping):
            raise InvalidRequestError.of(at or "body", value, "a JSON object")
        self._shape.check(at, value)
        return cast(BodyT, value)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the fields."""
        return tuple(self._shape.fields)

    def schema(self, schemas: NamedSchemas = None) -> dict[str, Any]:
        """Return the TypedDict's JSON schema."""
        return self._shape.schema(schemas)
