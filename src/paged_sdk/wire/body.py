"""Reads a JSON object as the TypedDict that describes it, and describes it as a JSON schema.

What is accepted is said once, in the annotations (:mod:`paged_sdk.wire.shapes`). A key that the TypedDict does not have
is refused, so that nothing is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Generic, NoReturn, TypeVar, cast

from paged_sdk import InvalidRequestError
from paged_sdk.wire.shapes import Bounds, Fields, Named, shape_of

__all__ = ["BodyReader", "Bounds", "read_json", "schema_of"]

BodyT = TypeVar("BodyT")

MAX_CONTAINERS: Final = 1_000_000
"""Brackets in a body, those in texts among them. Reading a million lists takes a quarter of a second, in which the
interpreter does nothing else.
"""


def schema_of(kind: Any, named: Named = None) -> dict[str, Any]:
    """Return the JSON schema of a type: a TypedDict, a union of such, or what they are made of.

    :param named: takes the schemas of objects by name, and others refer to them there; None: all is in one schema
    """
    return shape_of(kind).schema(named)


def read_json(data: bytes) -> object:
    """Return the value that JSON stands for.

    :raises InvalidRequestError: it is no JSON, or holds what no text or number can be made of
    """
    if data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
        raise InvalidRequestError(f"the body has more than {MAX_CONTAINERS} lists and objects", field="body")
    try:
        text = data.decode()
        value: object = json.loads(text, parse_constant=_no_number)
        if "\\ud" in text.lower():  # lone surrogates can be written, and are no characters
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidRequestError("the body is nested too deep", field="body") from None
    except ValueError as error:
        raise InvalidRequestError(f"the body is no JSON: {str(error)[:120]}", field="body") from None
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON's")


class BodyReader(Generic[BodyT]):
    """Reads values as one kind of TypedDict.

    :param kind: the TypedDict
    """

    def __init__(self, kind: type[BodyT]) -> None:
        self._shape = Fields.of(kind)

    def read(self, value: object, *, at: str = "") -> BodyT:
        """Return a value that is what the TypedDict says.

        :param at: where it is in a body
        :raises InvalidRequestError: it is something else; the field is named, and a key that there is none of
        """
        if not isinstance(value, Mapping):
            raise InvalidRequestError.of(at or "body", value, "a JSON object")
        self._shape.check(at, value)
        return cast(BodyT, value)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the fields."""
        return tuple(self._shape.fields)

    def schema(self, named: Named = None) -> dict[str, Any]:
        """Return the JSON schema of what is accepted."""
        return self._shape.schema(named)
