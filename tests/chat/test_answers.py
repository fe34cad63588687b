"""Answers are taken apart as their formats' own documentation says, wherever their text is cut; whatever is malformed
stays text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final

import pytest
from attrs import frozen
from chat_data import pieces_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paged_sdk.chat.answer import AnswerStyle
from paged_sdk.chat.answer_format import find_formats
from paged_sdk.chat.answer_pieces import AnswerPiece
from paged_sdk.types.tool_call import MAX_DEPTH, ToolCall

SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "location": {"type": "string"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        },
    },
    "get_time": {"type": "object", "properties": {}},
    "brave_search": {"type": "object", "properties": {"query": {"type": "string"}}},
}

# Of each format's template only what it is known by.
HERMES: Final = "{% if tools %}<tool_call></tool_call>{% endif %}"
QWEN3: Final = HERMES + "<think></think>"
QWEN_CODER: Final = "<tool_call><function=x><parameter=y></parameter></function></tool_call>"
LLAMA31: Final = "<|start_header_id|>{{ '<|python_tag|>' }}"
LLAMA32: Final = """<|start_header_id|>{{- '"parameters": ' }}"""
LLAMA4: Final = "<|python_start|><|python_end|>"
MISTRAL: Final = "{{ '[TOOL_CALLS]' }}"
MAGISTRAL: Final = MISTRAL + "[THINK][/THINK]"
PHI: Final = "functools[{{ x }}]"
PHI4: Final = "<|tool|><|/tool|>"
GEMMA: Final = "```tool_code"
GEMMA4: Final = "<|tool_call>call:x{}<tool_call|><|channel>thought<channel|>"
FUNCTION_GEMMA: Final = "<start_function_call>call:x{}<end_function_call>"
DEEPSEEK: Final = "<｜tool▁calls▁begin｜><think></think>"
HARMONY: Final = "<|start|>assistant<|channel|>analysis<|message|>"
GLM: Final = "<tool_call>{x}<arg_key>{x}</arg_key>\n<arg_value>{x}</arg_value><think></think>"
MINIMAX: Final = "<minimax:tool_call><invoke name=...>"
KIMI: Final = "<|tool_calls_section_begin|>"
GRANITE: Final = "<|start_of_role|>assistant<|end_of_role|><|tool_call|>"
COMMAND: Final = "<|START_ACTION|><|START_THINKING|><|END_THINKING|>"


@frozen
class Case:
    """Holds an answer, and what it consists of."""

    template: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    prompt_end: str = ""


PARIS: Final = ("get_weather", {"location": "Paris, France", "unit": "celsius"})
PARIS_JSON: Final = '{"name": "get_weather", "arguments": {"location": "Paris, France", "unit": "celsius"}}'
TIME: Final[tuple[str, dict[str, Any]]] = ("get_time", {})

CASES: Final = (
    Case(HERMES, f"<tool_call>\n{PARIS_JSON}\n</tool_call>", calls=(PARIS,)),
    Case(
        HERMES,
        f'Let me look.\n\n<tool_call>\n{PARIS_JSON}\n</tool_call>\n<tool_call>\n{{"name": "get_time"}}\n</tool_call>\n',
        content="Let me look.",
        calls=(PARIS, TIME),
    ),
    Case(HERMES, f"<tool_call>{PARIS_JSON}", calls=(PARIS,)),
    Case(HERMES, f"A\n<tool_call>{PARIS_JSON}</tool_call>\n B \n", content="A\nB \n", calls=(PARIS,)),
    Case(
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"location": "</tool_call>\\" \\\\ {[", "days": 1e2}}'
        "</tool_call>",
        calls=(("get_weather", {"location": '</tool_call>" \\ {[', "days": 100.0}),),
    ),
    Case(HERMES, f"<tool_call>[{PARIS_JSON}, {PARIS_JSON}]</tool_call>", calls=(PARIS, PARIS)),
    # As Qwen2.5-Coder writes them.
    Case(HERMES, f"Sure:\n```json\n{PARIS_JSON}\n```\n", content="Sure:", calls=(PARIS,)),
    Case(HERMES, PARIS_JSON, calls=(PARIS,)),
    # An argument that was quoted as a whole, and a line break within a string.
    Case(
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": "{\\"location\\": \\"a\\"}"}</tool_call>',
        calls=(("get_weather", {"location": "a"}),),
    ),
    Case(
        HERMES,
        '<tool_call>{"name": "get_weather", "arguments": {"location": "a\nb"}}</tool_call>',
        calls=(("get_weather", {"location": "a\nb"}),),
    ),
    # A bracket too few in the first.
    Case(
        HERMES,
        f'<tool_call>{{"name": "get_time", "arguments": {{</tool_call>\n<tool_call>{PARIS_JSON}</tool_call>',
        content='<tool_call>{"name": "get_time", "arguments": {</tool_call>',
        calls=(PARIS,),
    ),
    Case(
        QWEN3,
        f"<think>\nThe user wants\n\n<tool_call>s.\n</think>\n\n<tool_call>\n{PARIS_JSON}\n</tool_call>",
        reasoning="The user wants\n\n<tool_call>s.",
        calls=(PARIS,),
    ),
    Case(QWEN3, "<think>\n\n</think>\n\nHello.", content="Hello."),
    Case(
        QWEN3,
        "Hm.\n</think>\n\nHello.",
        content="Hello.",
        reasoning="Hm.",
        prompt_end="<|im_start|>assistant\n<think>\n",
    ),
    Case(QWEN3, "<think>Hm.</think>Hello.", content="Hello.", reasoning="Hm.", prompt_end="<think>\n"),
    Case(QWEN3, "Hello.", content="Hello.", prompt_end="<think>\n\n</think>\n\n"),
    Case(QWEN3, "\n<think> Cut o", reasoning="Cut o"),
    Case(QWEN3, " I write <think>x</think> so.", content=" I write <think>x</think> so."),
    Case(
        QWEN_CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=location>\nParis, France\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>',
        calls=(("get_weather", {"location": "Paris, France", "days": 3, "exact": True, "tags": ["a", "b"]}),),
    ),
    Case(
        QWEN_CODER,
        "Sure:\n<function=get_weather><parameter=location>\n\n<b>12</b>\n\n</parameter></function>",
        content="Sure:",
        calls=(("get_weather", {"location": "\n<b>12</b>\n"}),),
    ),
    Case(
        LLAMA31,
        '{"name": "get_weather", "parameters": {"location": "Paris, France", "unit": "celsius"}}',
        calls=(PARIS,),
    ),
    Case(
        LLAMA31,
        '<|python_tag|>brave_search.call(query="Menlo Park")',
        calls=(("brave_search", {"query": "Menlo Park"}),),
    ),
    Case(
        LLAMA31,
        '<function=get_weather>{"location": "Paris"}</function>',
        calls=(("get_weather", {"location": "Paris"}),),
    ),
    Case(
        LLAMA32,
        '{"name": "get_time", "parameters": {}}; {"name": "get_weather", "parameters": {"days": "3"}}',
        calls=(TIME, ("get_weather", {"days": "3"})),
    ),
    Case(
        LLAMA32,
        "[get_weather(location='San Francisco', unit='celsius'), get_time()]",
        calls=(("get_weather", {"location": "San Francisco", "unit": "celsius"}), TIME),
    ),
    Case(
        LLAMA4,
        '<|python_start|>[get_weather(location="it\'s \\"x\\"", tags=["a", None, {"b": -1.5}], exact=True)]'
        "<|python_end|>",
        calls=(("get_weather", {"location": 'it\'s "x"', "tags": ["a", None, {"b": -1.5}], "exact": True}),),
    ),
    Case(
        MISTRAL,
        f'[TOOL_CALLS] [{PARIS_JSON}, {{"name": "get_time", "arguments": {{}}, "id": "a12345678"}}]',
        calls=(PARIS, TIME),
    ),
    Case(
        MISTRAL,
        '[TOOL_CALLS]get_weather[ARGS]{"location": "Paris, France", "unit": "celsius"}'
        "[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{}",
        calls=(PARIS, TIME),
    ),
    Case(MISTRAL, "One.[TOOL_CALLS]get_time{}", content="One.", calls=(TIME,)),
    Case(MAGISTRAL, "[THINK]Hm.[/THINK]Hello.", content="Hello.", reasoning="Hm."),
    Case(PHI, f"functools[{PARIS_JSON}]", calls=(PARIS,)),
    Case(PHI, "import functools\nfunctools[0]", content="import functools\nfunctools[0]"),
    Case(PHI4, f"<|tool_call|>[{PARIS_JSON}]<|/tool_call|>", calls=(PARIS,)),
    Case(GEMMA, '```tool_code\nget_weather("Paris, France", unit="celsius")\n```', calls=(PARIS,)),
    Case(
        GEMMA,
        "I ask.\n```tool_code\nprint(default_api.get_time())\nget_weather(days=3)\n```\n",
        content="I ask.",
        calls=(TIME, ("get_weather", {"days": 3})),
    ),
    Case(GEMMA, "```tool_code\nget_time()", calls=(TIME,)),
    Case(
        GEMMA,
        "```tool_code\nget_weather(location='```a`', unit=\"\\\"```'\")\n```\nSo.\n```tool_code\nprint('``)\n```",
        content="So.\n```tool_code\nprint('``)\n```",
        calls=(("get_weather", {"location": "```a`", "unit": "\"```'"}),),
    ),
    Case(
        GEMMA4,
        '<|channel>thought\nHm.<channel|><|tool_call>call:get_weather{location:<|"|>Paris, a:"France" {b:<|"|>,days:3,'
        'tags:[<|"|>x<|"|>,null,{y:true}]}<tool_call|><|tool_call>call:get_time{}<tool_call|>',
        reasoning="Hm.",
        calls=(
            ("get_weather", {"location": 'Paris, a:"France" {b:', "days": 3, "tags": ["x", None, {"y": True}]}),
            TIME,
        ),
    ),
    Case(
        FUNCTION_GEMMA,
        "<start_function_call>call:get_weather{location:<escape>Paris, France<escape>,unit:<escape>celsius<escape>}"
        "<end_function_call>",
        calls=(PARIS,),
    ),
    Case(
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"location": "Paris, France", "unit": "celsius"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
        "<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        calls=(PARIS, TIME),
    ),
    Case(
        DEEPSEEK,
        "Hm.</think>Look:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"location": "Paris, France", "unit": "celsius"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        content="Look:",
        reasoning="Hm.",
        calls=(PARIS,),
        prompt_end="<｜Assistant｜><think>",
    ),
    Case(
        HARMONY,
        "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"location": "Paris, France", "unit": "celsius"}<|call|>',
        reasoning="Need to use function get_weather.",
        calls=(PARIS,),
    ),
    Case(
        HARMONY,
        "<|channel|>analysis<|message|>2 + 2.<|end|><|start|>assistant<|channel|>analysis<|message|>Is 4.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4",
        content="2 + 2 = 4",
        reasoning="2 + 2.\nIs 4.",
    ),
    Case(
        HARMONY,
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions.get_time<|channel|>"
        "commentary json<|message|>{}",
        content="I will look.",
        calls=(TIME,),
    ),
    # The prompt ends with "<|start|>assistant", and the recipient may follow that at once.
    Case(
        HARMONY,
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"location": "Paris, France", "unit": "celsius"}'
        "<|call|>",
        calls=(PARIS,),
        prompt_end="<|start|>assistant",
    ),
    Case(HARMONY, " to=", content=" to="),
    Case(HARMONY, "\n to Rome.", content="\n to Rome."),
    Case(HARMONY, "Hello.<|return|>", content="Hello."),
    Case(
        GLM,
        "<think>Hm.</think>\nLet me look.\n<tool_call>get_weather\n<arg_key>location</arg_key>\n"
        "<arg_value>Paris, France</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
        "<tool_call>get_time</tool_call>",
        content="Let me look.",
        reasoning="Hm.",
        calls=(("get_weather", {"location": "Paris, France", "days": 3}), TIME),
    ),
    Case(
        GLM,
        '<tool_call>get_weather<arg_key>location</arg_key><arg_value>\n"Paris"\n</arg_value><arg_key>tags</arg_key>'
        '<arg_value>["a"]</arg_value></tool_call>',
        calls=(("get_weather", {"location": '\n"Paris"\n', "tags": ["a"]}),),
    ),
    Case(
        MINIMAX,
        'I search.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="location">Paris, France'
        '</parameter>\n<parameter name="tags">["a", "b"]</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n'
        "</minimax:tool_call>",
        content="I search.",
        calls=(("get_weather", {"location": "Paris, France", "tags": ["a", "b"]}), TIME),
    ),
    Case(
        KIMI,
        "Look:<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"location": "Paris, France", "unit": "celsius"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        content="Look:",
        calls=(PARIS, TIME),
    ),
    Case(GRANITE, f'<|tool_call|>[{PARIS_JSON}, {{"name": "get_time", "arguments": {{}}}}]', calls=(PARIS, TIME)),
    Case(
        COMMAND,
        "<|START_THINKING|>I look it up.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"location": "Paris, France", "unit": '
        '"celsius"}},\n    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>',
        reasoning="I look it up.",
        calls=(PARIS, TIME),
    ),
    Case(COMMAND, "<|START_RESPONSE|>Hello.<|END_RESPONSE|>", content="Hello."),
)


def deep_call(depth: int) -> str:
    """Return a call one of whose arguments is so many lists in each other."""
    return '<tool_call>{"name": "get_weather", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"


MALFORMED_OF_FIRST_FORMATS: Final = (
    Case(HERMES, '```json\n{"name": "get_time"}\n```'),
    Case(HERMES, '```json\n{"name": "Bob", "arguments": {}}\n``` is JSON.'),
    Case(HERMES, f"{PARIS_JSON} is JSON."),
    Case(HERMES, '{"a": 1}'),
    Case(HERMES, '<tool_call>{"name": "get_weather", "arguments": {"location": }}</tool_call>'),
    Case(HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    Case(HERMES, '<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>'),
    Case(HERMES, '<tool_call>{"name": ["get_time"], "arguments": {}}</tool_call>'),
    Case(HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    Case(HERMES, '<tool_call>["get_time"]</tool_call>'),
    Case(HERMES, '<tool_call>{"name": "get_weather", "arguments": {"days": NaN}}</tool_call>'),
    Case(HERMES, '<tool_call>{"name": "get_weather", "arguments": {"location": "\\ud800"}}</tool_call>'),
    Case(HERMES, '<tool_call>{"name": "get_weather", "arguments": {"days": 1' + "0" * 5000 + "}}</tool_call>"),
    Case(HERMES, deep_call(5000)),
    Case(HERMES, deep_call(33)),
    Case(HERMES, f"<tool_call>{PARIS_JSON} and more </tool_call>"),
    Case(HERMES, f"<tool_call>{PARIS_JSON[:-1]}"),
    Case(HERMES, '<tool_call>{"name": "\\'),
    Case(HERMES, "<tool_call><tool_call> <tool_ca"),
    Case(QWEN_CODER, "<tool_call>\n<function=get_weather>\n<parameter=location>\nParis\n</function>\n</tool_call>"),
    Case(QWEN_CODER, "<function=unknown>\n</function>"),
    Case(QWEN_CODER, "<function=get_time\n>"),
    Case(LLAMA31, '{"name": "Bob", "parameters": {"age": 3}} is JSON.'),
    Case(LLAMA31, "{ no, [it] is not: {} }"),
    Case(LLAMA31, "<|python_tag|>import os\nprint(os.getcwd())"),
    Case(LLAMA32, "[get_time(), get_weather(location=open('x'))]"),
    Case(LLAMA32, "[1, 2] and {}"),
    Case(LLAMA32, "[get_weather('a', 'celsius', 1, True, [], 'too many')]"),
    Case(LLAMA32, "[get_weather(location='a', location='b')]"),
    Case(LLAMA32, "[get_weather(location='a' 'b' unit='c')]"),
    Case(LLAMA32, "[get_weather(location='\\ud800')]"),
    Case(LLAMA32, "[get_weather(location=,)]"),
    Case(LLAMA32, "[get_weather(tags={'a': 1, 'a': 2})]"),
    Case(LLAMA32, "[get_weather(tags=" + "[" * 4000 + "]" * 4000 + ")]"),
    Case(MISTRAL, "[TOOL_CALLS]get_time[ARGS]nothing"),
    Case(MISTRAL, "[TOOL_CALLS]unknown[ARGS]{}"),
    Case(MISTRAL, "[TOOL_CALLS] [{}]"),
    Case(PHI4, "<|tool_call|>[1]"),
    Case(GEMMA, "```tool_code\nget_time(\n```"),
    Case(GEMMA, "```tool_code\n```"),
    Case(GEMMA4, '<|tool_call>call:get_weather{location:<|"|>Paris}<tool_call|>'),
    Case(GEMMA4, "<|tool_call>call:unknown{}<tool_call|>"),
    Case(GEMMA4, "<|tool_call>get_time{}"),
    Case(FUNCTION_GEMMA, "<start_function_call>call:get_weather{location:Paris}<end_function_call>"),
    Case(GEMMA, "```tool_code\nimport x\n```\nThat was it."),
    Case(DEEPSEEK, "<｜tool▁call▁begin｜>get_time<｜tool▁call▁end｜>"),
    Case(DEEPSEEK, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time"),
)
MALFORMED: Final = (
    *MALFORMED_OF_FIRST_FORMATS,
    Case(GLM, "<tool_call>unknown\n</tool_call>"),
    Case(GLM, "<tool_call>get_weather\n<arg_key>location</arg_key>\nParis</tool_call>"),
    Case(GLM, "<tool_call>get_weather\n<arg_key>location</arg_key>\n<arg_value>Paris"),
    Case(GLM, "<tool_call>get_time"),
    Case(MINIMAX, '<invoke name="unknown">\n</invoke>'),
    Case(MINIMAX, '<invoke name="get_weather">\n<parameter name="location">Paris</invoke>'),
    Case(MINIMAX, '<invoke name="get_weather">\nParis'),
    Case(KIMI, "<|tool_call_begin|>functions.unknown:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    Case(KIMI, "<|tool_call_begin|>get time<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    Case(KIMI, "<|tool_call_begin|>functions.get_time:0<|tool_call_end|>"),
    Case(KIMI, "<|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>{<|tool_call_end|>"),
    Case(GRANITE, '<|tool_call|>[{"name": "unknown", "arguments": {}}]'),
    Case(GRANITE, "<|tool_call|>[1]"),
    Case(COMMAND, '<|START_ACTION|>[{"tool_name": "unknown", "parameters": {}}]'),
    Case(COMMAND, '<|START_ACTION|>[{"tool_name": "get_time", "parameters": 5}]'),
    Case(COMMAND, '<|START_ACTION|>{"tool_name": "get_time"}'),
    Case(COMMAND, "<|START_ACTION|>[5]"),
)
"""Answers that stay what they are."""


def joined(piece: AnswerPiece) -> dict[int, tuple[str, str]]:
    """Return name and arguments of each call as its parts say them, also of those that turned out to be text."""
    names: dict[int, list[str]] = {}
    arguments: dict[int, list[str]] = {}
    for part in piece.call_parts:
        names.setdefault(part.index, []).append(part.name or "")
        arguments.setdefault(part.index, []).append(part.arguments)
    return {index: ("".join(names[index]), "".join(arguments[index])) for index in names}


def merged(pieces: Iterable[AnswerPiece]) -> AnswerPiece:
    """Return as one piece what several say."""
    found = list(pieces)
    return AnswerPiece(
        "".join(piece.content for piece in found),
        "".join(piece.reasoning for piece in found),
        [call for piece in found for call in piece.calls],
        [part for piece in found for part in piece.call_parts],
    )


def taken_apart(case: Case, pieces: list[str], tools: dict[str, Any] | None = SCHEMAS) -> AnswerPiece:
    parser = AnswerStyle.of_template(case.template).parser(tools)
    assert parser is not None
    parser.note_prompt(case.prompt_end)
    whole = merged(piece for found in (*map(parser.push, pieces), parser.flush()) for piece in found)
    parts = joined(whole)
    for call in whole.calls:
        assert parts[call.index] == (call.name, call.arguments)
    return whole


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_documented_answers_character_by_character(case: Case) -> None:
    found = taken_apart(case, list(case.text))
    assert (found.content, found.reasoning) == (case.content, case.reasoning)
    assert tuple((call.name, json.loads(call.arguments)) for call in found.calls) == case.calls
    assert taken_apart(case, [case.text]) == found


def test_lists_in_each_other_may_be_as_deep_as_arguments_that_are_sent_back() -> None:
    case = Case(HERMES, deep_call(MAX_DEPTH - 1))
    (call,) = taken_apart(case, [case.text]).calls
    assert ToolCall(call.name, json.loads(call.arguments)).arguments == json.loads(call.arguments)


@pytest.mark.parametrize("case", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_calls_stay_text(case: Case) -> None:
    pieces = [case.text[place : place + 7] for place in range(0, len(case.text), 7)]
    assert taken_apart(case, [case.text]) == taken_apart(case, pieces) == AnswerPiece(content=case.text)


def test_content_that_is_found_piece_by_piece_is_one_run() -> None:
    parser = AnswerStyle.of_template(HERMES).parser(SCHEMAS)
    assert parser is not None
    text = "<tool_call>x</tool_call> and \n" * 50
    shown = [*parser.push(text), *parser.flush()]
    assert "".join(piece.content for piece in shown) == text
    assert [run for piece in shown for run in piece.runs] == [(0, len(text.rstrip())), (len(text.rstrip()), len(text))]


TEMPLATES: Final = tuple(dict.fromkeys(case.template for case in CASES))
PARTS: Final = sorted(
    {
        part
        for case in (*CASES, *MALFORMED)
        if len(case.text) < 300
        for part in (case.text, case.text[:9], case.text[-9:])
    }
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.sampled_from(TEMPLATES),
    st.lists(st.one_of(st.sampled_from(PARTS), st.text(alphabet="{}[]()<>\"'\\ \nat=:;,|`", max_size=6)), max_size=5),
    st.lists(st.integers(0, 12), max_size=40),
    st.booleans(),
)
@example(HERMES, ["<tool_call>", "<tool_call>{}"], [3, 9, 1], False)
def test_any_text_comes_out_the_same_wherever_it_is_cut(
    template: str, parts: list[str], sizes: list[int], is_open: bool
) -> None:
    text = "".join(parts)
    case = Case(template, text, prompt_end="<think>" if is_open else "")
    whole = taken_apart(case, [text])
    assert taken_apart(case, [str(piece) for piece in pieces_of(text, sizes)]) == whole
    for call in whole.calls:
        assert call.name in SCHEMAS
        assert isinstance(json.loads(call.arguments), dict)


def test_text_without_marks_is_shown_at_once() -> None:
    parser = AnswerStyle.of_template(QWEN3).parser(SCHEMAS)
    assert parser is not None
    assert [merged(parser.push(piece)).content for piece in ("Hello", " world", ". <", "b>")] == [
        "Hello",
        " world",
        ".",
        " <b>",
    ]


def test_each_call_is_there_once_it_is_whole() -> None:
    parser = AnswerStyle.of_template(HERMES).parser(SCHEMAS)
    assert parser is not None
    text = f"<tool_call>{PARIS_JSON}</tool_call>"
    assert [len(merged(parser.push(piece)).calls) for piece in (text[:20], text[20:], text)] == [0, 1, 1]


LONG: Final = 'a "quoted" C:\\ line\n' + "Łódź \U0001f600 " * 3


@pytest.mark.parametrize(
    ("template", "opening", "value", "closing"),
    [
        (
            HERMES,
            '<tool_call>\n{"name": "get_weather", "arguments": {"location": ',
            json.dumps(LONG),
            "}}\n</tool_call>",
        ),
        (LLAMA31, '{"name": "get_weather", "parameters": {"location": ', json.dumps(LONG), "}}"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"location": ', json.dumps(LONG), "}}]"),
        (MISTRAL, '[TOOL_CALLS]get_weather[ARGS]{"location": ', json.dumps(LONG, ensure_ascii=False), "}"),
        (PHI4, '<|tool_call|>[{"name": "get_weather", "arguments": {"location": ', json.dumps(LONG), "}}]"),
        (
            DEEPSEEK,
            '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"location": ',
            json.dumps(LONG),
            "}<｜tool▁call▁end｜>",
        ),
        (
            HARMONY,
            '<|channel|>commentary to=functions.get_weather<|message|>{"location":',
            json.dumps(LONG),
            "}<|call|>",
        ),
        (
            QWEN_CODER,
            "<tool_call>\n<function=get_weather>\n<parameter=location>\n",
            LONG,
            "\n</parameter>\n</function>\n</tool_call>",
        ),
        (LLAMA32, "[get_weather(location=", repr(LONG), ")]"),
        (LLAMA31, "<|python_tag|>get_weather.call(location=", json.dumps(LONG), ")"),
        (LLAMA32, '[{"name": "get_weather", "parameters": {"location": ', json.dumps(LONG), "}}]"),
        (GEMMA, "```tool_code\nprint(get_weather(location=", json.dumps(LONG), "))\n```"),
        (GEMMA4, "<|tool_call>call:get_weather{location:", f'<|"|>{LONG}<|"|>', "}<tool_call|>"),
        (
            FUNCTION_GEMMA,
            "<start_function_call>call:get_weather{location:",
            f"<escape>{LONG}<escape>",
            "}<end_function_call>",
        ),
        (FUNCTION_GEMMA, "<start_function_call>call:get_weather{location:", json.dumps(LONG), "}<end_function_call>"),
        (
            COMMAND,
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"location": ',
            json.dumps(LONG),
            "}}\n]<|END_ACTION|>",
        ),
    ],
)
def test_arguments_are_shown_while_they_are_written(template: str, opening: str, value: str, closing: str) -> None:
    parser = AnswerStyle.of_template(template).parser(SCHEMAS)
    assert parser is not None
    whole = merged(parser.push(opening))
    assert [part.name for part in whole.call_parts if part.name] == ["get_weather"]
    sizes = []
    for character in value:
        piece = merged(parser.push(character))
        assert not piece.calls
        sizes.append(sum(len(part.arguments) for part in piece.call_parts))
        whole = merged([whole, piece])
    # Escapes and what may be the beginning of a closing tag wait; nothing waits for long.
    assert max(sizes) <= 16
    assert sum(map(bool, sizes)) > len(LONG) // 2
    ((name, arguments),) = joined(whole).values()
    assert name == "get_weather"
    assert len(arguments) >= len(json.dumps({"location": LONG}, ensure_ascii=False)) - 20
    for character in closing:
        whole = merged([whole, *parser.push(character)])
    whole = merged([whole, *parser.flush()])
    ((name, arguments),) = joined(whole).values()
    assert (name, arguments) == ("get_weather", json.dumps({"location": LONG}, ensure_ascii=False))
    assert [(call.name, call.arguments) for call in whole.calls] == [(name, arguments)]


def bare(value: Any, quote: str) -> str:
    """Return a value as Gemma's newer models write it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{bare(each, quote)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(bare(each, quote) for each in value) + "]"
    return f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)


def python_of(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


WRITERS: Final[dict[str, Callable[[dict[str, Any]], str]]] = {
    LLAMA4: lambda arguments: f"[get_weather({python_of(arguments)})]",
    LLAMA31: lambda arguments: f"<|python_tag|>get_weather.call({python_of(arguments)})",
    GEMMA: lambda arguments: f"```tool_code\nprint(get_weather({python_of(arguments)}))\n```",
    GEMMA4: lambda arguments: "<|tool_call>call:get_weather" + bare(arguments, '<|"|>') + "<tool_call|>",
    FUNCTION_GEMMA: lambda arguments: (
        f"<start_function_call>call:get_weather{bare(arguments, '<escape>')}<end_function_call>"
    ),
    COMMAND: lambda arguments: (
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {json.dumps(arguments)}}}]'
    ),
}
NAMES: Final = st.text("abz_", min_size=1, max_size=4)
VALUES: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab\"'\\\n\tu0{}[](),:= <|é\U0001f600", max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.sampled_from(sorted(WRITERS)),
    st.dictionaries(NAMES, VALUES, max_size=4),
    st.lists(st.integers(1, 12), max_size=40),
)
def test_streamed_arguments_are_those_that_were_meant(
    template: str, arguments: dict[str, Any], sizes: list[int]
) -> None:
    text = WRITERS[template](arguments)
    meant = ("get_weather", json.dumps(arguments, ensure_ascii=False))
    for pieces in ([text], [*text], [str(piece) for piece in pieces_of(text, sizes)]):
        found = taken_apart(Case(template, ""), pieces)
        assert joined(found) == {0: meant}
        assert [(call.name, call.arguments) for call in found.calls] == [meant]


@pytest.mark.parametrize(
    ("template", "text", "shown"),
    [
        (LLAMA32, "[get_weather(location='Par", '{"location": "Par'),
        (LLAMA32, "[get_weather(location='Paris', days=open('x'))]", '{"location": "Paris", "days": '),
        (LLAMA32, "[get_weather(tags={'a': 1, 'a': 2})]", '{"tags": {"a": 1'),
        (LLAMA32, "[get_weather(location='\\ud83d\\n')]", '{"location": "'),
        (GEMMA, "```tool_code\nget_weather('Paris', unit=)\n```", '{"location": "Paris", "unit": '),
        (GEMMA4, '<|tool_call>call:get_weather{location:<|"|>Par', '{"location": "Par'),
        (GEMMA4, "<|tool_call>call:get_weather{days:3,unit:x}<tool_call|>", '{"days": 3, "unit": '),
        (
            COMMAND,
            '<|START_ACTION|>[{"tool_name": "get_weather", "parameters": {"days": 3, "days": 4}}]<|END_ACTION|>',
            '{"days": 3, "days": 4}',
        ),
    ],
)
def test_calls_that_go_wrong_half_way_are_text_in_the_end(template: str, text: str, shown: str) -> None:
    found = taken_apart(Case(template, ""), [*text])
    assert joined(found) == {0: ("get_weather", shown)}
    assert (found.calls, found.content) == ([], text.removesuffix("<|END_ACTION|>"))


def test_what_turns_out_to_be_no_call_is_content_and_leaves_its_place_empty() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"location": "Par'
    found = taken_apart(Case(HERMES, ""), [*text])
    assert joined(found) == {0: ("get_weather", '{"location": "Par')}
    assert (found.calls, found.content) == ([], text)
    broken = '<tool_call>{"name": "get_weather", "arguments": {"location" "x"}}</tool_call>'
    found = taken_apart(Case(HERMES, ""), [*broken, f"<tool_call>{PARIS_JSON}</tool_call>"])
    assert found.content == broken
    assert [call.index for call in found.calls] == [1]


def test_no_tools_no_calls() -> None:
    for case in CASES:
        style = AnswerStyle.of_template(case.template)
        if style.parser(None) is None:
            assert style.thought is None
        elif case.template != HARMONY:
            assert taken_apart(case, [case.text], None).calls == []


@pytest.mark.parametrize("template", [HERMES, MISTRAL, LLAMA31, GEMMA, GEMMA4, QWEN_CODER, HARMONY])
def test_long_texts_take_time_in_proportion(template: str) -> None:
    """120,000 characters, four at a time, of which a parser that looked back would see two billion."""
    opening = {
        HERMES: '<tool_call>{"name": "get_weather", "arguments": {"location": "',
        MISTRAL: '[TOOL_CALLS]get_weather[ARGS]{"location": "',
        LLAMA31: '{"name": "get_weather", "parameters": {"location": "',
        GEMMA: "```tool_code\nget_weather('",
        GEMMA4: '<|tool_call>call:get_weather{location:<|"|>',
        QWEN_CODER: "<function=get_weather><parameter=location>",
        HARMONY: '<|channel|>commentary to=functions.get_weather<|message|>{"location": "',
    }[template]
    text = "ab " * 40_000
    found = taken_apart(Case(template, ""), [opening, *(text[place : place + 4] for place in range(0, len(text), 4))])
    assert found.calls == []
    assert len(found.content) >= len(text)


@pytest.mark.parametrize("template", [HERMES, QWEN_CODER])
def test_arguments_of_a_megabyte(template: str) -> None:
    value = 'x"\n' * 350_000
    if template == HERMES:
        text = f"<tool_call>{json.dumps({'name': 'get_weather', 'arguments': {'location': value}})}</tool_call>"
    else:
        text = f"<function=get_weather><parameter=location>\n{value}\n</parameter></function>"
    found = taken_apart(Case(template, ""), [text[place : place + 4096] for place in range(0, len(text), 4096)])
    (call,) = found.calls
    assert json.loads(call.arguments) == {"location": value}


def test_every_format_is_known_by_its_own_template_alone() -> None:
    seen = set()
    for template in TEMPLATES:
        writers = [format for format in find_formats() if format.is_written_by(template)]
        assert len(writers) == 1
        seen.add(writers[0])
    assert seen == set(find_formats())
    assert AnswerStyle.of_template("{{ messages }}") == AnswerStyle()
