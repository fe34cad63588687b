"""A model that may call tools, and answers in JSON of a schema otherwise, does one of these two."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypedDict

import pytest
from jsonschema import Draft202012Validator

from faces import read_off
from paged_sdk import (
    ChatCompletionResponse,
    Constraint,
    ConstraintError,
    InvalidRequestError,
    MemoryGpuConfig,
    PagedAttentionMeta,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    ToolRun,
)
from paged_sdk.chat.answer import AnswerStyle
from paged_sdk.chat.answer_pieces import AnswerPiece
from paged_sdk.constraints.compiler import GrammarCompiler
from paged_sdk.testing import fake_model
from test_forced_calls import FIRST_CALLS, SCHEMAS, VOCABULARY, drawn, read, token_of, tokens_of
from test_tools import TELLING

sys.path.append(str(Path(__file__).parent / "chat"))

import test_answers as answers

PLACE: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 40}, "people": {"type": "integer"}},
    "required": ["place", "people"],
    "additionalProperties": False,
}
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
    },
}
CALL: Final = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: VOCABULARY)


def grammar_of(style: AnswerStyle, prompt_end: str = "", schema: Mapping[str, Any] = PLACE) -> Any:
    return style.calls_or_json(SCHEMAS, Constraint.json_schema(schema), token_of, prompt_end)


def answered(template: str, text: str) -> str:
    """Return an answer that is no call, as the format has it."""
    return f"<|channel|>final <|constrain|>json<|message|>{text}" if template == answers.HARMONY else text


JSON_CALLS: Final = (answers.LLAMA31, answers.LLAMA32)
TEMPLATES: Final = sorted(FIRST_CALLS.keys() - set(JSON_CALLS))


@pytest.mark.parametrize("template", JSON_CALLS)
def test_where_calls_are_json_there_is_no_telling_them_from_answers(template: str) -> None:
    with pytest.raises(ConstraintError, match='"none", or no schema') as caught:
        grammar_of(AnswerStyle.of_template(template))
    assert caught.value.kind == "json_schema"


@pytest.mark.parametrize("template", TEMPLATES)
def test_calls_and_json_are_allowed_and_nothing_else(compiler: GrammarCompiler, template: str) -> None:
    style = AnswerStyle.of_template(template)
    grammar = compiler.compile(grammar_of(style))

    def accepts(text: str) -> bool:
        matcher, tokens = grammar.matcher.deep_copy(), tokens_of(text)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    call, found = FIRST_CALLS[template], answered(template, '{"place": "Oslo", "people": 3}')
    assert accepts(call)
    assert accepts(found)
    for wrong in ("Oslo", answered(template, '{"place": "Oslo"}'), call + found, found + call):
        assert not accepts(wrong)
    assert not accepts(call.replace("get_time", "get_weather"))  # which has required arguments
    assert [each.name for each in read(style.either, call, SCHEMAS).calls] == ["get_time"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_whatever_is_written_is_calls_or_json(compiler: GrammarCompiler, template: str) -> None:
    style = AnswerStyle.of_template(template).begun  # thoughts of random tokens do not end
    grammar = compiler.compile(grammar_of(style))
    num_called = 0
    for seed in range(16):
        found = read(style.either, drawn(grammar, seed), SCHEMAS)
        for call in found.calls:
            Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))
        if not found.calls:
            Draft202012Validator(PLACE).validate(json.loads(found.content))
        assert not (found.calls and found.content)
        num_called += bool(found.calls)
    assert 0 < num_called < 16


@pytest.mark.parametrize("template", TEMPLATES)
def test_calls_that_are_spelled_within_json_are_text(template: str) -> None:
    style = AnswerStyle.of_template(template)
    spelled = f"<|python_start|>{FIRST_CALLS[template]}<|end|><|start|>assistant<|channel|>analysis<|message|>"
    text = json.dumps({"place": spelled, "people": 3}, ensure_ascii=False)
    answer = answered(template, text)
    assert read(style.either, answer, SCHEMAS) == AnswerPiece(content=text)
    for cut in (1, 5, 20, 50):
        parser = style.either.parser(SCHEMAS)
        assert parser is not None
        found = answers.merged(parser.push(answer[:cut]) + parser.push(answer[cut:]) + parser.flush())
        assert (found.content, found.reasoning, found.call_parts) == (text, "", [])


def test_a_list_of_what_looks_like_calls_is_json_where_calls_are_python(compiler: GrammarCompiler) -> None:
    style = AnswerStyle.of_template("<|start_header_id|>[func_name1(params)]")
    named = {"type": "object", "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}}}
    grammar = compiler.compile(grammar_of(style, schema={"type": "array", "items": named}))
    for text, num_calls in (('[{"name": "get_time", "arguments": {}}]', 0), ("[]", 0), ("[get_time()]", 1)):
        matcher, tokens = grammar.matcher.deep_copy(), tokens_of(text)
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        assert matcher.is_accepting()
        found = read(style.either, text, SCHEMAS)
        assert (found.content, len(found.calls), bool(found.call_parts)) == (
            "" if num_calls else text,
            num_calls,
            num_calls,
        )


@pytest.mark.parametrize(("prompt_end", "opening"), [("", "<think>"), ("<think>\n", "\n")])
@pytest.mark.parametrize("space", ["", "\n\n"])
def test_thoughts_come_before(compiler: GrammarCompiler, prompt_end: str, opening: str, space: str) -> None:
    style = AnswerStyle.of_template(answers.QWEN3)
    grammar = compiler.compile(grammar_of(style, prompt_end))
    text = '{"place": "Oslo", "people": 3}'
    for rest, num_calls in ((text, 0), (FIRST_CALLS[answers.HERMES], 1)):
        answer = f"{opening}I <tool_call> it.</think>{space}{rest}"
        matcher, tokens = grammar.matcher.deep_copy(), tokens_of(answer)
        assert matcher.try_consume_tokens(tokens) == len(tokens)
        assert matcher.is_accepting()
        parser = style.either.parser(SCHEMAS)
        assert parser is not None
        parser.note_prompt(prompt_end)
        found = answers.merged(parser.push(answer) + parser.flush())
        assert (found.reasoning, found.content, len(found.calls)) == (
            "I <tool_call> it.",
            "" if num_calls else text,
            num_calls,
        )


def test_what_cannot_be_enforced_is_named_as_what_it_belongs_to(compiler: GrammarCompiler) -> None:
    style = AnswerStyle.of_template(answers.HERMES)
    unique = {"type": "array", "uniqueItems": True}
    with pytest.raises(ConstraintError, match=r"\(json_schema\) cannot be enforced .*the answer") as caught:
        compiler.compile(grammar_of(style, schema=unique))
    assert (caught.value.kind, caught.value.keyword) == ("json_schema", "uniqueItems")
    tools = {"f": {"type": "object", "properties": {"x": unique}}}
    with pytest.raises(ConstraintError, match=r"\(tools\) cannot be enforced .*the tool f") as caught:
        compiler.compile(style.calls_or_json(tools, Constraint.json_schema(PLACE), token_of, ""))
    assert (caught.value.kind, caught.value.keyword) == ("tools", "uniqueItems")


def asked(*, compact: bool = False) -> RequestBuilder:
    request = RequestBuilder().add_message("user", "Where?").with_tools([WEATHER])
    return request.with_constraint(Constraint.json_schema(PLACE, compact=compact))


@pytest.mark.anyio
async def test_a_run_with_tools_ends_with_json() -> None:
    def weather(city: str) -> str:
        return f"rain in {city}"

    request = RequestBuilder().add_message("user", "Where?").with_tools([weather])
    request = request.with_constraint(Constraint.json_schema(PLACE))
    async with fake_model(CALL, '{"place": "<tool_call>", "people": 3}') as model:
        run: ToolRun = await model.send_chat_with_tools(request)
        assert [message.role.value for message in run.messages] == ["assistant", "tool", "assistant"]
        assert run.messages[1].content == "rain in Oslo"
        assert json.loads(run.response.choices[0].message.content) == {"place": "<tool_call>", "people": 3}


class Place(TypedDict):
    place: str
    people: int


@pytest.mark.anyio
async def test_an_instance_is_the_answer_of_a_model_that_is_told_of_tools() -> None:
    request = RequestBuilder().add_message("user", "Where?").with_tools([WEATHER])
    async with fake_model('{"place": "<tool_call>", "people": 3}', CALL) as model:
        assert await model.generate_structured(request, Place) == {"place": "<tool_call>", "people": 3}
        assert [tool.name for tool in model.requests[0].options.shown_tools] == ["weather"]
        with pytest.raises(ConstraintError):
            await model.generate_structured(request, Place)
        with pytest.raises(InvalidRequestError, match="tool_choice"):
            await model.generate_structured(request.with_tools([WEATHER], "required"), Place)


@pytest.mark.anyio
@pytest.mark.parametrize("is_paged", [True, False])
async def test_a_model_writes_one_or_the_other(builder: TextModelBuilder, is_paged: bool) -> None:
    told = builder.with_chat_template(TELLING)
    kinds = set()
    async with (told if is_paged else told.without_paged_attn()).build() as model:
        for compact in (False, True):
            sampling = SamplingParams(temperature=1.0, seed=1, max_len=300, n_choices=8)
            response = await model.send_chat_request(asked(compact=compact).with_sampling(sampling))
            for choice in response.choices:
                kinds.add(choice.finish_reason)
                if choice.finish_reason == "tool_calls":
                    assert not choice.message.content
                    cities = [call.function.parse_arguments()["city"] for call in choice.message.tool_calls]
                    assert {*cities} <= {"Oslo", "Rome"}
                elif choice.finish_reason == "stop":
                    Draft202012Validator(PLACE).validate(json.loads(choice.message.content))
    assert kinds >= {"tool_calls", "stop"}


def in_mode(builder: TextModelBuilder, mode: str) -> TextModelBuilder:
    if mode == "contiguous":
        return builder.without_paged_attn()
    pool = PagedAttentionMeta(block_size=4, gpu_memory=MemoryGpuConfig.ContextSize(420))  # too small for four choices
    small = builder.with_paged_attn(pool) if "preempted" in mode else builder
    return small.with_speculation(SpeculativeConfig(gamma=8)) if "drafts" in mode else small


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("mode", ["contiguous", "drafts", "preempted", "preempted, drafts"])
async def test_an_answer_is_the_same_in_every_mode_whole_and_in_pieces(builder: TextModelBuilder, mode: str) -> None:
    thinking = builder.with_chat_template(TELLING + "{# <think> </think> #}")
    requests = []
    for stop in ((), ("O",)):
        sampling = SamplingParams(temperature=1.0, seed=1, max_len=100, n_choices=4, stop=stop)
        requests.append(asked().with_sampling(sampling).with_thinking_budget(7))
    told: list[list[Any]] = []
    for each in (thinking, in_mode(thinking, mode)):
        async with each.build() as model:
            whole = []
            for request in requests:
                stream = model.stream_chat_request(request)
                chunks = [chunk async for chunk in stream]
                whole.append(await stream.collect())
                read_off(chunks, whole[-1])
            assert [said(each) for each in await model.send_chat_requests(requests)] == [said(each) for each in whole]
            told.append([said(each) for each in whole])
    assert told[0] == told[1]
    assert {reason for answer in told[0] for reason, *_ in answer} == {"tool_calls", "stop", "length"}


def said(response: ChatCompletionResponse) -> list[tuple[Any, ...]]:
    """Return the choices without their ids."""
    return [
        (
            choice.finish_reason,
            choice.message.content,
            choice.message.reasoning_content,
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls],
        )
        for choice in response.choices
    ]
