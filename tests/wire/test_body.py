"""Bodies are what their TypedDicts say, and nothing else."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

import pytest
from jsonschema import Draft202012Validator, ValidationError

from paged_sdk import InvalidRequestError
from paged_sdk.wire.body import BodyReader, Bounds, read_json


class Circle(TypedDict):
    type: Literal["circle"]
    radius: float


class Square(TypedDict):
    type: Literal["square"]
    side: Annotated[int, Bounds(1)]
    name: NotRequired[Annotated[str, Bounds(1, 3)]]


class Body(TypedDict, total=False):
    shape: Required[Circle | Square]
    more: list[Circle | Square] | None
    mode: Annotated[Literal["fast"] | None, "there is one mode"]
    words: str | list[str] | list[int]
    few: Annotated[list[bool], Bounds(1, 2)]
    many: Annotated[list[bool], Bounds(1, 1 << 20)]
    lots: Annotated[list[dict[str, Any]], Bounds(1)]
    weights: dict[str, float]
    anything: Any


READER = BodyReader(Body)
JUDGE = Draft202012Validator(READER.schema())
SHAPE = {"type": "circle", "radius": 1}

GOOD: list[dict[str, Any]] = [
    {"shape": SHAPE},
    {"shape": {"type": "square", "side": 1, "name": "abc"}, "more": None},
    {"shape": SHAPE, "more": [SHAPE, {"type": "square", "side": 3}]},
    {"shape": SHAPE, "mode": "fast", "words": "a", "few": [True]},
    {"shape": SHAPE, "mode": None, "words": ["a"], "weights": {"a": 1, "b": -0.5}},
    {"shape": SHAPE, "words": [1, 2], "anything": {"a": [1]}},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "shape"),
    ({"shape": None}, "shape"),
    ({"shape": {"type": "star"}}, "shape.type"),
    ({"shape": {"radius": 1}}, "shape.type"),
    ({"shape": {"type": "circle"}}, "shape.radius"),
    ({"shape": {"type": "circle", "radius": True}}, "shape.radius"),
    ({"shape": {"type": "circle", "radius": 1, "side": 1}}, "shape.side"),
    ({"shape": {"type": "square", "side": 0}}, "shape.side"),
    ({"shape": {"type": "square", "side": 1.5}}, "shape.side"),
    ({"shape": {"type": "square", "side": 1, "name": "abcd"}}, "shape.name"),
    ({"shape": SHAPE, "more": [SHAPE, 1]}, "more[1]"),
    ({"shape": SHAPE, "mode": "slow"}, "mode"),
    ({"shape": SHAPE, "words": [1.5]}, "words[0]"),
    ({"shape": SHAPE, "few": []}, "few"),
    ({"shape": SHAPE, "few": [True, False, True]}, "few"),
    ({"shape": SHAPE, "weights": {"a": "b"}}, 'weights["a"]'),
    ({"shape": SHAPE, "other": 1}, "other"),
]


@pytest.mark.parametrize("body", GOOD)
def test_what_fits_is_read_as_it_is(body: dict[str, Any]) -> None:
    assert READER.read(body) is body
    JUDGE.validate(body)


@pytest.mark.parametrize(("body", "field"), BAD)
def test_what_does_not_fit_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        READER.read(body)
    assert caught.value.field == field
    assert caught.value.allowed
    with pytest.raises(ValidationError):  # the schema says the same
        JUDGE.validate(body)


def test_fields_that_ask_for_nothing_say_why() -> None:
    with pytest.raises(InvalidRequestError, match=r'"fast" or null \(there is one mode\)'):
        READER.read({"shape": SHAPE, "mode": "slow"})


def test_lists_are_said_in_words() -> None:
    for body, said in (
        ({"words": 1}, "a string or a list of strings or a list of integers"),
        ({"few": []}, "a list of from 1 to 2 items, each true or false"),
        ({"many": []}, "a list of from 1 to 1048576 items, each true or false"),
        ({"lots": []}, "a list of >= 1 objects"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            READER.read({"shape": SHAPE, **body})
        assert caught.value.allowed == said


def test_errors_say_where_a_part_is() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        READER.read({"shape": {}}, at="parts[3]")
    assert caught.value.field == "parts[3].shape.type"
    with pytest.raises(InvalidRequestError, match=r"^body = \[\]"):
        READER.read([])


def test_json_is_read() -> None:
    assert read_json('{"a": "☃ \\ud83d\\ude00"}'.encode()) == {"a": "☃ 😀"}
    for bad in (b"", b"{", b"NaN", b"-Infinity", b"\xff", b'"\\ud800"', b"[" * 100_000, b"1" * 5000):
        with pytest.raises(InvalidRequestError) as caught:
            read_json(bad)
        assert caught.value.field == "body"
