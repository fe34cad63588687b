"""What JSON schemas mean is enforced to the last digit and character, and by every common reading."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator
from decimal import Decimal
from itertools import islice, product
from typing import Any, Final

import pytest
from test_compiler import BYTES, accepts

from paged_sdk import Constraint, ConstraintError
from paged_sdk.constraints import schema_parts
from paged_sdk.constraints.alternatives import Alternatives
from paged_sdk.constraints.compiler import GrammarCompiler
from paged_sdk.constraints.endless import endless_reference
from paged_sdk.constraints.json_schema import Problem, _references, read_schema
from paged_sdk.constraints.schema_parts import schemas_in
from paged_sdk.types.patterns import portable_pattern


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: BYTES)


def allowed(compiler: GrammarCompiler, schema: Any, *texts: str) -> list[str]:
    """Return those texts that a schema's grammar allows."""
    grammar = compiler.compile(Constraint.json_schema(json.dumps(schema)))
    return [text for text in texts if accepts(grammar, text)]


NAMED: Final = {"properties": {"a": {"type": "integer"}, "é": {"type": "null"}}}


@pytest.mark.parametrize("more", [{}, {"additionalProperties": {"type": "string"}}, {"patternProperties": {"^b": {}}}])
def test_a_property_cannot_be_named_in_another_way(compiler: GrammarCompiler, more: dict[str, Any]) -> None:
    escaped = (r'{"\u0061":"x"}', r'{"a":1,"\u0061":"x"}', r'{"\u00e9":"x"}', r'{"\u000a":"x"}')
    assert allowed(compiler, {"type": "object", **NAMED, **more}, *escaped) == []
    assert allowed(compiler, {"type": "object", **NAMED, **more}, '{"a":1,"x":"y"}') == ['{"a":1,"x":"y"}']


def test_control_characters_need_names_that_are_all_given(compiler: GrammarCompiler) -> None:
    bell = {"type": "object", "properties": {"a": {"const": "\a"}}}
    assert allowed(compiler, {**bell, "additionalProperties": False}, r'{"a":"\u0007"}') == [r'{"a":"\u0007"}']
    with pytest.raises(ConstraintError, match="control character"):
        allowed(compiler, bell)


BOUNDS: Final[list[tuple[dict[str, Any], list[str], list[str]]]] = [
    ({"exclusiveMaximum": 1}, ["0.99999999999999", "-3"], ["1", "1.0", "0.99999999999999999"]),
    ({"exclusiveMinimum": 0}, ["0.00000000000001", "1"], ["0", "0.0", "0." + "0" * 400 + "1", "-0"]),
    ({"exclusiveMinimum": 0.1, "minimum": 0.2}, ["0.2", "0.3"], ["0.1", "0.19999999999999999"]),
    ({"exclusiveMinimum": 2.5, "exclusiveMaximum": 2.6}, ["2.55"], ["2.5", "2.50000000000000000001", "2.6"]),
    ({"maximum": 97.62289304452837}, ["97.6228930445283"], ["97.62289304452838"]),
    ({"type": "integer", "maximum": 2**63 - 1}, ["9223372036854000000"], ["9223372036854775808"]),
    ({"type": "integer", "exclusiveMaximum": 3, "minimum": -1.5}, ["-1", "2"], ["3", "-2"]),
    ({"exclusiveMinimum": 3, "allOf": [{"type": "integer"}]}, ["4"], ["3"]),
    ({"multipleOf": 0.01}, ["4.35", "19.99", "0"], ["0.075"]),
    ({"multipleOf": 2.0, "minimum": 1, "maximum": 9.0}, ["2", "8"], ["1", "0", "10"]),
    ({"const": 1.5}, ["1.5"], ["1.50000000000000000001", "1"]),
    ({"enum": [9007199254740992, -2]}, ["9007199254740992", "-2"], ["9007199254740993"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), BOUNDS)
def test_numbers_are_enforced_digit_by_digit(
    compiler: GrammarCompiler, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    schema = schema if schema.keys() & {"type", "const", "enum", "allOf"} else {"type": "number", **schema}
    assert allowed(compiler, schema, *good, *bad) == good


def test_no_number_beyond_random_bounds_is_allowed(compiler: GrammarCompiler) -> None:
    rng = random.Random(5)
    num_allowed = 0
    for _ in range(150):
        num_decimals, size = rng.randrange(17), 10 ** rng.choice([0, 1, 5, 9])
        low, high = sorted(round(rng.uniform(-size, size), num_decimals) for _ in range(2))
        strict = rng.random() < 0.5
        names = ("exclusiveMinimum", "exclusiveMaximum") if strict else ("minimum", "maximum")
        steps = [rng.randrange(-2, 3) * Decimal(10) ** -place for place in range(0, 20, 3)]
        values = [Decimal(repr(bound)) + step for bound in (low, high) for step in steps]
        try:
            found = allowed(compiler, {"type": "number", names[0]: low, names[1]: high}, *(f"{v:f}" for v in values))
        except ConstraintError as error:
            assert error.keyword in names
            continue
        num_allowed += len(found)
        for text in found:
            assert (low < float(text) < high) if strict else (low <= float(text) <= high), (low, high, text)
    assert num_allowed > 200


REFUSED: Final[list[tuple[Any, str]]] = [
    ({"const": 0.9999999999999999}, "const"),
    ({"items": {"enum": ["a", [{"b": 2**63}]]}}, "enum"),
    ({"multipleOf": 300, "allOf": [{"multipleOf": 0.0000001}]}, "multipleOf"),
    ({"multipleOf": 0.07}, "multipleOf"),
    ({"type": "number", "minimum": 3, "maximum": 2}, "minimum"),
    ({"$schema": "https://json-schema.org/draft-03/schema#"}, "$schema"),
    ({"$schema": "https://example.com/mine"}, "$schema"),
    ({"allOf": [{"$id": "https://example.com/a", "$ref": "b"}]}, "$id"),
    (False, "false"),
    ({"type": "array", "items": False, "minItems": 1}, "minItems"),
    ({"enum": []}, "enum"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
    ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
    ({"type": "string", "allOf": [{"type": "null"}]}, "allOf"),
    ({"patternProperties": {"^a": {}, "a$": {"type": "null"}}}, "patternProperties"),
    ({"patternProperties": {".": {}, "[^\n\r\u2028\u2029]": {}, r"[^\n\r\u{2028}\u{2029}]": {}}}, "patternProperties"),
    ({"type": "string", "pattern": r"\bword\b"}, "pattern"),
    ({"type": "string", "pattern": "(?x) a"}, "pattern"),
    ({"type": "string", "pattern": "a**)"}, "pattern"),
]


@pytest.mark.parametrize(("schema", "keyword"), REFUSED)
def test_refusals_name_the_keyword(compiler: GrammarCompiler, schema: Any, keyword: str) -> None:
    with pytest.raises(ConstraintError, match="cannot be enforced") as raised:
        allowed(compiler, schema)
    assert raised.value.keyword == keyword


@pytest.mark.parametrize("text", ["NaN", '{"minimum": NaN}', '{"maximum": -Infinity}'])
def test_what_only_python_takes_for_json_is_refused(compiler: GrammarCompiler, text: str) -> None:
    with pytest.raises(ConstraintError, match="JSON has no number"):
        compiler.compile(Constraint.json_schema(text))


def test_everything_is_allowed_by_true(compiler: GrammarCompiler) -> None:
    texts = ['{"a": [1, null]}', "-1.5", '"x"']
    assert allowed(compiler, True, *texts) == allowed(compiler, {}, *texts) == texts


PATTERNS: Final = {
    r"^\d\D$": (["1a", "0-"], ["٣a", "1٣", "11", "1"]),
    r"^\w\W$": (["a-", "_ "], ["é-", "aé", "aa"]),
    r"^[\w-][^\W\d]$": (["-a", "a_"], ["é_", "-1", "-é"]),
    r"^\s\S$": ([" a", "\u00a0-"], ["\ufeffa", " \ufeff", " \u0085", "\u0085a", "  "]),
    r"^[^\s]$": (["a"], [" ", "\ufeff", "\u0085"]),
    r"^a.b$": (["a-b", "a🐲b"], ["a\nb", "a\rb", "a\u2028b"]),
    r"^[a&&b]$": (["a", "b", "&"], ["&&"]),
    r"^[[a]+$": (["[a["], ["b"]),
    r"^[+--]$": (["+", ",", "-"], ["*", "."]),
    r"^[a~~^]$": (["~", "^"], ["b"]),
    r"^[\]\b]$": (["]", "\b"], ["b", "\\"]),
    r"^\uD83D\uDC32\/\cJ\0?$": (["🐲/\n"], ["🐲\n"]),
    r"^(?<year>[0-9]{4})(?:-\-)?$": (["2024", "2024--"], ["2024-"]),
    r"^(?i:ab)\$\.$": (["aB$."], ["ab."]),
    "a|^b$": (["xax", "b"], ["xb"]),
    r"^\<\%\é$": (["<%é"], ["%"]),
    r"^\p{Lu}$": (["É"], ["é"]),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_mean_what_every_reading_of_them_means(compiler: GrammarCompiler, pattern: str) -> None:
    good, bad = (list(map(json.dumps, texts)) for texts in PATTERNS[pattern])
    schema = {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    for form in (dict[str, str](), {"ensure_ascii": ""}):
        good, bad = ([json.dumps(json.loads(text), ensure_ascii=not form) for text in texts] for texts in (good, bad))
        found = allowed(compiler, {"type": "string", "pattern": pattern}, *good, *bad)
        assert set(found) <= set(good)
        names = allowed(compiler, schema, *(f"{{{text}:null}}" for text in (*good, *bad)))
        assert names == [f"{{{text}:null}}" for text in found]
    assert found == good


@pytest.mark.parametrize(
    "pattern",
    ["(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?s).", "(?m)^a", r"\1", r"\Ba", r"\Aa", r"a\z", r"\k<a>", "[]a]"],
)
def test_patterns_without_one_meaning_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"not supported|read differently"):
        portable_pattern(pattern)


def test_plain_patterns_stay_as_they_are() -> None:
    for pattern in (r"^[a-z]{2,4}[0-9]$", r"^(foo|ba+r)?$", r"^[^a]*[\]\\]$", "^$", ""):
        assert portable_pattern(pattern) == pattern


CAT: Final = {"type": "object", "properties": {"kind": {"const": "cat"}, "n": {}}, "required": ["kind"]}
DOG: Final = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
BIRD: Final = {"properties": {"kind": {"$ref": "#/$defs/name"}}, "required": ["kind", "wings"]}
DEFINITIONS: Final = {"cat": CAT, "dog": DOG, "bird": BIRD, "name": {"const": "bird"}}
ONE_OF: Final[dict[str, tuple[list[Any], bool]]] = {
    "a property of each": ([CAT, DOG], True),
    "references": ([{"$ref": f"#/$defs/{name}"} for name in ("cat", "dog", "bird")], True),
    "one in another": ([{"oneOf": [{"$ref": "#/$defs/cat"}, DOG]}, {"allOf": [{"$ref": "#/$defs/bird"}]}], True),
    "types": ([CAT, {"type": ["string", "null"]}, {"type": "integer"}], True),
    "values": ([{"enum": [1, "a"]}, {"enum": [True, "b"]}, CAT], True),
    "integers and numbers": ([{"type": "integer"}, {"type": "number"}], False),
    "1 and 1.0": ([{"const": 1}, {"enum": [1.0, 2]}], False),
    "the same kind": ([CAT, {**DOG, "properties": {"kind": {"enum": ["cat", "dog"]}}}], False),
    "no kind required": ([CAT, {**DOG, "required": []}], True),
    "none requires it": ([{**CAT, "required": []}, {**DOG, "required": []}], False),
    "other values than objects": ([BIRD, {"properties": {"kind": {"const": "x"}}, "required": ["kind"]}], False),
    "a reference to itself": ([{"$ref": "#/$defs/loop"}, CAT], False),
    "nothing": ([CAT, {}], False),
}


@pytest.mark.parametrize("name", ONE_OF)
def test_one_of_is_enforced_where_each_excludes_the_others(compiler: GrammarCompiler, name: str) -> None:
    parts, is_possible = ONE_OF[name]
    schema = {"oneOf": parts, "$defs": {**DEFINITIONS, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, CAT]}}}
    if is_possible:
        cats, wrong = ['{"kind":"cat"}', '{"kind":"cat","n":2}'], ['{"kind":"cow"}', '{"kind":1}']
        found = allowed(compiler, schema, *cats, *wrong)
        assert found == ([] if name == "values" and CAT not in parts else cats)
    else:
        with pytest.raises(ConstraintError) as raised:
            allowed(compiler, schema)
        assert raised.value.keyword == "oneOf"


LINK: Final = {"type": "object", "properties": {"next": {"$ref": "#/$defs/link"}}, "required": ["next"]}
PAIR: Final = {"type": "array", "prefixItems": [{"$ref": "#/$defs/link"}, {}], "minItems": 1}
ENDLESS: Final[dict[str, tuple[Any, str | None]]] = {
    "an object": ({"$ref": "#/$defs/link", "$defs": {"link": LINK}}, ""),
    "beside others": (
        {"properties": {"a": {}, "b": {"$ref": "#/$defs/link"}}, "$defs": {"link": LINK}},
        "/properties/b",
    ),
    "a list": ({"anyOf": [{}, {"$ref": "#/$defs/link"}], "$defs": {"link": PAIR}}, "/anyOf/1"),
    "the whole": ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "/items"),
    "in two steps": ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/link"}]}, "link": LINK}}, ""),
    "nobody's beside the whole": (
        {"properties": {"child": {"$ref": "#"}}, "$defs": {"link": LINK}},
        None,
    ),
    "nobody's": ({"type": "null", "$defs": {"link": LINK}}, None),
    "not required": ({"$ref": "#/$defs/link", "$defs": {"link": {**LINK, "required": []}}}, None),
    "no object": ({"$ref": "#/$defs/link", "$defs": {"link": {**LINK, "type": ["object", "null"]}}}, None),
    "an end": ({"$ref": "#/$defs/link", "$defs": {"link": {"anyOf": [LINK, {"type": "null"}]}}}, None),
    "an empty list": ({"$ref": "#/$defs/link", "$defs": {"link": {**PAIR, "minItems": 0}}}, None),
    "an outer end": (
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": {"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/link"}]},
                "link": {"type": "object", "properties": {"tree": {"$ref": "#/$defs/tree"}}, "required": ["tree"]},
            },
        },
        None,
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_always_holds_another_one_is_refused(compiler: GrammarCompiler, name: str) -> None:
    schema, position = ENDLESS[name]
    if position is None:
        compiler.compile(Constraint.json_schema(schema))
        return
    with pytest.raises(ConstraintError, match="without end") as raised:
        compiler.compile(Constraint.json_schema(schema))
    assert (raised.value.keyword, raised.value.position) == ("$ref", position)


def test_the_text_of_an_error_holds_no_long_name(compiler: GrammarCompiler) -> None:
    name = "a" * 10_000
    endless = {"properties": {name: {"$ref": f"#/$defs/{name}"}}, "$defs": {name: {"$ref": f"#/$defs/{name}"}}}
    for schema in (endless, {"properties": {name: {"x-guidance": 1}}}, {"properties": {name: {"$schema": name}}}):
        with pytest.raises(ConstraintError) as raised:
            compiler.compile(Constraint.json_schema(schema))
        assert raised.value.position == f"/properties/{name}"
        assert len(str(raised.value)) < 500


def test_the_document_itself_may_be_an_alternative(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"next": {"oneOf": [{"type": "null"}, {"$ref": "#"}]}}}
    compiler.compile(Constraint.json_schema(schema))


def test_comparing_alternatives_takes_bounded_time(compiler: GrammarCompiler) -> None:
    """Each of 30 definitions leads to all others, in the first ones of which no end would be found."""
    names = [f"#/$defs/{number}" for number in range(30)]
    every: dict[str, Any] = {"oneOf": [{"$ref": name} for name in names]}
    with pytest.raises(ConstraintError) as raised:
        allowed(compiler, {**every, "$defs": {str(number): every for number in range(30)}})
    assert raised.value.keyword == "oneOf"


def test_places_below_a_long_name_take_little_memory() -> None:
    """As texts, those of 5,000 schemas below a name of 20,000 characters would take 100 MB."""
    schema: dict[str, Any] = {"properties": {"a" * 20_000: {"anyOf": [{}] * 4_999 + [{"$schema": "none"}]}}}
    tracemalloc.start()
    try:
        places = [place for place, _ in schemas_in(schema)]
        made = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, schema_parts.__file__)])
    finally:
        tracemalloc.stop()
    assert len(places) == 5_002
    assert sum(each.size for each in made.statistics("filename")) < 5_000_000
    problem = read_schema(json.dumps(schema))
    assert isinstance(problem, Problem)
    assert problem.position == "/properties/" + "a" * 20_000 + "/anyOf/4999"


def test_schemas_that_many_references_lead_to_are_read_once() -> None:
    """300 references lead to a definition of 1,000 schemas, each in another spelling, and all are followed."""
    spellings = ["".join(each) for each in islice(product(["~", "~0"], repeat=9), 300)]
    many: list[dict[str, Any]] = [{} for _ in range(1_000)]
    schema = {"anyOf": [{"$ref": f"#/$defs/{each}"} for each in spellings], "$defs": {"~" * 9: {"anyOf": many}}}
    looked_at = 0

    class Looked(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal looked_at
            looked_at += key == "$ref"
            return super().get(key, default)

    many[0] = Looked({"$ref": "#"})
    found = _references(schema)
    assert set(found) == {"#", *(f"#/$defs/{each}" for each in spellings)}
    assert looked_at == 1


def test_looking_for_endless_references_counts_the_names_that_it_reads() -> None:
    """Each of 1,000 objects requires the next one, beside 1,000 names that say nothing."""
    num_read = 0

    class Names(list[str]):
        def __iter__(self) -> Iterator[str]:
            nonlocal num_read
            num_read += len(self)
            return super().__iter__()

    names = Names(["next", *(["other"] * 999)])
    definitions: dict[str, Any] = {
        str(number): {
            "type": "object",
            "properties": {"next": {"$ref": f"#/$defs/{(number + 1) % 1_000}"}},
            "required": names,
        }
        for number in range(1_000)
    }
    assert endless_reference({"$defs": definitions}, [f"#/$defs/{number}" for number in range(1_000)]) is None
    assert num_read < 1_000_000


@pytest.mark.parametrize("said", [{"enum": [0]}, {"properties": {"kind": {"enum": [0]}}, "required": ["kind"]}])
def test_comparing_alternatives_counts_the_values_that_it_compares(said: dict[str, Any]) -> None:
    """Each of 100 alternatives has values that none of the others has."""

    def alternatives(num_values: int) -> list[object]:
        parts: list[Any] = json.loads(
            json.dumps([{"type": "object" if "required" in said else "integer", **said}] * 100)
        )
        for number, part in enumerate(parts):
            values = part["properties"]["kind"] if "required" in said else part
            values["enum"] = list(range(number * num_values, (number + 1) * num_values))
        return parts

    assert Alternatives({}).exclude_each_other(alternatives(10))
    assert not Alternatives({}).exclude_each_other(alternatives(1_000))
