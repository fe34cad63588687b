"""What cannot be enforced is refused, with its reason, and in bounded time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
from attrs import evolve

from paged_sdk import Constraint, ConstraintError, QueueFullError, RequestBuilder
from paged_sdk.constraints.compiler import GrammarCompiler
from paged_sdk.constraints.grammar import Grammar
from paged_sdk.constraints.vocabulary import Vocabulary
from paged_sdk.errors import InvalidRequestError

BYTES: Final = Vocabulary(
    tokens=[*(bytes([byte]) for byte in range(256)), b""],
    special_ids=[256],
    end_ids=(256,),
    encode=lambda text: list(text.encode()),
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: BYTES)


def accepts(grammar: Grammar, text: str) -> bool:
    matcher, data = grammar.matcher.deep_copy(), text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


OBJECT: Final = {"type": "object", "properties": {"a": {"type": "string"}}}


def test_compact_json_has_no_white_space(compiler: GrammarCompiler) -> None:
    schema = {**OBJECT, "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "integer"}}}}
    compact = compiler.compile(Constraint.json_schema(schema, compact=True))
    spaced = compiler.compile(Constraint.json_schema(schema))
    for text in ('{"a":"x y","b":[1,2]}', "{}"):
        assert accepts(compact, text)
        assert accepts(spaced, text)
    for text in ('{"a": "x"}', '{ "a":"x"}', '{"b":[1, 2]}', "{\n}"):
        assert not accepts(compact, text)
        assert accepts(spaced, text)
    assert bytes(compact.begin((), 257).forced()) == b"{"
    for kind, value in (("regex", True), ("json_schema", 1), ("json_schema", None)):
        with pytest.raises(ConstraintError, match="compact"):
            Constraint(kind, "{}", compact=value)  # type: ignore[arg-type]


def test_where_a_tokenizer_changes_texts_forced_text_is_made_of_the_longest_tokens() -> None:
    tokens = [*BYTES.tokens, b"ab", b"abd", b"\xc3\xa9"]
    loud = evolve(BYTES, tokens=tokens, encode=lambda text: list(text.upper().encode()))
    grammar = GrammarCompiler(lambda: loud).compile(Constraint.regex("abcaé"))
    assert grammar.begin((), len(tokens)).forced() == [257, ord("c"), ord("a"), 259]


REFUSED: Final[dict[str, dict[str, Any]]] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": OBJECT, "then": OBJECT},
    "dependentRequired": {**OBJECT, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**OBJECT, "dependentSchemas": {"a": OBJECT}},
    "dependencies": {**OBJECT, "dependencies": {"a": ["b"]}},
    "propertyNames": {**OBJECT, "propertyNames": {"maxLength": 3}},
    "unevaluatedProperties": {**OBJECT, "unevaluatedProperties": False},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "string"}},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "contentEncoding": {"type": "string", "contentEncoding": "base64"},
    "contentMediaType": {"type": "string", "contentMediaType": "application/json"},
    "x-guidance": {**OBJECT, "x-guidance": {"lenient": True}},
    "minProperties": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2},
    "multipleOf": {"type": "integer", "multipleOf": 1_000_003},
    "patternProperties": {"type": "object", "patternProperties": {f"^k{i}[a-z]*$": {} for i in range(500)}},
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_keywords_that_cannot_be_enforced_are_named(compiler: GrammarCompiler, keyword: str) -> None:
    schema = {"type": "object", "properties": {"x/y": {"type": "array", "items": REFUSED[keyword]}}}
    with pytest.raises(ConstraintError, match="cannot be enforced at /properties/x~1y/items: ") as raised:
        compiler.compile(Constraint.json_schema(schema))
    assert (raised.value.kind, raised.value.keyword) == ("json_schema", keyword)
    assert raised.value.position == "/properties/x~1y/items"
    assert keyword in str(raised.value) or keyword == "patternProperties"


@pytest.mark.parametrize(
    ("schema", "position"),
    [
        ({"anyOf": [{"type": "object", "additionalProperties": False}], "allOf": [False]}, "/allOf/0"),
        ({"properties": {"a": False}, "allOf": [False]}, "/allOf/0"),
        ({"allOf": [{"anyOf": [False, {"type": "string"}]}, False]}, "/allOf/1"),
        ({"anyOf": [{"allOf": [False]}, False]}, "/anyOf/0/allOf/0"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a": False, "a/b": False}}, "/$defs/a~1b"),
        ({"$ref": "#/$defs/b", "$defs": {"a": False, "b": {"allOf": [{"type": "string"}, False]}}}, "/$defs/b/allOf/1"),
    ],
)
def test_the_false_schema_that_no_value_fits_is_located(
    compiler: GrammarCompiler, schema: dict[str, Any], position: str
) -> None:
    with pytest.raises(ConstraintError, match="schema is false") as raised:
        compiler.compile(Constraint.json_schema(schema))
    assert (raised.value.keyword, raised.value.position) == ("false", position)


@pytest.mark.parametrize(
    ("schema", "keyword", "position"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "string", "format": "iri"}]}, "format", "/oneOf/1"),
        ({"oneOf": [False]}, "false", "/oneOf/0"),
        # llguidance gets a minimum in its place.
        ({"type": "number", "exclusiveMinimum": 3, "maximum": 1}, "minimum", ""),
    ],
)
def test_problems_are_located_in_the_schema_as_it_was_given(
    compiler: GrammarCompiler, schema: dict[str, Any], keyword: str, position: str
) -> None:
    with pytest.raises(ConstraintError) as raised:
        compiler.compile(Constraint.json_schema(schema))
    assert (raised.value.keyword, raised.value.position) == (keyword, position)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint.json_schema({"oneOf": [{"type": "string"}, {"maxLength": 3}]}), "oneOf"),
        (Constraint.json_schema({"type": "string", "format": "iri"}), "Unknown format: iri"),
        (Constraint.json_schema({"type": "string", "pattern": "^a(?=b)"}), "look-around"),
        (Constraint.json_schema({"type": "strng"}), "Invalid type"),
        (Constraint.json_schema({"$ref": "https://example.com/schema"}), "not present"),
        (Constraint.json_schema({"$ref": "#/nowhere"}), "does not exist"),
        (Constraint.json_schema({"$ref": "#"}), "no text"),
        (Constraint.json_schema({"minimum": 3, "maximum": 1, "type": "integer"}), "nsatisfiable"),
        (Constraint.json_schema("[1]"), "is a list"),
        (Constraint.json_schema("{"), "not valid JSON"),
        (Constraint.json_schema("[" * 100_000), "not valid JSON"),
        (Constraint.regex("(a"), "unclosed group"),
        (Constraint.regex("a(?!b)"), "look-around"),
        (Constraint.lark("start: nothing"), "unknown name"),
        (Constraint.lark("begin: 'a'"), "lexer error"),
        (Constraint.llguidance("{}"), "missing field"),
    ],
)
def test_what_makes_no_sense_is_refused(compiler: GrammarCompiler, constraint: Constraint, reason: str) -> None:
    with pytest.raises(ConstraintError, match="cannot be enforced") as raised:
        compiler.compile(constraint)
    assert reason in str(raised.value)
    assert raised.value.kind == constraint.kind
    assert len(str(raised.value)) < 300


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


BOMBS: Final = {
    "a schema of a megabyte": lambda: Constraint.json_schema(
        {"properties": {f"property {i}": {"enum": [f"{i} {j}" for j in range(5)]} for i in range(14_000)}}
    ),
    "a choice of a megabyte": lambda: Constraint.json_schema({"enum": [f"the value {i}" for i in range(45_000)]}),
    "a schema 400 deep": lambda: Constraint.json_schema(nested(400)),
    "a product of choices": lambda: Constraint.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(6)]} for i in range(8)]}
    ),
    "many expressions at once": lambda: Constraint.json_schema(
        {"type": "string", "allOf": [{"pattern": f"[a-z]*{c}[a-z]*{c}"} for c in "abcdefghijklmno"]}
    ),
    "3000 parentheses": lambda: Constraint.regex("(" * 3000 + "a" + ")" * 3000),
    "a million letters": lambda: Constraint.regex("a{1000000}"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name == "a schema of a megabyte")) for name in BOMBS]
)
def test_bombs_end_soon(compiler: GrammarCompiler, name: str) -> None:
    constraint = BOMBS[name]()
    begun = time.monotonic()
    try:
        grammar: Grammar | None = compiler.compile(constraint)
    except ConstraintError:
        grammar = None
    assert time.monotonic() - begun < 12  # at 10 it gives up by itself; what is beyond is a busy machine's
    assert (grammar is not None) == (name in ("a choice of a megabyte", "a million letters"))


CHAINS: Final = """
from paged_sdk import Constraint, ConstraintError
from paged_sdk.constraints.compiler import GrammarCompiler
from paged_sdk.constraints.vocabulary import Vocabulary

def rules(number):
    return "start: r0\\n" + "".join(f'r{i}: "x" r{i + 1}\\n' for i in range(number)) + f'r{number}: "y"'

def references(number):
    defs = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(number)}
    return {"$ref": "#/$defs/a0", "$defs": {**defs, f"a{number}": {"type": "null"}}}

vocabulary = Vocabulary(
    tokens=[*(bytes([byte]) for byte in range(256)), b""], special_ids=[256], end_ids=(256,), encode=str.encode
)
compiler = GrammarCompiler(lambda: vocabulary)
for constraint in (
    Constraint.lark(rules(10_000)),
    Constraint.lark(rules(40_000)),
    Constraint.json_schema(references(4000)),
    Constraint.json_schema(references(12_000)),
    Constraint.regex("((a{100}){100}){100}"),
):
    try:
        compiler.compile(constraint).begin((), 257)
        print("compiled")
    except ConstraintError as error:
        print(error.kind)
"""


def test_chains_of_thousands_are_compiled_or_refused() -> None:
    """In a process of its own: with a stack of 8 MB it is at an end."""
    done = subprocess.run([sys.executable, "-c", CHAINS], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["compiled", "lark", "compiled", "json_schema", "compiled"]


@pytest.mark.parametrize("source", ["", "a" * 5_000_000, "\ud800", 3, None])
def test_what_is_no_text_is_refused_at_once(source: Any) -> None:
    for make in (Constraint.regex, Constraint.json_schema, Constraint.lark, Constraint.llguidance):
        with pytest.raises(ConstraintError):
            make(source)


@pytest.mark.parametrize("schema", [{"a": object()}, {"a": float("nan")}, {1: {}, "x": {2}}, [], ()])
def test_what_is_no_json_is_refused_at_once(schema: Any) -> None:
    with pytest.raises(ConstraintError):
        Constraint.json_schema(schema)


def test_a_dict_that_holds_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(ConstraintError):
        Constraint.json_schema(schema)


def test_constraints_are_values() -> None:
    assert Constraint.json_schema({"a": 1}) == Constraint.json_schema('{"a": 1}')
    assert len({Constraint.regex("a"), Constraint.regex("a"), Constraint.lark("a")}) == 2
    wrong: Any = "yaml"
    with pytest.raises(ConstraintError, match="kind"):
        Constraint(wrong, "a")
    given: Any
    for given in ("regex", None):
        with pytest.raises(InvalidRequestError, match="constraint"):
            RequestBuilder().with_constraint(given)


DATES: Final = {
    "date": (["2024-02-29", "2000-02-29", "0004-12-31"], ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31"]),
    "time": (["23:59:59Z", "00:00:00.5+01:30"], ["23:59:60Z", "24:00:00Z", "12:00Z", "12:00:00"]),
    "date-time": (["1996-12-19T16:39:57-08:00"], ["1998-12-31T23:58:60Z", "2023-02-29T00:00:00Z"]),
    "hostname": (["a", "www.example.com", "x-y.z"], ["-a", "a-", "a..b", "xn--X", "a_b", "a." * 31 + "abc"]),
    "email": (["joe.bloggs@example.com"], ["2962", "joe@", "@example.com"]),
    "ipv4": (["127.0.0.1"], ["256.1.1.1", "1.2.3"]),
    "ipv6": (["::1", "fe80::a"], ["12345::", "1::2::3"]),
    "uuid": (["2EB8AA08-AA98-11EA-B4AA-73B441D16380"], ["2eb8aa08-aa98-11ea-b4aa-73b441d1638"]),
}


@pytest.mark.parametrize("name", DATES)
def test_formats_are_enforced(compiler: GrammarCompiler, name: str) -> None:
    good, bad = DATES[name]
    schema = {"type": "string", "format": name, "pattern": "", "maxLength": 64}
    grammar = compiler.compile(Constraint.json_schema(schema))
    assert [text for text in good if not accepts(grammar, json.dumps(text))] == []
    assert [text for text in bad if accepts(grammar, json.dumps(text))] == []


def test_white_space_is_bounded(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(Constraint.json_schema({"type": "array", "items": {"type": "null"}}))
    for text in ("[null,null]", "[ null, null ]", "[\n  null,\n  null\n]", "[\n" + " " * 32 + "null]"):
        assert accepts(grammar, text), text
    for text in ("[  null]", "[\n\nnull]", "[\n" + " " * 33 + "null]", " []", "[] "):
        assert not accepts(grammar, text), text


def test_a_grammar_is_compiled_once() -> None:
    made: list[int] = []

    def vocabulary() -> Vocabulary:
        made.append(1)
        return BYTES

    compiler = GrammarCompiler(vocabulary)
    first = compiler.compile(Constraint.regex("a+"))
    assert compiler.compile(Constraint.regex("a+")) is first
    for number in range(70):
        compiler.compile(Constraint.regex(f"b{{{number},}}"))
    assert compiler.compile(Constraint.regex("a+")) is not first
    assert made == [1]


def test_fifty_at_once_are_compiled_one_after_the_other(compiler: GrammarCompiler) -> None:
    together = threading.Barrier(50)

    def compile_one(number: int) -> bool:
        together.wait()
        return accepts(compiler.compile(Constraint.regex(f"x{{{number}}}y")), "x" * number + "y")

    with ThreadPoolExecutor(50) as pool:
        assert all(pool.map(compile_one, range(50)))


def test_what_takes_too_long_is_given_up_and_what_waits_too_long_is_told_to_come_again() -> None:
    """The vocabulary stands for a compilation that never ends: a lock decides when it does, not the clock."""
    may_go_on = threading.Event()

    def vocabulary() -> Vocabulary:
        may_go_on.wait()
        return BYTES

    compiler = GrammarCompiler(vocabulary, max_seconds=0.01)
    try:
        for number in range(2):
            endless = Constraint.regex(f"a{number}")
            assert compiler._entry(endless).begun.wait(60)
            with pytest.raises(ConstraintError, match=r"takes longer than 0\.01 s"):
                compiler.compile(endless)
        # Behind the two that go on is room for 256.
        patient = [compiler._entry(Constraint.regex(f"b{number}")) for number in range(255)]
        with pytest.raises(QueueFullError, match="have been compiled"):
            compiler.compile(Constraint.regex("c"))
        with pytest.raises(QueueFullError, match="256 constraints wait") as raised:
            compiler.compile(Constraint.regex("d"))
        assert raised.value.limit == 256
        assert not any(entry.begun.is_set() for entry in patient)
    finally:
        may_go_on.set()
    assert all(isinstance(entry.result.result(60), Grammar) for entry in patient)


def test_errors_of_one_constraint_are_each_requests_own(compiler: GrammarCompiler) -> None:
    errors = []
    for _ in range(2):
        with pytest.raises(ConstraintError) as raised:
            compiler.compile(Constraint.regex("("))
        errors.append(raised.value)
    assert errors[0] is not errors[1]
