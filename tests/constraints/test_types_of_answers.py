"""Whatever a type's constraint allows can be read as an instance of the type."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import ipaddress
import random
import uuid
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, NotRequired, Optional, Required, TypedDict

import attrs
import pydantic
import pytest
from pydantic import Field
from schemas import random_text
from test_compiler import BYTES

from paged_sdk import ConstraintError, InvalidRequestError
from paged_sdk.calls.structured import Structure
from paged_sdk.constraints.compiler import GrammarCompiler
from paged_sdk.types.function_schema import describe_type


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)] = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog", "puppy"]
    owner: str | None = None


class Tree(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    value: Literal[1, "two", True]
    children: Annotated[list[Tree], Field(max_length=2)] = []


class Owner(pydantic.BaseModel):
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]
    tree: Optional[Tree]  # noqa: UP045 - people write it so


@dataclass
class Invoice:
    id: uuid.UUID
    issued: datetime.datetime
    due: datetime.date | None
    at: datetime.time
    total: decimal.Decimal


@attrs.frozen
class Sent:
    invoice: Invoice
    to: tuple[Literal["a", "b"], ...]


@attrs.frozen
class Box:
    _size: int
    color: Literal["red", "blue"] = attrs.field(alias="paint", default="red")


@dataclass
class Counted:
    MOST: ClassVar[int] = 9
    names: list[Literal["a", "b"]]
    step: dataclasses.InitVar[Literal[1, 2]]
    total: int = dataclasses.field(init=False, default=0)

    def __post_init__(self, step: int) -> None:
        self.total = step * len(self.names)


class Record(TypedDict, total=False):
    sent: Required[Sent]
    paid: bool
    note: NotRequired[Literal["late"]]


PYDANTIC: Final[dict[str, Any]] = {
    "date and time": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "duration": datetime.timedelta,
    "id": uuid.UUID,
    "decimal": decimal.Decimal,
    "price": Annotated[decimal.Decimal, Field(max_digits=6, decimal_places=2, gt=0)],
    "whole decimal": Annotated[decimal.Decimal, Field(max_digits=3, ge=-5, lt=40)],
    "share": Annotated[float, Field(gt=0, lt=1)],
    "steps": Annotated[int, Field(multiple_of=5, gt=2, lt=1000)],
    "cents": Annotated[float, Field(multiple_of=0.01)],
    "set": set[int],
    "frozen set": Annotated[frozenset[bool], Field(min_length=1)],
    "bytes": bytes,
    "address": pydantic.AnyUrl,
    "web address": pydantic.HttpUrl,
    "IPv4": ipaddress.IPv4Address,
    "IPv6": ipaddress.IPv6Address,
    "map": dict[str, int],
    "tuple": tuple[int, str],
    "code": Annotated[str, Field(pattern=r"^\d{3}-[A-Z]$")],
    "flags": Annotated[list[bool], Field(min_length=1, max_length=2)],
}
TYPES: Final[dict[str, Any]] = {
    **{name: pydantic.create_model("Answer", it=(type_, ...)) for name, type_ in PYDANTIC.items()},
    "unions by a tag": Owner,
    "dataclass": Invoice,
    "attrs class": Sent,
    "attrs class with names of its constructor's own": Box,
    "dataclass with what its constructor alone is told": Counted,
    "TypedDict": Record,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: BYTES)


@pytest.mark.parametrize("name", TYPES)
def test_every_allowed_answer_is_an_instance(compiler: GrammarCompiler, name: str) -> None:
    structure = Structure.of(TYPES[name])
    grammar = compiler.compile(structure.constraint)
    num_texts = 0
    for seed in range(25):
        text = random_text(grammar, random.Random(f"{name} {seed}"), 400)
        if text is not None:
            num_texts += 1
            instance = structure.parse(text)
            assert isinstance(instance, dict if TYPES[name] is Record else TYPES[name]), text
    assert num_texts > 5


def test_parts_are_instances_too() -> None:
    text = (
        '{"sent": {"invoice": {"id": "2eb8aa08-aa98-11ea-b4aa-73b441d16380", "issued": "2024-02-29T12:00:00.5Z", '
        '"due": null, "at": "23:59:59+01:00", "total": "19.90"}, "to": ["a"]}}'
    )
    sent = Structure.of(Record).parse(text)["sent"]
    assert isinstance(sent, Sent)
    assert sent.invoice.id == uuid.UUID("2eb8aa08-aa98-11ea-b4aa-73b441d16380")
    assert sent.invoice.issued == datetime.datetime(2024, 2, 29, 12, 0, 0, 500_000, datetime.UTC)
    assert (sent.invoice.due, str(sent.invoice.total), sent.to) == (None, "19.90", ("a",))


def test_parts_have_the_names_that_their_constructor_has() -> None:
    assert describe_type(Box) == {
        "type": "object",
        "properties": {"size": {"type": "integer"}, "paint": {"type": "string", "enum": ["red", "blue"]}},
        "required": ["size"],
    }
    assert Structure.of(Box).parse('{"size": 3, "paint": "blue"}') == Box(size=3, paint="blue")
    assert list(describe_type(Counted)["properties"]) == ["names", "step"]
    assert Structure.of(Counted).parse('{"names": ["a", "b"], "step": 2}').total == 4
    untyped: Any = attrs.make_class("Untyped", ["x"])
    with pytest.raises(InvalidRequestError, match=r"Untyped\.x"):
        describe_type(untyped)


class Several(pydantic.BaseModel):
    tags: Annotated[set[int], Field(min_length=2)]


class Picture(pydantic.BaseModel):
    path: pydantic.FilePath


class Chain(pydantic.BaseModel):
    next: Chain


@pytest.mark.parametrize(("type_", "keyword"), [(Several, "uniqueItems"), (Picture, "format"), (Chain, "$ref")])
def test_what_cannot_be_enforced_is_refused_by_its_keyword(
    compiler: GrammarCompiler, type_: type[pydantic.BaseModel], keyword: str
) -> None:
    with pytest.raises(ConstraintError) as raised:
        compiler.compile(Structure.of(type_).constraint)
    assert raised.value.keyword == keyword
