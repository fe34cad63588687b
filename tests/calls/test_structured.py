"""Answers as instances of types."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, NotRequired, TypedDict

import anyio
import attrs
import pydantic
import pytest

from paged_sdk import (
    BlockingModel,
    Constraint,
    ConstraintError,
    InvalidRequestError,
    Model,
    ModelClosedError,
    PagedError,
    RequestBuilder,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.testing import fake_model

ASKED = RequestBuilder().add_message("user", "Hi").with_sampling(SamplingParams(temperature=1.0, seed=4, max_len=500))


class Color(Enum):
    RED = "red"
    GREEN = "green"


@dataclasses.dataclass
class Point:
    x: Literal[1, 2, 3]
    y: bool
    note: Literal["a", "b"] | None = None


@attrs.frozen
class Shape:
    color: Color
    corners: tuple[Point, Point]
    inner: Point | None = None


class Record(TypedDict):
    shape: Shape
    tag: NotRequired[Literal["new", "old"]]


class Order(pydantic.BaseModel):
    id: int = pydantic.Field(ge=1, le=99)
    code: str = pydantic.Field(pattern="^[A-Z]{2}$")
    status: Literal["open", "done"]
    parent: Order | None = None


def is_point(value: object) -> bool:
    return (
        isinstance(value, Point) and value.x in (1, 2, 3) and type(value.y) is bool and value.note in ("a", "b", None)
    )


@pytest.mark.anyio
async def test_answers_are_instances(model: Model) -> None:
    point: Point = await model.generate_structured(ASKED, Point)
    assert is_point(point)
    shape: Shape = await model.generate_structured(ASKED, Shape)
    assert shape.color in Color
    assert len(shape.corners) == 2
    assert all(map(is_point, shape.corners))
    record: Record = await model.generate_structured(ASKED, Record)
    assert isinstance(record["shape"], Shape)
    assert record.get("tag") in ("new", "old", None)
    order: Order = await model.generate_structured(ASKED, Order)
    assert order == Order.model_validate(order.model_dump())


def test_blocking_models_do_it_too(builder: TextModelBuilder) -> None:
    with BlockingModel(builder.build()) as model:
        point: Point = model.generate_structured(ASKED, Point)
        assert is_point(point)


@pytest.mark.anyio
async def test_an_answer_that_closing_cuts_off_is_not_the_models_fault() -> None:
    model = fake_model('{"x": 1, "y": true}', delay=0.01)
    raised: list[PagedError] = []

    async def ask() -> None:
        try:
            await model.generate_structured(ASKED, Point)
        except PagedError as error:
            raised.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        while not model.stats().running:
            await anyio.sleep(0.001)
        await model.aclose()
    assert [type(error) for error in raised] == [ModelClosedError]


@pytest.mark.anyio
async def test_an_answer_that_is_cut_off_comes_with_the_error(model: Model) -> None:
    with pytest.raises(ConstraintError, match=r"cut off after 3 tokens \(length\): allow more") as raised:
        await model.generate_structured(ASKED.with_sampling(SamplingParams(temperature=0.0, max_len=3)), Point)
    partial = raised.value.partial_response
    assert partial is not None
    assert partial.choices[0].finish_reason == "length"
    assert raised.value.request_id == partial.id


@attrs.frozen
class Picky:
    number: Literal[1, 2] = attrs.field()

    @number.validator
    def _check(self, attribute: object, value: object) -> None:
        raise RuntimeError("no number is good")


@pytest.mark.anyio
async def test_what_a_type_refuses_for_itself_is_an_error_with_the_answer(model: Model) -> None:
    with pytest.raises(ConstraintError, match="the answer is not a valid Picky: no number is good") as raised:
        await model.generate_structured(ASKED, Picky)
    assert raised.value.partial_response is not None
    assert isinstance(raised.value.__cause__, RuntimeError)


class Strange(TypedDict):
    when: complex


class Hidden(pydantic.BaseModel):
    when: Callable[[], int]


@dataclasses.dataclass
class Endless:
    more: Endless


@dataclasses.dataclass
class Egg:
    hen: tuple[Hen, int]


@attrs.frozen
class Hen:
    egg: Egg


@attrs.frozen
class Link:
    last: Literal[True, False]
    next: Link | None = None


@dataclasses.dataclass
class Tree:
    kind: Literal["leaf", "branch"]
    parts: list[Tree]
    links: Link | None = None


class Plan(TypedDict):
    first: Link
    second: Link


def is_link(value: object) -> bool:
    return isinstance(value, Link) and value.last in (True, False) and (value.next is None or is_link(value.next))


def is_tree(value: object) -> bool:
    return (
        isinstance(value, Tree)
        and value.kind in ("leaf", "branch")
        and all(map(is_tree, value.parts))
        and (value.links is None or is_link(value.links))
    )


@pytest.mark.anyio
async def test_types_may_hold_themselves(model: Model) -> None:
    assert is_link(await model.generate_structured(ASKED, Link))
    assert is_tree(await model.generate_structured(ASKED, Tree))
    plan = await model.generate_structured(ASKED, Plan)
    assert is_link(plan["first"])
    assert is_link(plan["second"])


@pytest.mark.anyio
async def test_instances_of_types_that_hold_themselves_may_be_deep_but_not_endless() -> None:
    def links(depth: int) -> str:
        return '{"last": false, "next": ' * depth + '{"last": true, "next": null}' + "}" * depth

    async with fake_model(links(60), links(300)) as model:
        link = await model.generate_structured(ASKED.with_sampling(SamplingParams(max_len=100_000)), Link)
        depth = 0
        while link.next is not None:
            link, depth = link.next, depth + 1
        assert (depth, link.last) == (60, True)
        with pytest.raises(ConstraintError, match="nested too deep"):
            await model.generate_structured(ASKED.with_sampling(SamplingParams(max_len=100_000)), Link)


@dataclasses.dataclass
class Left:
    inner: Left | Right | None
    kind: Literal["left"]


@dataclasses.dataclass
class Right:
    inner: Left | Right | None
    kind: Literal["right"]


@pytest.mark.anyio
async def test_members_of_deep_unions_are_each_read_once() -> None:
    depth = 50  # 2 ** 50 readings would not end
    text = '{"inner": ' * depth + "null" + ', "kind": "right"}' * depth
    async with fake_model(text) as model:
        right = await model.generate_structured(ASKED.with_sampling(SamplingParams(max_len=100_000)), Right)
        assert isinstance(right.inner, Right)


@pytest.mark.anyio
@pytest.mark.parametrize("type_", [Strange, Hidden, Endless, Egg, complex, 3, None])
async def test_types_without_a_schema_are_refused_by_name(type_: Any) -> None:
    async with fake_model("{}") as model:
        with pytest.raises(ConstraintError, match="has no JSON schema"):
            await model.generate_structured(ASKED, type_)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("type_", "told"),
    [
        (complex, r"^type_ = complex has no JSON schema: complex is not one of int, .* TypedDicts of these$"),
        (list[complex], r"^type_ = list has no JSON schema: list\[complex\]: complex is not one of .*of these$"),
        (list[Order], "Order is not one of .*; generate_structured takes pydantic models as a whole, RootModels"),
    ],
)
async def test_a_type_without_a_schema_is_named_once(type_: Any, told: str) -> None:
    async with fake_model("{}") as model:
        with pytest.raises(ConstraintError, match=told) as raised:
            await model.generate_structured(ASKED, type_)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__


@pytest.mark.anyio
async def test_a_schema_in_the_place_of_a_type_is_told_where_it_goes() -> None:
    schema: Any = {"type": "object"}
    async with fake_model("{}") as model:
        with pytest.raises(ConstraintError, match=r"is no type: for a schema, use with_constraint"):
            await model.generate_structured(ASKED, schema)


@pytest.mark.anyio
async def test_requests_that_contradict_the_type_are_refused() -> None:
    async with fake_model("{}") as model:
        with pytest.raises(InvalidRequestError, match="constraint"):
            await model.generate_structured(ASKED.with_constraint(Constraint.regex("a")), Point)
        with pytest.raises(InvalidRequestError, match="n_choices"):
            await model.generate_structured(ASKED.with_sampling(SamplingParams(n_choices=2)), Point)
