"""Tools are described by JSON schemas or typed functions; what a model could not be told is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

import attrs
import pytest
from openai.types.chat import ChatCompletionFunctionToolParam
from pydantic import TypeAdapter
from transformers.utils.chat_template_utils import get_json_schema

from paged_sdk import Constraint, InvalidRequestError, RequestBuilder, Tool
from paged_sdk.types.answer_form import AnswerForm
from tool_types import Place, Span, Unit


@attrs.frozen
class Rule:
    span: Span
    names: list[str] = attrs.field(factory=list)


def plain(city: str, days: int, exact: bool, factor: float, names: list[str], more: dict[str, int]) -> str:
    """
    Tell the weather.

    Args:
        city: The city,
            with its country.
        days: How many days.
        exact: Whether to be exact
        factor: A factor
        names: Some names
        more: More

    Returns:
        A text.
    """
    return city


def rich(
    place: Place,
    rule: Annotated[Rule, "What to look at"],
    unit: Unit = Unit.CELSIUS,
    kind: Literal["a", "b"] | None = None,
    *,
    size: int | str = 1,
    points: tuple[float, float] = (0, 0),
    values: Sequence[float] = (),
    mixed: Literal[1, "x"] = 1,
    anything: Any = None,
) -> None:
    """Do it,
    and well.

    :param place: where it is,
        exactly
    :param unit: of temperatures
    :returns: nothing
    """


def test_a_function_reads_as_in_transformers() -> None:
    """transformers describes functions for templates too; it knows fewer types, and marks fewer as nullable."""
    expected = get_json_schema(plain)
    expected["function"].pop("return", None)
    assert Tool.from_function(plain).to_dict() == expected


def test_a_function_with_types_of_all_kinds() -> None:
    tool = Tool.from_function(rich)
    assert (tool.name, tool.description, tool.function) == ("rich", "Do it, and well.", rich)
    place = {"type": "object", "properties": {"city": {"type": "string"}, "country": {"type": "string"}}}
    span = {"type": "object", "properties": {"first": {"type": "integer"}, "last": {"type": "integer"}}}
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "place": place | {"required": ["city"], "description": "where it is, exactly"},
            "rule": {
                "type": "object",
                "properties": {
                    "span": span | {"required": ["first"]},
                    "names": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["span"],
                "description": "What to look at",
            },
            "unit": {"type": "string", "enum": ["celsius", "kelvin"], "description": "of temperatures"},
            "kind": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]},
            "size": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "points": {
                "type": "array",
                "prefixItems": [{"type": "number"}, {"type": "number"}],
                "minItems": 2,
                "maxItems": 2,
            },
            "values": {"type": "array", "items": {"type": "number"}},
            "mixed": {"enum": [1, "x"]},
            "anything": {},
        },
        "required": ["place", "rule"],
    }


def test_every_accepted_form_is_one_tool() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    wire = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": schema}}
    TypeAdapter(ChatCompletionFunctionToolParam).validate_python(wire)
    tool = Tool(name="weather", description="Tells it.", parameters=schema)

    def weather(city: str) -> str:
        """Tells it."""
        return city

    assert Tool.parse(wire) == Tool.parse(tool) == attrs.evolve(Tool.parse(weather), function=None) == tool
    assert tool.to_dict() == wire
    options = RequestBuilder().with_tools([wire], "auto").options
    assert options.tools == options.shown_tools == (tool,)
    assert RequestBuilder().with_tools([weather], "none").options.shown_tools == ()
    assert Tool.parse({"type": "function", "function": {"name": "now"}}).parameters["type"] == "object"
    assert len({tool, Tool.parse(wire)}) == 1


class Node(TypedDict):
    next: Node


def no_annotation(city):  # type: ignore[no-untyped-def]
    pass


def any_number(*cities: str) -> None:
    pass


def positional(city: str, /) -> None:
    pass


def odd_type(city: bytes) -> None:
    pass


def odd_key(city: dict[int, str]) -> None:
    pass


def odd_choice(city: Literal[b"x"]) -> None:
    pass


def recursive(node: Node) -> None:
    pass


def unknown_name(city: "Missing") -> None:  # type: ignore[name-defined]  # noqa: F821, UP037
    pass


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (no_annotation, "no_annotation(city)"),
        (any_number, "any_number(cities)"),
        (positional, "positional(city)"),
        (odd_type, "odd_type(city): bytes"),
        (odd_key, "odd_key(city)"),
        (odd_choice, "odd_choice(city)"),
        (recursive, "Node"),
        (unknown_name, "unknown_name"),
        (lambda: None, "<lambda>"),
        (int, "int"),
    ],
)
def test_a_function_that_cannot_be_described_is_named(function: Callable[..., Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RequestBuilder().with_tools([function])
    assert caught.value.field.startswith("tools")
    assert named in str(caught.value)
    assert len(str(caught.value)) < 500


def wire(**changes: Any) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, **changes}}


DEEP: dict[str, Any] = {"type": "object"}
for _ in range(50):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        (5, "tools"),
        ("f", "tools"),
        (wire(), "tools"),
        ([5], "tools"),
        ([{"name": "f"}], "tools"),
        ([{"type": "web_search", "function": {"name": "f"}}], "tools.type"),
        ([{**wire(), "when": "now"}], "tools['when']"),
        ([wire(when="now")], "tools.function['when']"),
        ([wire(strict="yes")], "tools.strict"),
        ([wire(name="")], "tools.name"),
        ([wire(name="a b")], "tools.name"),
        ([wire(name="<|im_end|>")], "tools.name"),
        ([wire(name="a" * 129)], "tools.name"),
        ([wire(name=None)], "tools.name"),
        ([wire(description=5)], "tools.description"),
        ([wire(description="\ud800")], "tools.description"),
        ([wire(parameters=[1])], "tools.parameters"),
        ([wire(parameters={"type": "string"})], "tools.parameters"),
        ([wire(parameters={"type": "object", "x": float("inf")})], "tools.parameters"),
        ([wire(parameters={"type": "object", "x": object()})], "tools.parameters"),
        ([wire(parameters=DEEP)], "tools.parameters"),
        ([wire(parameters={"type": "object", "description": "x" * (1 << 20)})], "tools"),
        ([wire(name=f"f{place}") for place in range(300)], "tools"),
        ([wire(), wire()], "tools"),
        ([Tool(name="f"), wire()], "tools"),
    ],
)
def test_tools_that_cannot_be_used(tools: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        RequestBuilder().with_tools(tools)
    assert caught.value.field == field
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("choice", ["g", {"type": "function", "function": {"name": "g"}}, None, [], {"function": 5}])
def test_choices_that_cannot_be_made(choice: Any) -> None:
    with pytest.raises(InvalidRequestError, match='"required" or one of f') as caught:
        RequestBuilder().with_tools([wire()], choice)
    assert caught.value.field == "tool_choice"


def test_a_call_that_is_forced_is_one_of_the_tools_that_may_be_called() -> None:
    tools = [wire(name="f"), wire(name="g")]
    named: Any = {"type": "function", "function": {"name": "g"}}
    for choice, forced in (("auto", []), ("none", []), ("required", ["f", "g"]), ("g", ["g"]), (named, ["g"])):
        options = RequestBuilder().with_tools(tools, choice).options
        assert [tool.name for tool in options.forced_tools] == forced
        assert options.constraint_kind == ("tools" if forced else "")
    with pytest.raises(InvalidRequestError, match="tool_choice"):
        RequestBuilder().with_tools([], "required")
    with pytest.raises(InvalidRequestError, match="beside a constraint"):
        RequestBuilder().with_constraint(Constraint.regex("x")).with_tools(tools, "required")
    with pytest.raises(InvalidRequestError, match="beside a constraint"):
        RequestBuilder().with_tools(tools, "required").with_constraint(Constraint.regex("x"))


def test_strict_that_is_off_says_nothing() -> None:
    assert Tool.parse(wire(strict=False)) == Tool.parse(wire(strict=None)) == Tool.parse(wire())


def test_tools_their_choice_and_a_constraint_decide_what_an_answer_may_be() -> None:
    strict, other = Tool.parse(wire(name="f", strict=True)), wire(name="g")
    assert strict.strict
    assert strict.to_dict() == Tool.parse(wire(name="f")).to_dict()
    strict_calls, calls = AnswerForm.STRICT_CALLS, AnswerForm.CALLS
    for choice, form in (("auto", strict_calls), ("none", AnswerForm.FREE), ("required", calls), ("f", calls)):
        options = RequestBuilder().with_tools([strict, other], choice).options
        assert options.answer_form is form
        assert options.constraint_kind == ("" if choice == "none" else "tools")
    assert RequestBuilder().with_tools([other]).options.answer_form is AnswerForm.FREE
    constrained = RequestBuilder().with_constraint(Constraint.regex("x")).with_tools([strict])
    assert constrained.options.answer_form is AnswerForm.CONSTRAINED
    assert constrained.options.constraint_kind == "regex"
    assert constrained.with_constraint(Constraint.json_schema({})).options.answer_form is AnswerForm.CALLS_OR_JSON
    with pytest.raises(InvalidRequestError, match="strict"):
        Tool.parse(wire(strict="yes"))


def test_a_tool_is_a_copy() -> None:
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    tool = Tool(name="f", parameters=parameters)
    parameters["properties"]["x"] = {}
    tool.to_dict()["function"]["parameters"]["properties"]["y"] = {}
    assert tool.parameters == {"type": "object", "properties": {}}
    json.dumps(tool.to_dict())


@pytest.mark.parametrize("effort", ["", "very high", "<|im_end|>", "x" * 33, 5, None])
def test_an_effort_is_a_word(effort: Any) -> None:
    with pytest.raises(InvalidRequestError):
        RequestBuilder().with_reasoning_effort(effort)
