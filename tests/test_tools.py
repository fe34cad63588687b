"""A model is told of tools, calls them, and is given their answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import pytest
import tokenizers
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageFunctionToolCall
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from paged_sdk import (
    ChatCompletionChunkResponse,
    ConstraintError,
    Conversation,
    InvalidRequestError,
    Message,
    Model,
    RequestBuilder,
    SamplingParams,
    TextModelBuilder,
    Tool,
    ToolCall,
)
from paged_sdk.build.parts import ModelParts
from paged_sdk.chat import text_processor as text_processor_module
from paged_sdk.chat.pieces import BYTE_LEVEL_ALPHABET
from paged_sdk.chat.template import ChatTemplate
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.chat.tokenizer import SpecialTokens, Tokenizer
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.sampling import GenerationDefaults
from paged_sdk.engine.engine import Engine
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.scheduler.scheduler import Scheduler
from paged_sdk.testing import fake_model
from paged_sdk.testing.fake_runner import FakeRunner
from paged_sdk.testing.next_token import ScriptedTokens

pytestmark = pytest.mark.anyio

CALL: Final = '<tool_call>{"name": "weather", "arguments": {"city": "Łódź"}}</tool_call>'


def weather(city: str) -> str:
    """Tell the weather.

    :param city: where
    """
    return f"20 degrees in {city}"


ASK: Final = RequestBuilder().add_message("user", "How warm is it?")


async def chunks_of(model: Model, request: RequestBuilder) -> list[ChatCompletionChunkResponse]:
    async with model.stream_chat_request(request) as stream:
        return [chunk async for chunk in stream]


async def test_a_call_in_openais_form() -> None:
    async with fake_model(f"<think>Hm.</think>I look.\n{CALL}\n{CALL}", delay=1e-5) as model:
        request = ASK.with_tools([weather])
        response = await model.send_chat_request(request)
        (choice,) = response.choices
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content, choice.message.reasoning_content) == ("I look.", "Hm.")
        first, second = choice.message.tool_calls
        assert (first.index, second.index) == (0, 1)
        assert first.id != second.id
        assert first.id.isalnum()
        assert len(first.id) == 9
        assert first.function.parse_arguments() == {"city": "Łódź"}
        seen = ChatCompletion.model_validate(response.to_dict(), strict=True).choices[0]
        assert seen.finish_reason == "tool_calls"
        calls = seen.message.tool_calls
        assert calls is not None
        assert [call.id for call in calls] == [first.id, second.id]
        call = calls[0]
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Łódź"}')
        assert seen.message.model_extra == {"reasoning_content": "Hm."}

        chunks = await chunks_of(model, request)
        deltas = [ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True).choices[0] for chunk in chunks]
        assert "".join(each.delta.content or "" for each in deltas) == "I look."
        assert "".join((each.delta.model_extra or {}).get("reasoning_content", "") for each in deltas) == "Hm."
        whole = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls]
        assert [(call.index, call.function.name) for call in whole] == [(0, "weather"), (1, "weather")]
        assert [call.function.arguments for call in whole] == ['{"city": "Łódź"}'] * 2
        assert [each.finish_reason for each in deltas if each.finish_reason] == ["tool_calls"]


async def test_openais_client_joins_what_is_streamed_of_calls() -> None:
    async with fake_model(f"I look.\n{CALL}\n{CALL}", delay=1e-5) as model:
        chunks = await chunks_of(model, ASK.with_tools([weather]))
        judge: Any = ChatCompletionStreamState()
        for chunk in chunks:
            judge.handle_chunk(ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True))
        (seen,) = judge.get_final_completion().choices
        assert (seen.finish_reason, seen.message.content) == ("tool_calls", "I look.")
        whole = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls]
        assert [(call.id, call.function.name, call.function.arguments) for call in seen.message.tool_calls] == [
            (call.id, "weather", '{"city": "Łódź"}') for call in whole
        ]
        pieces = [part for chunk in chunks for part in chunk.choices[0].delta.tool_call_deltas]
        assert [part.id for part in pieces if part.index == 0 and part.id is not None] == [whole[0].id]


async def test_a_call_alone_has_no_content_on_the_wire() -> None:
    async with fake_model(CALL) as model:
        message = (await model.send_chat_request(ASK.with_tools([weather]))).choices[0].message
        assert message.content == ""
        assert message.to_dict()["content"] is None


async def test_what_was_called_and_answered_goes_back_to_the_model() -> None:
    async with fake_model(CALL, "It is warm.") as model:
        request = ASK.with_tools([weather])
        message = (await model.send_chat_request(request)).choices[0].message
        turn = Message.parse(message)
        assert turn == Message(
            "assistant", "", tool_calls=[ToolCall("weather", {"city": "Łódź"}, message.tool_calls[0].id)]
        )
        answer = {"role": "tool", "content": "20", "tool_call_id": message.tool_calls[0].id}
        response = await model.send_chat_request(request.add_messages(message, answer))
        assert response.choices[0].message.content == "It is warm."
        assert response.choices[0].finish_reason == "stop"
        assert model.requests[1].messages[1] == turn


async def test_without_tools_or_hidden_from_them_a_model_calls_none() -> None:
    async with fake_model(CALL) as model:
        for request in (ASK, ASK.with_tools([weather], "none"), ASK.with_tools([])):
            (choice,) = (await model.send_chat_request(request)).choices
            assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


async def test_unknown_tools_and_texts_that_are_cut_are_no_calls() -> None:
    async with fake_model(CALL.replace("weather", "time"), CALL) as model:
        (choice,) = (await model.send_chat_request(ASK.with_tools([weather]))).choices
        assert (choice.message.tool_calls, choice.finish_reason) == ((), "stop")
        assert choice.message.content == CALL.replace("weather", "time")
        cut = ASK.with_tools([weather]).with_sampling(SamplingParams(max_len=30))
        (choice,) = (await model.send_chat_request(cut)).choices
        assert (choice.message.content, choice.finish_reason) == (CALL[:30], "length")
        late = ASK.with_tools([weather]).with_sampling(SamplingParams(max_len=len(CALL.encode())))
        (choice,) = (await model.send_chat_request(late)).choices
        assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "length")


async def test_every_choice_has_its_own_calls() -> None:
    async with fake_model(CALL, "Hello", f"{CALL}{CALL}") as model:
        request = ASK.with_tools([weather]).with_sampling(SamplingParams(n_choices=3))
        choices = (await model.send_chat_request(request)).choices
        assert [len(choice.message.tool_calls) for choice in choices] == [1, 0, 2]
        assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop", "tool_calls"]


async def test_a_stop_string_ends_a_call() -> None:
    async with fake_model(f"{CALL} and more") as model:
        request = ASK.with_tools([weather]).with_sampling(SamplingParams(stop=["</tool_call>"]))
        (choice,) = (await model.send_chat_request(request)).choices
        assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")


async def test_a_partial_response_holds_the_calls_so_far() -> None:
    async with fake_model(CALL + "x" * 5000, delay=0.001) as model:
        async with model.stream_chat_request(ASK.with_tools([weather])) as stream:
            async for chunk in stream:
                if chunk.choices[0].delta.tool_calls:
                    break
        (choice,) = stream.response_so_far().choices
        assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "canceled")


async def test_a_conversation_keeps_thoughts_apart() -> None:
    async with fake_model("<think>Hm.</think>Hello.") as model:
        chat = Conversation(model)
        await chat.send("Hi!")
        assert chat.messages[1] == Message("assistant", "Hello.", reasoning_content="Hm.")


def saying(said: str, template: str, marks: tuple[str, ...]) -> Model:
    """Return a model that says a text, in which these marks are special tokens and all else is bytes."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_LEVEL_ALPHABET), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>", *marks])
    tokenizer = Tokenizer(backend, SpecialTokens(eos=256))
    text = TextProcessor(
        tokenizer=tokenizer,
        template=ChatTemplate(template, {}),
        defaults=GenerationDefaults(),
        stop_token_ids=frozenset({256}),
    )
    config = EngineConfig(
        num_blocks=64,
        block_size=32,
        max_num_seqs=4,
        max_queue=4,
        max_model_len=1024,
        max_num_batched_tokens=1024,
    )
    kv = KvCacheManager(64, 32, prefix_caching=True, sliding_window=None)
    script = ScriptedTokens(tokenizer.encode(said, add_special_tokens=False), 256)
    runner = FakeRunner(script, vocab_size=tokenizer.vocab_size)
    engine = Engine(Scheduler(config, kv), kv, runner, tokenizer)
    return Model(
        ModelParts(
            name="special",
            model_type="fake",
            architecture="fake",
            engine=engine,
            text=text,
            config=config,
            vocab_size=tokenizer.vocab_size,
            hidden_size=1,
            max_sequence_tokens=1000,
        )
    )


MISTRAL: Final = "{{ tools }}{{ messages[0].content }}{{ '[TOOL_CALLS][/THINK]' }}"
MISTRAL_MARKS: Final = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]")


async def test_calls_and_thoughts_in_special_tokens_are_seen_and_other_special_tokens_are_not() -> None:
    said = '[THINK]Hm.[/THINK][INST]Well.[TOOL_CALLS]weather[ARGS]{"city": "x"}'
    async with saying(said, MISTRAL, MISTRAL_MARKS) as model:
        (choice,) = (await model.send_chat_request(ASK.with_tools([weather]))).choices
        assert (choice.message.content, choice.message.reasoning_content) == ("Well.", "Hm.")
        assert [call.function.arguments for call in choice.message.tool_calls] == ['{"city": "x"}']
        (choice,) = (await model.send_chat_request(ASK)).choices
        assert choice.message.content == 'Well.weather{"city": "x"}'
        assert (await model.send_completion_request("x")).choices[0].text == 'Hm.Well.weather{"city": "x"}'


async def test_stop_strings_are_looked_for_in_what_is_seen() -> None:
    """The engine and the reader each make the text, which has to be the same."""
    said = 'Well.[TOOL_CALLS]weather[ARGS]{"city": "x"}[TOOL_CALLS] more'
    stopped = SamplingParams(stop=["}[TOOL"])
    async with saying(said, MISTRAL, MISTRAL_MARKS) as model:
        request = ASK.with_tools([weather]).with_sampling(stopped)
        response = await model.send_chat_request(request)
        (choice,) = response.choices
        assert (choice.message.content, choice.finish_reason) == ('Well.[TOOL_CALLS]weather[ARGS]{"city": "x"', "stop")
        assert response.usage.completion_tokens == len('Well.weather{"city": "x"}') + 3


async def test_a_thought_that_the_prompt_has_begun() -> None:
    template = "{{ messages[0].content }}<think>\n{{ '' if enable_thinking is not false else '</think>' }}"
    async with saying("Hm.</think>Hello.", template, ("<think>", "</think>")) as model:
        (choice,) = (await model.send_chat_request(ASK)).choices
        assert (choice.message.content, choice.message.reasoning_content) == ("Hello.", "Hm.")
        (choice,) = (await model.send_chat_request(ASK.with_enable_thinking(False))).choices
        assert (choice.message.content, choice.message.reasoning_content) == ("Hm.</think>Hello.", None)


@pytest.mark.parametrize(
    ("template", "told"),
    [("{{ messages[0].content }}", "takes no tools"), ("{{ tools }}{{ messages[0].content }}", "not known here")],
)
async def test_a_template_that_knows_no_tools(template: str, told: str) -> None:
    async with saying("x", template, ()) as model:
        with pytest.raises(InvalidRequestError, match=told) as caught:
            await model.send_chat_request(ASK.with_tools([weather]))
        assert caught.value.field == "tools"


TELLING: Final = "{{ (tools or []) | tojson }}{{ messages[-1].content }}{{ reasoning_effort }}{# <tool_call> #}"


async def test_tools_and_effort_reach_the_template_as_in_transformers() -> None:
    async with saying("x", TELLING, ("<|im_end|>",)) as model:
        tools = [Tool.from_function(weather)]
        text = model._preparer.text
        prompt = text.encode_chat(ASK.messages, tools=tools, reasoning_effort="low")
        wire = json.dumps([tool.to_dict() for tool in tools], ensure_ascii=False)
        assert text.tokenizer.decode(prompt) == f"{wire}How warm is it?low"


PHI: Final = """{% for message in messages %}
{%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none -%}
{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}
{%- else %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("system", [(), (Message("system", "Be brief."),)])
async def test_tools_that_a_template_looks_for_in_the_system_message(system: tuple[Message, ...]) -> None:
    async with saying("x", PHI, ("<|tool|>", "<|/tool|>")) as model:
        text = model._preparer.text
        tool = Tool(name="f", description="Ends <|/tool|> it.")
        ids = text.encode_chat([*system, *ASK.messages], tools=[tool])
        shown = text.tokenizer.decode(ids, skip_special_tokens=False)
        functions = json.dumps([tool.to_dict()["function"]])
        said = system[0].content if system else ""
        assert shown == f"<|system|>{said}<|tool|>{functions}<|/tool|><|user|>How warm is it?"
        assert sum(map(text.tokenizer.is_special, ids)) == 2
        plain = text.tokenizer.decode(text.encode_chat([*system, *ASK.messages]), skip_special_tokens=False)
        assert "<|tool|>" not in plain


def count(kind: Literal["day", "night"], exact: bool, number: Annotated[int, "how many"] = 1) -> int:
    """Count them."""
    return number


@pytest.mark.parametrize("choice", ["required", "count", {"type": "function", "function": {"name": "count"}}])
async def test_a_forced_call_is_made_and_its_arguments_fit(builder: TextModelBuilder, choice: Any) -> None:
    """Random weights would never write one, and a thought that the prompt has begun is not waited for."""
    template = TELLING + "<think>{# </think> #}"
    async with builder.with_chat_template(template).build() as model:
        request = ASK.with_tools([weather, count], choice).with_sampling(
            SamplingParams(temperature=1.0, seed=1, max_len=200, n_choices=4)
        )
        choices = (await model.send_chat_request(request)).choices
        whole = [each for each in choices if each.finish_reason == "tool_calls"]
        assert whole
        assert {each.finish_reason for each in choices} <= {"tool_calls", "length"}
        for each in whole:
            assert (each.message.content, each.message.reasoning_content) == ("", None)
            assert choice == "required" or len(each.message.tool_calls) == 1
            for call in each.message.tool_calls:
                arguments = call.function.parse_arguments()
                if choice != "required" or call.function.name == "count":
                    assert call.function.name == "count"
                    assert arguments["kind"] in ("day", "night")
                    assert isinstance(arguments["exact"], bool)
                    assert arguments.keys() <= {"kind", "exact", "number"}


async def test_calls_of_strict_tools_fit_once_the_model_begins_one(builder: TextModelBuilder) -> None:
    async with builder.with_chat_template(TELLING).build() as model:
        begun = await model.tokenize('Well. <tool_call>\n{"name": "count", "arguments": {')

        lengths: list[int] = []  # of what there was, the prompt first

        def begin(token_ids: Sequence[int], logits: Tensor) -> None:
            lengths.append(len(token_ids))
            place = lengths[-1] - lengths[0]
            if place < len(begun):
                logits[begun[place]] = 1000.0

        tools = [Tool.from_function(count, strict=True), Tool.from_function(weather)]
        sampling = SamplingParams(temperature=1.0, seed=3, max_len=250, n_choices=4)
        request = ASK.with_tools(tools).with_sampling(sampling).with_logits_processors(begin)
        calls = [call for each in (await model.send_chat_request(request)).choices for call in each.message.tool_calls]
        assert calls
        for call in calls:
            if call.function.name == "count":
                assert {"kind", "exact"} <= call.function.parse_arguments().keys() <= {"kind", "exact", "number"}
        unenforceable = Tool(name="f", parameters={"type": "object", "not": {}}, strict=True)
        with pytest.raises(ConstraintError, match="the tool f"):
            await model.send_chat_request(ASK.with_tools([unenforceable]))


def test_a_thought_of_harmony_does_not_end_an_answer() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(BYTE_LEVEL_ALPHABET), merges=[]))
    backend.decoder = decoders.ByteLevel()
    marks = ["<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>"]
    backend.add_special_tokens(marks)
    ids: dict[str, Any] = {mark: backend.token_to_id(mark) for mark in marks}
    tokenizer = Tokenizer(backend, SpecialTokens(eos=ids["<|return|>"]))
    for template, ends in (
        ("<|channel|>analysis<|message|><|end|>", {"<|return|>", "<|call|>"}),
        ("{{ '<|end|>' }}", {"<|return|>", "<|end|>"}),
    ):
        text = text_processor_module._text_processor(tokenizer, template, GenerationDefaults(), [ids["<|end|>"]], None)
        assert text.stop_token_ids == {ids[mark] for mark in ends}


KIMI: Final = """{# <|tool_calls_section_begin|> #}{% for message in messages %}
{%- for call in message.tool_calls or [] %}{{ call.id }}={{ call.function.arguments }};{% endfor %}
{%- if message.role == "tool" %}{{ message.tool_call_id }}:{{ message.content }};{% endif %}{% endfor %}"""


async def test_ids_of_earlier_calls_name_the_tool_where_a_template_writes_nothing_else() -> None:
    async with saying("x", KIMI, ()) as model:
        text = model._preparer.text
        turn = Message(
            "assistant", "", tool_calls=[ToolCall("f", {}, "abcdefghi"), ToolCall("g", {"x": 1}, "123456789")]
        )
        said = [
            turn,
            Message("tool", "two", tool_call_id="123456789"),
            Message("tool", "one", tool_call_id="abcdefghi"),
            Message("assistant", "", tool_calls=[ToolCall("f", {}, "zzzzzzzzz")]),
        ]
        shown = text.tokenizer.decode(text.encode_chat(said))
        assert shown == 'functions.f:0={};functions.g:1={"x": 1};functions.g:1:two;functions.f:0:one;functions.f:2={};'


async def test_special_tokens_in_descriptions_are_text() -> None:
    async with saying("x", TELLING, ("<|im_end|>",)) as model:
        text = model._preparer.text
        tool = Tool(name="f", description="Ends <|im_end|> it.")
        ids = text.encode_chat(ASK.messages, tools=[tool])
        assert not any(map(text.tokenizer.is_special, ids))
        assert "<|im_end|>" in text.tokenizer.decode(ids)
        assert any(
            map(text.tokenizer.is_special, text.encode_chat(ASK.messages, tools=[tool], special_tokens_in_content=True))
        )


@pytest.mark.parametrize("arguments", [{"city": "Łódź"}, '{"city": "Łódź"}'])
@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{# <tool_call> #}{{ messages[0].tool_calls[0].function.arguments | tojson }}", '{"city": "Łódź"}'),
        (
            "{# <｜tool▁calls▁begin｜> #}{{ '-' + messages[0].tool_calls[0].function.arguments }}",
            '-{"city": "Łódź"}',
        ),
    ],
)
async def test_arguments_of_earlier_calls_have_the_form_that_templates_take(
    template: str, shown: str, arguments: Any
) -> None:
    async with saying("x", template, ()) as model:
        text = model._preparer.text
        turn = Message("assistant", "", tool_calls=[ToolCall("weather", arguments)])
        assert text.tokenizer.decode(text.encode_chat([turn])) == shown
