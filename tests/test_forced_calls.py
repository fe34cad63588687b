"""Calls that a model has to make are written as its format has them, and read by the format's own parser."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator

from paged_sdk.chat.answer import AnswerStyle
from paged_sdk.chat.answer_pieces import AnswerPiece
from paged_sdk.constraints.compiler import GrammarCompiler
from paged_sdk.constraints.grammar import Grammar
from paged_sdk.constraints.vocabulary import Vocabulary
from paged_sdk.errors import ConstraintError

sys.path.append(str(Path(__file__).parent / "chat"))

import test_answers as answers

SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "location": {"type": "string", "description": "where", "maxLength": 12},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "exact": {"type": "boolean"},
            "tags": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2}, {"type": "null"}]},
            "place": {
                "type": "object",
                "properties": {"x": {"type": "number"}, "y": {"const": None}, "tag": {"$ref": "#/$defs/tag"}},
                "required": ["y"],
                "additionalProperties": False,
            },
        },
        "required": ["location", "days", "exact"],
        "$defs": {"tag": {"type": "string", "pattern": "^[a-z/ ]{1,4}$"}},
    },
    "get_time": {"type": "object", "properties": {}},
}
MARKS: Final = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>"),
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<start_function_call>", "<end_function_call>", "<escape>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    *("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<think>", "</think>"),
)
END: Final = 256
TOKENS: Final = [*(bytes([byte]) for byte in range(256)), b"</s>", *(mark.encode() for mark in MARKS)]
VOCABULARY: Final = Vocabulary(
    tokens=TOKENS,
    special_ids=[END, *range(259, len(TOKENS))],  # the first two are tokens, and not special, as Qwen has them
    end_ids=(END,),
    encode=lambda text: list(text.encode()),
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: VOCABULARY)


def token_of(mark: str) -> int | None:
    return 257 + MARKS.index(mark) if mark in MARKS else None


def written(compiler: GrammarCompiler, style: AnswerStyle, tools: dict[str, Any], seed: int, *, several: bool) -> str:
    """Return the calls that a model writes which chooses its tokens at random."""
    return drawn(compiler.compile(style.forced_calls(tools, token_of, "", several=several)), seed)


def drawn(grammar: Grammar, seed: int) -> str:
    """Return a text of a grammar whose tokens are chosen at random; closing ones more often, so that it ends."""
    matcher, draw = grammar.matcher.deep_copy(), random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < 4000:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(len(TOKENS)) if mask[token >> 3] >> (token & 7) & 1]
        assert allowed, bytes(b"".join(TOKENS[token] for token in tokens))
        closing = [token for token in allowed if token >= 256 or token in b'"]}),0\n/<']
        token = draw.choice(closing if closing and draw.random() < 0.5 else allowed)
        if token == END:
            return b"".join(TOKENS[token] for token in tokens).decode()
        tokens.append(token)
        assert matcher.consume_token(token)
    pytest.fail(f"it does not end: {b''.join(TOKENS[token] for token in tokens)!r}")


def read(style: AnswerStyle, text: str, tools: dict[str, Any]) -> AnswerPiece:
    parser = style.parser(tools)
    assert parser is not None
    return answers.merged(parser.push(text) + parser.flush())


FIRST_CALLS: Final = {
    answers.HERMES: '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    answers.QWEN_CODER: "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
    answers.LLAMA31: '{"name": "get_time", "parameters": {}}',
    answers.LLAMA32: '{"name": "get_time", "parameters": {}}',
    "<|start_header_id|>[func_name1(params)]": "[get_time()]",
    answers.MISTRAL: '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}]',
    answers.MISTRAL + "[ARGS]": "[TOOL_CALLS]get_time[ARGS]{}",
    answers.PHI: 'functools[{"name": "get_time", "arguments": {}}]',
    answers.PHI4: '<|tool_call|>[{"name": "get_time", "arguments": {}}]<|/tool_call|>',
    answers.GEMMA: "```tool_code\nget_time()\n```",
    answers.GEMMA4: "<|tool_call>call:get_time{}<tool_call|>",
    answers.FUNCTION_GEMMA: "<start_function_call>call:get_time{}<end_function_call>",
    answers.DEEPSEEK
    + "```json": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    answers.DEEPSEEK: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    answers.GLM: "<tool_call>get_time\n</tool_call>",
    "<arg_key>k</arg_key><arg_value>v</arg_value>": "<tool_call>get_time</tool_call>",
    answers.MINIMAX: '<minimax:tool_call>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
    answers.KIMI: "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    answers.GRANITE: '<|tool_call|>[{"name": "get_time", "arguments": {}}]',
    answers.COMMAND: '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_time", "parameters": {}}\n]'
    "<|END_ACTION|>",
    answers.HARMONY: "<|channel|>commentary to=functions.get_time <|constrain|>json<|message|>{}",
}
"""What a call looks like, by template."""
ONE_AT_MOST: Final = frozenset({answers.LLAMA31, answers.LLAMA32, answers.HARMONY})


@pytest.mark.parametrize("template", FIRST_CALLS)
def test_a_call_is_written_as_the_format_has_it(compiler: GrammarCompiler, template: str) -> None:
    style = AnswerStyle.of_template(template)
    grammar = compiler.compile(style.forced_calls({"get_time": SCHEMAS["get_time"]}, token_of, "", several=False))
    matcher = grammar.matcher.deep_copy()
    text = FIRST_CALLS[template]
    has_marks = any(mark in text for mark in MARKS)  # these are tokens, and not spelled in letters
    assert (matcher.try_consume_tokens(list(text.encode())) < len(text.encode())) == has_marks
    matcher = grammar.matcher.deep_copy()
    tokens = tokens_of(text)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()
    calls = read(style, text, SCHEMAS).calls
    assert [(call.name, call.arguments) for call in calls] == [("get_time", "{}")]


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text as a tokenizer makes them: marks are one token each."""
    tokens: list[int] = []
    while text:
        mark = next((mark for mark in MARKS if text.startswith(mark)), None)
        tokens += list(text[0].encode()) if mark is None else [257 + MARKS.index(mark)]
        text = text[len(mark or text[0]) :]
    return tokens


@pytest.mark.parametrize("template", FIRST_CALLS)
def test_whatever_is_written_is_read_and_fits(compiler: GrammarCompiler, template: str) -> None:
    style = AnswerStyle.of_template(template)
    most = 0
    for seed in range(8):
        text = written(compiler, style, SCHEMAS, seed, several=True)
        found = read(style, text, SCHEMAS)
        assert (found.content, found.reasoning) == ("", ""), text
        assert found.calls
        most = max(most, len(found.calls))
        for call in found.calls:
            Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))
            assert json.loads(call.arguments).keys() <= SCHEMAS[call.name]["properties"].keys()
    assert (most > 1) == (template not in ONE_AT_MOST)
    assert len(read(style, written(compiler, style, SCHEMAS, 0, several=False), SCHEMAS).calls) == 1


def arguments(**properties: Any) -> dict[str, Any]:
    return {"f": {"type": "object", "properties": properties, "required": [*properties]}}


@pytest.mark.parametrize("template", [answers.HERMES, answers.QWEN_CODER, answers.GEMMA, answers.GEMMA4])
@pytest.mark.parametrize(
    ("keyword", "tools"),
    [
        ("uniqueItems", arguments(x={"type": "array", "uniqueItems": True})),
        ("$ref", arguments(x={"$ref": "#/$defs/y"})),
        ("not", arguments(x={"not": {"type": "string"}})),
        ("not", {"f": {"type": "object", "not": {"required": ["x"]}}}),
    ],
)
def test_what_cannot_be_enforced_is_named(
    compiler: GrammarCompiler, template: str, keyword: str, tools: dict[str, Any]
) -> None:
    with pytest.raises(ConstraintError, match=r"\(tools\) cannot be enforced") as caught:
        compiler.compile(AnswerStyle.of_template(template).forced_calls(tools, token_of, "", several=True))
    assert "the tool f" in str(caught.value) or keyword == "$ref"
    assert caught.value.kind == "tools"
    assert caught.value.keyword in (keyword, "" if keyword == "$ref" else keyword)


@pytest.mark.parametrize(
    ("keyword", "template", "schema"),
    [
        ("format", answers.QWEN_CODER, {"type": "string", "format": "date"}),
        ("pattern", answers.QWEN_CODER, {"type": "string", "pattern": "^a|b$"}),
        ("pattern", answers.QWEN_CODER, {"type": "string", "pattern": 5}),
        ("enum", answers.QWEN_CODER, {"enum": ["</parameter>"]}),
        ("type", answers.GEMMA, {"type": "text"}),
        ("$ref", answers.GEMMA, {"$ref": "elsewhere"}),
        ("required", answers.GEMMA, {"type": "object", "required": ["a"]}),
        ("properties", answers.GEMMA4, {"type": "object", "properties": {"a b": {}}}),
        ("enum", answers.GEMMA4, {"enum": ['<|"|>']}),
        ("", answers.GEMMA, 5),
    ],
)
def test_what_a_format_has_no_form_for_is_named(keyword: str, template: str, schema: Any) -> None:
    with pytest.raises(ConstraintError, match="the tool f") as caught:
        AnswerStyle.of_template(template).forced_calls(arguments(x=schema), token_of, "", several=True)
    assert (caught.value.kind, caught.value.keyword) == ("tools", keyword)


NO_SCHEMAS: Final[list[tuple[str, Any]]] = [
    ("anyOf", {"anyOf": 5}),
    ("enum", {"enum": 5}),
    ("type", {"type": 5}),
    ("type", {"type": ["string", 5]}),
    ("properties", {"type": "object", "properties": 5}),
    ("required", {"type": "object", "required": 5}),
    ("minItems", {"type": "array", "minItems": "x"}),
    ("maxItems", {"type": "array", "maxItems": -1}),
    ("minLength", {"type": "string", "minLength": "x"}),
]


@pytest.mark.parametrize("template", [answers.QWEN_CODER, answers.GEMMA, answers.GEMMA4])
def test_what_is_no_schema_is_named(compiler: GrammarCompiler, template: str) -> None:
    style = AnswerStyle.of_template(template)
    for keyword, schema in NO_SCHEMAS:
        for tools in (arguments(x=schema), {"f": {"type": "object"} | schema}):
            with pytest.raises(ConstraintError):
                compiler.compile(style.forced_calls(tools, token_of, "", several=True))
        with pytest.raises(ConstraintError, match=keyword):
            compiler.compile(style.forced_calls(arguments(x=schema), token_of, "", several=True))


@pytest.mark.parametrize("template", [answers.HERMES, answers.QWEN_CODER, answers.GEMMA, answers.GEMMA4])
def test_what_no_value_fits_is_refused(compiler: GrammarCompiler, template: str) -> None:
    """A grammar would have a value that does not fit, or none where one is due."""
    style = AnswerStyle.of_template(template)
    schemas: list[dict[str, Any]] = [
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 1},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 0},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 2},
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"enum": []},
        {"anyOf": []},
        {"type": []},
    ]
    for schema in schemas:
        with pytest.raises(ConstraintError, match=r"\(tools\) cannot be enforced") as caught:
            compiler.compile(style.forced_calls(arguments(x=schema), token_of, "", several=True))
        assert "the tool f" in str(caught.value)


@pytest.mark.parametrize("template", [answers.QWEN_CODER, answers.GLM, answers.GEMMA, answers.GEMMA4])
def test_calls_of_tools_whose_schemas_are_none_are_read(template: str) -> None:
    text = {
        answers.QWEN_CODER: "<function=f><parameter=x>5</parameter></function>",
        answers.GLM: "<tool_call>f\n<arg_key>x</arg_key><arg_value>5</arg_value></tool_call>",
        answers.GEMMA: "```tool_code\nf(x='5')\n```",
        answers.GEMMA4: '<|tool_call>call:f{x:<|"|>5<|"|>}<tool_call|>',
    }[template]
    for schema in ({"type": "object", "properties": 5}, *(arguments(x=each)["f"] for _, each in NO_SCHEMAS)):
        (call,) = read(AnswerStyle.of_template(template), text, {"f": schema}).calls
        assert json.loads(call.arguments)["x"] in ("5", 5)


def test_references_to_many_references_take_no_time(compiler: GrammarCompiler) -> None:
    """Followed one by one, these are 10^12."""
    definitions = {f"d{place}": {"anyOf": [{"$ref": f"#/$defs/d{place + 1}"}] * 10} for place in range(12)}
    tools = arguments(x={"$ref": "#/$defs/d0"}, y={"anyOf": [{"$ref": "#/$defs/loop"}, {"const": "b"}]})
    tools["f"]["$defs"] = {**definitions, "d12": {"const": "a"}, "loop": {"$ref": "#/$defs/loop"}}
    style = AnswerStyle.of_template(answers.QWEN_CODER)
    text = written(compiler, style, tools, 0, several=False)
    (call,) = read(style, text, tools).calls
    assert json.loads(call.arguments) == {"x": "a", "y": "b"}
    wide = {f"d{place}": {"anyOf": [{"$ref": f"#/$defs/d{place + 1}"}] * 1000} for place in range(3)}
    tools = arguments(x={"$ref": "#/$defs/d0"})
    tools["f"]["$defs"] = {**wide, "d3": {"type": "integer"}}
    (call,) = read(style, "<function=f><parameter=x>5</parameter></function>", tools).calls
    assert json.loads(call.arguments) == {"x": 5}


ODD: Final = arguments(
    text={"type": "string", "pattern": "b/|c", "minLength": 2, "maxLength": 6},
    tree={"$ref": "#/$defs/tree"},
    any={"type": ["integer", "string", "null"], "maxLength": 4},
    table={"type": "object", "additionalProperties": {"type": "boolean"}},
    chosen={"enum": ["\n", 'a"b', 1, None, True, {"k": ["\U0001f600", {}]}]},
    pair={"type": "array", "items": {"type": "integer", "maximum": 3, "minimum": 0}, "minItems": 2, "maxItems": 3},
    none={"type": "array", "maxItems": 0},
)
ODD["f"]["$defs"] = {
    "tree": {
        "type": "object",
        "properties": {"left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}, "name": {"const": "ä"}},
        "required": ["left"],
    }
}


@pytest.mark.parametrize("template", [answers.HERMES, answers.QWEN_CODER, answers.GEMMA, answers.GEMMA4])
def test_odd_schemas(compiler: GrammarCompiler, template: str) -> None:
    style = AnswerStyle.of_template(template)
    for seed in range(6):
        text = written(compiler, style, ODD, seed, several=False)
        (call,) = read(style, text, ODD).calls
        Draft202012Validator(ODD["f"]).validate(json.loads(call.arguments))


@pytest.mark.parametrize("template", [answers.QWEN_CODER, answers.GLM, answers.MINIMAX, answers.GEMMA4])
def test_patterns_of_texts_without_quotes_mean_what_they_mean_in_json(compiler: GrammarCompiler, template: str) -> None:
    style = AnswerStyle.of_template(template)
    for pattern, allowed in (
        (r"^\d{1,2}$", {"7": True, "42": True, "\u0663": False}),
        (r"^\w$", {"a": True, "_": True, "\u00e9": False}),
        (r"^\S$", {"a": True, "\x1d": False, "\x85": False}),
        ("^.$", {"a": True, "\r": False, "\u2028": False}),
        ("^[a&&b]{2}$", {"a&": True, "bb": True, "c&": False}),
        (r"^[^\d]$", {"a": True, "5": False, "\u0663": False}),
        (r"^a\\$", {"a\\": True, "a\\b": False, "a$": False}),
        (r"^a\$", {"a$": True, "a$b": True, "a": False}),
    ):
        grammar = compiler.compile(
            style.forced_calls(arguments(x={"type": "string", "pattern": pattern}), token_of, "", several=False)
        )
        for value, is_allowed in allowed.items():
            text = {
                answers.QWEN_CODER: "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n"
                "</tool_call>",
                answers.GLM: "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
                answers.MINIMAX: '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">{}</parameter>\n</invoke>'
                "\n</minimax:tool_call>",
                answers.GEMMA4: '<|tool_call>call:f{{x:<|"|>{}<|"|>}}<tool_call|>',
            }[template].format(value)
            tokens = tokens_of(text)
            taken = grammar.matcher.deep_copy().try_consume_tokens(tokens)
            assert (taken == len(tokens)) == is_allowed, (pattern, value)


def test_patterns_of_no_one_meaning_are_refused() -> None:
    for pattern in ("(?=a)b", r"a\b", "[]a]", "(?m:^a)"):
        schema = arguments(x={"type": "string", "pattern": pattern})
        with pytest.raises(ConstraintError, match="the tool f") as caught:
            AnswerStyle.of_template(answers.QWEN_CODER).forced_calls(schema, token_of, "", several=True)
        assert caught.value.keyword == "pattern"


@pytest.mark.parametrize("template", [answers.HERMES, answers.GEMMA, answers.GEMMA4])
def test_lists_of_one_item(compiler: GrammarCompiler, template: str) -> None:
    style = AnswerStyle.of_template(template)
    for least in (0, 1):
        one = {"type": "array", "items": {"type": "boolean"}, "minItems": least, "maxItems": 1}
        texts = {written(compiler, style, arguments(x=one), seed, several=False) for seed in range(20)}
        sizes = {len(json.loads(read(style, text, arguments(x=one)).calls[0].arguments)["x"]) for text in texts}
        assert sizes == {least, 1}


def test_a_fence_in_an_argument_ends_no_call(compiler: GrammarCompiler) -> None:
    style = AnswerStyle.of_template(answers.GEMMA)
    tools = arguments(x={"enum": ["```", "a\n```tool_code\nf()\n```"]})
    values = {written(compiler, style, tools, seed, several=False) for seed in range(8)}
    found = [read(style, text, tools) for text in values]
    assert {json.loads(each.calls[0].arguments)["x"] for each in found} == set(tools["f"]["properties"]["x"]["enum"])
    assert all(not each.content and len(each.calls) == 1 for each in found)


def test_a_thought_that_the_prompt_has_begun_ends_at_once(compiler: GrammarCompiler) -> None:
    style = AnswerStyle.of_template(answers.QWEN3)
    for end, thought in (("<think>\n", "\n</think>\n\n"), ("<think>", "</think>"), ("<think>\n\n</think>\n\n", "")):
        grammar = compiler.compile(style.forced_calls({"f": {}}, token_of, end, several=False))
        tokens = tokens_of(thought + '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
        assert grammar.matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)


def test_arguments_are_written_in_one_line(compiler: GrammarCompiler) -> None:
    style = AnswerStyle.of_template(answers.HERMES)
    schema = {"properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    grammar = compiler.compile(style.forced_calls({"f": schema}, token_of, "", several=False))
    for arguments, is_one in (
        ('{"a": [1, 2]}', True),
        ('{"a":[1,2]}', True),
        ('{ "a": [ 1, 2 ] }', True),
        ('{"a":  [1, 2]}', False),
        ('{\n  "a": [1, 2]}', False),
    ):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        tokens = tokens_of(text)
        assert (grammar.matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)) == is_one, arguments


SAID: Final = "I look: {x} </b> [1]"


@pytest.mark.parametrize("template", FIRST_CALLS)
def test_calls_that_need_not_be_made_are_held_to_their_schemas(compiler: GrammarCompiler, template: str) -> None:
    style = AnswerStyle.of_template(template)
    grammar = compiler.compile(style.strict_calls(SCHEMAS, token_of, ""))

    def accepted(text: str) -> tuple[bool, int]:
        matcher, tokens = grammar.matcher.deep_copy(), tokens_of(text)
        taken = matcher.try_consume_tokens(tokens)
        return taken == len(tokens) and matcher.is_accepting(), taken

    call, said = FIRST_CALLS[template], SAID
    if template == answers.HARMONY:
        said = f"<|channel|>analysis<|message|>{SAID}<|end|><|start|>assistant"
        assert accepted(f"<|channel|>final<|message|>{SAID}")[0]
    elif template in (answers.LLAMA31, answers.LLAMA32) or "func_name1" in template:
        said = ""  # calls are what an answer begins with
    if said:
        assert template == answers.HARMONY or accepted(said)[0]
    assert accepted(said + call)[0]
    if template not in ONE_AT_MOST and said:
        assert accepted(f"{said}{call} and {call}{said}")[0]
        assert [each.name for each in read(style.exact, f"{said}{call} and {call}{said}", SCHEMAS).calls] == [
            "get_time"
        ] * 2
    wrong = call.replace("get_time", "get_weather")  # which has required arguments
    assert not accepted(said + wrong)[0]
    unknown = call.replace("get_time", "got_time")
    assert not accepted(said + unknown)[0]


def test_where_calls_are_held_to_schemas_other_forms_are_text(compiler: GrammarCompiler) -> None:
    style = AnswerStyle.of_template(answers.HERMES)
    grammar = compiler.compile(style.strict_calls(SCHEMAS, token_of, ""))
    text = '{"name": "get_weather", "arguments": {}} or\n```json\n{"name": "get_weather", "arguments": {}}\n```'
    tokens = tokens_of(text)
    assert grammar.matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)
    assert len(read(style, text, SCHEMAS).calls) == 1
    assert read(style.exact, text, SCHEMAS) == AnswerPiece(content=text)


@pytest.mark.parametrize(("prompt_end", "opening"), [("", "<think>"), ("<think>\n", "\n")])
def test_thoughts_before_calls_that_are_held_to_schemas(
    compiler: GrammarCompiler, prompt_end: str, opening: str
) -> None:
    style = AnswerStyle.of_template(answers.QWEN3)
    grammar = compiler.compile(style.strict_calls({"f": {}}, token_of, prompt_end))
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    text = f"{opening}I <tool_call> it.</think>\n\nSo: {call}"
    matcher = grammar.matcher.deep_copy()
    tokens = tokens_of(text)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()
    parser = style.exact.parser({"f": {}})
    assert parser is not None
    parser.note_prompt(prompt_end)
    found = answers.merged(parser.push(text) + parser.flush())
    assert (found.reasoning, found.content, len(found.calls)) == ("I <tool_call> it.", "So:", 1)
    wrong = tokens_of(f"{opening}Hm.</think><tool_call>no")
    assert grammar.matcher.deep_copy().try_consume_tokens(wrong) < len(wrong)
