"""What the text of an error shows of a value."""

from __future__ import annotations

import pickle

import pytest

from paged_sdk import ConfigError, ContextLengthError, InvalidRequestError, RequestTimeoutError
from paged_sdk.errors import MAX_SHOWN, shown


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a  b", "'a  b'"),
        ("two\nlines", r"'two\nlines'"),
        ("\ud800", r"'\ud800'"),
        (None, "None"),
        (Unshowable(), "<Unshowable>"),
    ],
)
def test_a_value_is_shown_on_one_line(value: object, text: str) -> None:
    assert shown(value) == text


def test_a_number_that_python_does_not_write_is_shown_by_its_type() -> None:
    assert shown(10**5000) == "<int>"


@pytest.mark.parametrize(
    "value", ["x" * 600_000, [{"content": "x" * 600_000}], b"x" * 10**6, list(range(10**5)), 9**999]
)
def test_a_long_value_is_cut(value: object) -> None:
    assert len(shown(value)) == MAX_SHOWN
    assert shown(value) == repr(value)[: MAX_SHOWN - 3] + "..."


def test_errors_show_the_setting_what_was_given_and_what_is_allowed() -> None:
    error = ConfigError.of("setting", "x" * 10**6, "an int")
    assert str(error).startswith("setting = 'xxx")
    assert str(error).endswith("xxx... is not allowed: expected an int")
    assert len(str(error)) < 200
    assert error.value == "x" * 10**6  # for programs, whole
    assert len(str(InvalidRequestError.of("field", "x" * 10**6, "an int"))) < 200


def test_errors_travel_between_processes() -> None:
    for error in (
        ConfigError.of("setting", 3, "an int < 3"),
        InvalidRequestError.of("role", "robot", "a person"),
        RequestTimeoutError("late", request_id="r", timeout=2.0),
        ContextLengthError("too long", num_tokens=9, limit=3, advice="shorten it"),
    ):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert copy.__dict__ == error.__dict__
        assert str(copy) == str(error)


@pytest.mark.parametrize("kind", [InvalidRequestError, ContextLengthError])
def test_advice_ends_the_message_and_is_apart_too(kind: type[InvalidRequestError] | type[ContextLengthError]) -> None:
    error = kind("the file is missing: x", advice="make it")
    assert (str(error), error.problem, error.advice) == (
        "the file is missing: x: make it",
        "the file is missing: x",
        "make it",
    )
    plain = kind("the file is missing: x")
    assert (str(plain), plain.problem, plain.advice) == ("the file is missing: x", "the file is missing: x", "")
