"""The drop-in: what mistral.rs's Python programs say means the same here, or is an error."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, assert_type, cast

import pytest
import torch
from attrs import evolve

import tiny
from ggjt_files import write_ggjt
from paged_sdk import (
    BlockingModel,
    ConfigError,
    InvalidRequestError,
    MemoryGpuConfig,
    ModelClosedError,
    ModelLoadError,
    PagedError,
    SamplingParams,
    TextModelBuilder,
    write_gguf,
)
from paged_sdk.mistralrs import (
    Architecture,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStream,
    CompletionRequest,
    LoraAdapter,
    PagedCacheType,
    Runner,
    ToolChoice,
    Which,
)
from paged_sdk.mistralrs.answers import Answers
from paged_sdk.mistralrs.generations import AdapterLimits, Generations
from paged_sdk.mistralrs.residence import Residence
from paged_sdk.mistralrs.settings import paged_settings
from paged_sdk.testing import fake_model
from paged_sdk.testing.fake_model import FakeModel

QUESTION = [{"role": "user", "content": "Tell me a story about the Rust type system."}]


@pytest.fixture(scope="module")
def runner(tiny_checkpoint: Path) -> Iterator[Runner]:
    """Run in float32 and small: texts are exact, and requests queue."""
    which = Which.Plain(str(tiny_checkpoint), Architecture.Llama, dtype="float32")
    with Runner(which, max_seqs=8, pa_ctxt_len=4096, pa_blk_size=16, seed=7) as runner:
        yield runner


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Iterator[BlockingModel]:
    """Return the same model through the API beneath."""
    with BlockingModel(TextModelBuilder(tiny_checkpoint).with_dtype("float32").build()) as model:
        yield model


def chat(runner: Runner, **fields: Any) -> ChatCompletionResponse:
    fields = dict[str, Any](messages=QUESTION, model="default", max_tokens=12) | fields
    response = runner.send_chat_completion_request(ChatCompletionRequest(**fields))
    assert isinstance(response, ChatCompletionResponse)
    return response


def texts(response: ChatCompletionResponse) -> list[str]:
    return [choice.message.content or "" for choice in response.choices]


# The programs of mistral.rs's documentation, with the import and the model's path changed.
PROGRAMS = {
    "first edition": """
from paged_sdk.mistralrs import Runner, Which, ChatCompletionRequest, Architecture

runner = Runner(
    which=Which.Plain(
        model_id=MODEL,
        arch=Architecture.Mistral,
    ),
    pa_gpu_mem = 4096,
    pa_blk_size = 32,
)

res = runner.send_chat_completion_request(
    ChatCompletionRequest(
        model="mistral",
        messages=[
            {"role": "user", "content": "Tell me a story about the Rust type system."}
        ],
        max_tokens=256,
        presence_penalty=1.0,
        top_p=0.1,
        temperature=0.1,
    )
)
print(res.choices[0].message.content)
print(res.usage)
""",
    "FP8 KV cache": """
from paged_sdk.mistralrs import Runner, Which, ChatCompletionRequest, Architecture, PagedCacheType

runner = Runner(
    which=Which.Plain(
        model_id=MODEL,
        arch=Architecture.Mistral,
    ),
    pa_gpu_mem = 4096,
    pa_blk_size = 32,
    pa_cache_type = PagedCacheType.F8E4M3,
)

res = runner.send_chat_completion_request(
    ChatCompletionRequest(
        model="default",
        messages=[
            {"role": "user", "content": "Tell me a story about the Rust type system."}
        ],
        max_tokens=256,
        presence_penalty=1.0,
        top_p=0.1,
        temperature=0.1,
    )
)
print(res.choices[0].message.content)
print(res.usage)
""",
}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: these programs cannot say how many, and two on a busy machine wait for each other a minute
    long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_for_mistralrs_run(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Wide heads, for a pool of 4 GiB has a million blocks of the usual ones.
    checkpoint = tiny.make_checkpoint("mistral", tmp_path, head_dim=64)
    names: dict[str, Any] = {"MODEL": str(checkpoint)}
    exec(program, names)
    names["runner"].close()
    *text, usage = capsys.readouterr().out.rstrip("\n").splitlines()
    assert "".join(text)
    assert usage.startswith("Usage(prompt_tokens=")
    assert "avg_compl_tok_per_sec=" in usage


def test_a_response_is_the_models(runner: Runner, reference: BlockingModel) -> None:
    greedy = chat(runner, max_tokens=20)
    expected = reference.send_completion_request(
        tiny.tokenizer()
        .encode("<|im_start|>user\n" + QUESTION[0]["content"] + "<|im_end|>\n<|im_start|>assistant\n")
        .ids,
        SamplingParams(temperature=0, max_len=20),
    )
    assert texts(greedy) == [expected.choices[0].text]
    assert greedy.usage.prompt_tokens == expected.usage.prompt_tokens
    assert texts(chat(runner, max_tokens=20, temperature=0.0)) == texts(greedy)


def test_a_string_is_what_the_user_says(runner: Runner) -> None:
    assert texts(chat(runner, messages=QUESTION[0]["content"])) == texts(chat(runner))


def test_the_seed_repeats_requests_that_sample(runner: Runner) -> None:
    first, again = (texts(chat(runner, temperature=1.0)) for _ in range(2))
    assert first == again
    assert first != texts(chat(runner))
    assert first != texts(chat(runner, temperature=1.0, top_k=2))


def test_without_a_temperature_the_checkpoint_decides(tmp_path: Path, runner: Runner) -> None:
    sampling = tiny.make_checkpoint("llama", tmp_path)
    (sampling / "generation_config.json").write_text('{"temperature": 1.0, "eos_token_id": [2, 0]}')
    with Runner(Which.Plain(str(sampling), dtype="float32"), seed=7) as other:
        assert texts(chat(other)) == texts(chat(runner, temperature=1.0))
        assert texts(chat(other, temperature=0.0)) == texts(chat(runner))


def test_streaming_adds_up(runner: Runner) -> None:
    # So many tokens that not all of them are here when the first is read.
    request = ChatCompletionRequest(QUESTION, "default", max_tokens=300, stream=True)
    stream = runner.send_chat_completion_request(request)
    assert not isinstance(stream, ChatCompletionResponse)
    chunks = list(stream)
    assert len(chunks) > 1
    (whole,) = chat(runner, max_tokens=300).choices
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_sixteen_threads_at_once(runner: Runner) -> None:
    def ask(index: int) -> str:
        fields: dict[str, Any] = {"messages": f"What is {index}?", "max_tokens": 16}
        if index % 2:
            return texts(chat(runner, **fields))[0]
        stream = runner.send_chat_completion_request(ChatCompletionRequest(model="", stream=True, **fields))
        assert not isinstance(stream, ChatCompletionResponse)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(ask, range(16)))
    assert together == [ask(index) for index in range(16)]


def test_choices(runner: Runner) -> None:
    response = chat(runner, n_choices=3, temperature=1.0)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert len(set(texts(response))) == 3


def test_logprobs(runner: Runner) -> None:
    assert chat(runner).choices[0].logprobs is None
    for top_logprobs, shown in ((None, 1), (4, 4), (0, 0)):
        logprobs = chat(runner, logprobs=True, top_logprobs=top_logprobs).choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == 12
        for token in logprobs.content:
            assert token.logprob < 0
            assert len(token.top_logprobs) == shown
            assert all(math.isclose(token.logprob, best.logprob) for best in token.top_logprobs[:1])  # greedy


def test_penalties_bias_stops_and_dry_reach_the_sampler(runner: Runner) -> None:
    plain = chat(runner, max_tokens=60)
    (text,) = texts(plain)
    assert texts(chat(runner, max_tokens=60, repetition_penalty=3.0)) != [text]
    assert texts(chat(runner, max_tokens=60, frequency_penalty=2.0, presence_penalty=2.0)) != [text]
    assert texts(chat(runner, max_tokens=60, stop_seqs=[text[5:8]])) == [text[: text.index(text[5:8])]]
    token = 300
    assert texts(chat(runner, max_tokens=3, logit_bias={token: 100.0})) == [tiny.tokenizer().decode([token] * 3)]
    dry = chat(runner, max_tokens=8, logit_bias={token: 100.0}, dry_multiplier=1000.0, dry_allowed_length=2)
    assert texts(dry) != [tiny.tokenizer().decode([token] * 8)]


def test_truncation_and_thinking(runner: Runner) -> None:
    long = "word " * 3000
    with pytest.raises(PagedError, match="tokens"):
        chat(runner, messages=long)
    assert chat(runner, messages=long, truncate_sequence=True).usage.prompt_tokens < 2048
    assert texts(chat(runner, enable_thinking=True)) == texts(chat(runner))  # this template does not ask


def test_completion(runner: Runner, reference: BlockingModel) -> None:
    request = CompletionRequest("Once upon a time", "default", max_tokens=10)
    expected = reference.send_completion_request("Once upon a time", SamplingParams(temperature=0, max_len=10))
    assert runner.send_completion_request(request).choices[0].text == expected.choices[0].text
    long = CompletionRequest("word " * 3000, "default", max_tokens=2, truncate_sequence=True)
    assert runner.send_completion_request(long).usage.prompt_tokens <= 2048
    echo = CompletionRequest("Once upon a time", "default", max_tokens=10, echo_prompt=True, best_of=1)
    assert runner.send_completion_request(echo).choices[0].text == "Once upon a time" + expected.choices[0].text


def test_gguf(tmp_path: Path) -> None:
    path = tiny.make_gguf(tmp_path, quantization="Q8_0")
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    answers = []
    for which in (
        Which.GGUF(str(tmp_path), path.name),
        Which.GGUF(quantized_model_id=str(tmp_path), quantized_filename=[path.name], tok_model_id=str(tmp_path)),
    ):
        with Runner(which, no_paged_attn=True, prefix_cache_n=None) as runner:
            answers.append(texts(chat(runner)))
    assert answers[0] == answers[1]


def test_ggml(tmp_path: Path) -> None:
    path = write_ggjt(tmp_path / "llama.ggmlv3.q8_0.bin", tiny.build_model("llama"), "Q8_0")
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    gguf = write_gguf(path, tmp_path / "same.gguf", type="Q8_0")
    answers = []
    for which in (
        Which.GGML(str(tmp_path), path.name, tok_model_id=str(tmp_path), gqa=2),
        Which.GGUF(str(tmp_path), gguf.name, tokenizer_json=str(tmp_path / "tokenizer.json")),
    ):
        with Runner(which, chat_template=tiny.CHAT_TEMPLATE) as runner:
            answers.append(texts(chat(runner)))
    assert answers[0] == answers[1]
    with pytest.raises(ConfigError, match="gqa = 0"):
        Which.GGML("there", "file.bin", gqa=0)


def test_which_is_matched() -> None:
    def location(which: Which) -> str:
        match which:
            case Which.Plain(model_id=model_id):
                return model_id
            case Which.GGUF(quantized_filename=str(filename)):
                return filename
            case _:
                raise AssertionError

    assert location(Which.Plain("here")) == "here"
    assert location(Which.GGUF("there", "file.gguf")) == "file.gguf"
    assert repr(Which.Plain("here")).startswith("Which.Plain(model_id='here'")


def test_settings_reach_the_engine(tiny_checkpoint: Path, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (tmp_path / "other.jinja").write_text(template)
    for named in ({"chat_template": template}, {"jinja_explicit": str(tmp_path / "other.jinja")}):
        with Runner(
            Which.Plain(str(tiny_checkpoint), tokenizer_json=str(tiny_checkpoint / "tokenizer.json")),
            max_seqs=3,
            prefix_cache_n=0,
            paged_attn=True,
            pa_blk_size=8,
            pa_ctxt_len=100,
            pa_cache_type=PagedCacheType.F8E4M3,
            **named,  # type: ignore[arg-type]  # strings all
        ) as runner:
            config = runner._model.config
            assert (config.max_num_seqs, config.prefix_cache_n) == (3, 0)
            assert (config.block_size, config.num_blocks) == (8, 13)
            assert config.cache_type is PagedCacheType.F8E4M3.value
            expected = len(tiny.tokenizer().encode(QUESTION[0]["content"]).ids)
            assert chat(runner).usage.prompt_tokens == expected


def test_goals_of_memory(tiny_checkpoint: Path) -> None:
    with Runner(Which.Plain(str(tiny_checkpoint)), memory_goal="2 MiB") as runner:
        assert runner._model.config.gpu_memory == MemoryGpuConfig.MB(2)
    nothing = dict.fromkeys(["pa_gpu_mem", "pa_gpu_mem_usage", "pa_ctxt_len", "pa_blk_size", "pa_cache_type"])
    for goal, size in (
        ("4GiB", MemoryGpuConfig.MB(4096)),
        ("65536tokens", MemoryGpuConfig.ContextSize(65536)),
        (0.9, MemoryGpuConfig.Fraction(0.9)),
    ):
        meta = paged_settings(**nothing, no_paged_attn=False, paged_attn=False, memory_goal=goal)
        assert meta is not None
        assert meta.gpu_memory == size
    for goal in ("4", "4 GB", "0GiB", "1" * 40 + "GiB", "-1tokens", 2.0, 1, True):
        with pytest.raises(ConfigError, match="memory_goal"):
            Runner(Which.Plain("not looked at"), memory_goal=goal)


def test_the_environment_says_what_the_program_leaves_open(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MISTRALRS_PREFIX_CACHE_N", "0")
    monkeypatch.setenv("MISTRALRS_PAGED_ATTN", "off")
    with Runner(Which.Plain(str(tiny_checkpoint))) as runner:
        assert not runner._model.config.paged
        assert runner._model.config.prefix_cache_n == 0


def test_a_closed_runner(tiny_checkpoint: Path) -> None:
    runner = Runner(Which.Plain(str(tiny_checkpoint)))
    runner.close()
    runner.close()
    with pytest.raises(ModelClosedError):
        chat(runner)
    (name,) = runner.list_models()
    assert not runner.is_model_loaded(name)
    assert runner.list_models_with_status() == [(name, "unloaded")]
    for change in (runner.reload_model, runner.unload_model):
        with pytest.raises(ModelClosedError, match="make another one"):
            change(name)


def test_an_open_runner_does_not_keep_the_interpreter(tiny_checkpoint: Path) -> None:
    program = f"""
from paged_sdk.mistralrs import ChatCompletionRequest, Runner, Which
runner = Runner(Which.Plain({str(tiny_checkpoint)!r}))
stream = runner.send_chat_completion_request(ChatCompletionRequest("Hello!", "default", stream=True))
print(type(next(stream)).__name__)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ChatCompletionChunkResponse\n", "")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"pa_gpu_mem": 64, "pa_gpu_mem_usage": 0.5}, ("pa_gpu_mem", "pa_gpu_mem_usage")),
        ({"pa_gpu_mem": 64, "pa_ctxt_len": 512}, ("pa_gpu_mem", "pa_ctxt_len")),
        ({"pa_gpu_mem_usage": 0.5, "pa_ctxt_len": 512}, ("pa_gpu_mem_usage", "pa_ctxt_len")),
        ({"pa_ctxt_len": 512, "memory_goal": 0.5}, ("pa_ctxt_len", "memory_goal")),
        ({"no_paged_attn": True, "memory_goal": "1GiB"}, ("no_paged_attn", "memory_goal")),
        ({"no_paged_attn": True, "paged_attn": True}, ("no_paged_attn", "paged_attn")),
        ({"no_paged_attn": True, "pa_gpu_mem": 64}, ("no_paged_attn", "pa_gpu_mem")),
        ({"no_paged_attn": True, "pa_gpu_mem_usage": 0.1}, ("no_paged_attn", "pa_gpu_mem_usage")),
        ({"no_paged_attn": True, "pa_ctxt_len": 64}, ("no_paged_attn", "pa_ctxt_len")),
        ({"no_paged_attn": True, "pa_blk_size": 16}, ("no_paged_attn", "pa_blk_size")),
        ({"no_paged_attn": True, "pa_cache_type": PagedCacheType.AUTO}, ("no_paged_attn", "pa_cache_type")),
        ({"chat_template": "{{ 1 }}", "jinja_explicit": "x.jinja"}, ("chat_template", "jinja_explicit")),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], named: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="{} and {}".format(*named)):
        Runner(Which.Plain("not looked at"), **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"no_kv_cache": True}, "no_kv_cache"),
        ({"num_device_layers": ["0:16"]}, "num_device_layers"),
        ({"in_situ_quant": "Q99"}, "in_situ_quant"),
        ({"max_seqs": 0}, "max_num_seqs"),
        ({"prefix_cache_n": -1}, "prefix_cache_n"),
        ({"token_source": "somewhere"}, "token_source"),
        ({"pa_blk_size": 0}, "block_size"),
        ({"pa_gpu_mem": 0}, "MB.megabytes"),
        ({"pa_gpu_mem_usage": 1.5}, "Fraction.fraction"),
        ({"pa_ctxt_len": 0}, "ContextSize.tokens"),
        ({"pa_cache_type": "f8e4m3"}, "cache_type"),
    ],
)
def test_settings_that_cannot_be_used(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Runner(Which.Plain("not looked at"), **settings)


def test_models_that_cannot_be_used(tiny_checkpoint: Path) -> None:
    anything: Any = "path/to/model"
    with pytest.raises(ConfigError, match="which = "):
        Runner(anything)
    with pytest.raises(ConfigError, match=r"arch = .*Architecture\.DeepseekV2"):
        Which.Plain("model", anything)
    with pytest.raises(ConfigError, match="topology = 'path/to/model' is not allowed: expected a file"):
        Which.Plain("model", topology=anything).builder()
    with pytest.raises(ConfigError, match="topology = 'path/to/model' is not allowed: expected a file"):
        Which.GGUF("model", "file.gguf", topology=anything).builder()
    with pytest.raises(ConfigError, match="dtype = "):
        Runner(Which.Plain(str(tiny_checkpoint), dtype="int3"))
    with pytest.raises(ConfigError, match="nothing beside tok_model_id"):
        Runner(Which.GGUF("model", "file.gguf", tok_model_id="namespace/name", tokenizer_json="tokenizer.json"))
    with pytest.raises(ConfigError, match="llama"):
        Runner(Which.Plain(str(tiny_checkpoint), Architecture.Qwen3))


def test_architectures_are_compared_with_what_was_loaded() -> None:
    for loaded in tiny.FAMILIES:
        Architecture(loaded.removesuffix("_text")).check(loaded)
    with pytest.raises(ConfigError, match="llama"):
        Architecture.Phi2.check("llama")


GRAMMARS = {
    "regex": "[0-9]{3}",
    "lark": "start: /[0-9]{3}/",
    "json_schema": '{"type": "integer", "minimum": 100, "maximum": 999}',
    "llguidance": '{"grammars": [{"lark_grammar": "start: /[0-9]{3}/"}]}',
}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_grammars_of_every_type(runner: Runner, kind: str) -> None:
    says: dict[str, Any] = {"grammar": GRAMMARS[kind], "grammar_type": kind, "max_tokens": 8}
    chat = runner.send_chat_completion_request(ChatCompletionRequest(QUESTION, "default", **says))
    text = runner.send_completion_request(CompletionRequest("A number:", "default", **says))
    for said in (chat.choices[0].message.content, text.choices[0].text):
        assert said is not None
        assert len(said) == 3
        assert said.isdigit()


@pytest.mark.parametrize(
    ("grammar", "grammar_type", "field"),
    [("x", None, "grammar_type"), (None, "regex", "grammar"), ("x", "bnf", "grammar_type")],
)
def test_grammars_that_are_none(grammar: str | None, grammar_type: str | None, field: str) -> None:
    request: Any = ChatCompletionRequest(QUESTION, "default", grammar=grammar, grammar_type=grammar_type)
    with pytest.raises(InvalidRequestError) as caught:
        request.build(seed=None, default_temperature=None)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "says", [{"grammar": 5, "grammar_type": "regex"}, {"grammar": "x", "grammar_type": 5}, {"max_tool_rounds": "2"}]
)
def test_values_of_another_type_are_refused_at_once(says: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=" is not allowed"):
        ChatCompletionRequest(QUESTION, "default", **says)


WEATHER = json.dumps({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}})
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def test_callbacks_do_tools() -> None:
    told: list[tuple[str, dict[str, Any]]] = []

    def callback(name: str, arguments: dict[str, Any]) -> str:
        told.append((name, arguments))
        return "20 degrees"

    runner = runner_of(CALL, "It is warm.", callbacks={"weather": callback})
    with runner:
        request = ChatCompletionRequest(QUESTION, "default", tool_schemas=[WEATHER], max_tool_rounds=2)
        assert runner.send_chat_completion_request(request).choices[0].message.content == "It is warm."
        assert told == [("weather", {"city": "Paris"})]
        other = WEATHER.replace("weather", "time")
        with pytest.raises(InvalidRequestError, match="n_choices"):
            runner.send_chat_completion_request(evolve(request, n_choices=2))
        with pytest.raises(InvalidRequestError, match="max_tool_rounds"):
            runner.send_chat_completion_request(evolve(request, tool_schemas=[other]))


def test_callbacks_do_no_tools_of_an_answer_that_is_cut_off() -> None:
    told: list[str] = []

    def weather(name: str, arguments: dict[str, Any]) -> str:
        told.append(name)
        return "20 degrees"

    model = fake_model(CALL + "Hello!" * 1500, delay=0.001)
    runner = runner_with(model, callbacks={"weather": weather})

    def close_soon() -> None:
        while model.stats().completion_tokens <= len(CALL):
            time.sleep(0.001)
        runner.close()

    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(close_soon)
        request = ChatCompletionRequest(QUESTION, "default", tool_schemas=[WEATHER])
        assert runner.send_chat_completion_request(request).choices[0].finish_reason == "canceled"
        closing.result()
    assert told == []


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_whose_model_is_unloaded_by_a_tool_says_so(is_streamed: bool) -> None:
    def weather(name: str, arguments: dict[str, Any]) -> str:
        asked.unload_model("fake")
        return "20 degrees"

    asked = runner_of(CALL, "It is warm.", callbacks={"weather": weather})
    request: ChatCompletionRequest[bool] = ChatCompletionRequest(
        QUESTION, "default", tool_schemas=[WEATHER], stream=is_streamed
    )
    with asked, pytest.raises(ModelClosedError, match="the model was unloaded, or the runner closed"):
        list(cast(ChatCompletionStream, asked.send_chat_completion_request(request)))
    assert asked.list_unloaded_models() == ["fake"]


def test_a_stream_that_is_closed_while_a_tool_runs_ends_there() -> None:
    streams: list[ChatCompletionStream] = []

    def weather(name: str, arguments: dict[str, Any]) -> str:
        streams[0].close()
        return "20 degrees"

    model = fake_model(CALL, "It is warm.")
    with runner_with(model, callbacks={"weather": weather}) as runner:
        streams.append(
            runner.send_chat_completion_request(
                ChatCompletionRequest(QUESTION, "default", tool_schemas=[WEATHER], stream=True)
            )
        )
        assert not any(chunk.choices[0].delta.content for chunk in streams[0])
        assert len(model.requests) == 1


def test_a_model_can_be_told_of_names_of_files_that_are_no_utf8() -> None:
    with runner_of(CALL, "That one.", callbacks={"weather": lambda name, arguments: "b\udcff.txt"}) as runner:
        request = ChatCompletionRequest(QUESTION, "default", tool_schemas=[WEATHER])
        assert runner.send_chat_completion_request(request).choices[0].message.content == "That one."


def test_callbacks_end_at_their_bound() -> None:
    with runner_of(CALL, callbacks={"weather": lambda name, arguments: "?"}) as runner:
        request = ChatCompletionRequest(QUESTION, "default", tool_schemas=[WEATHER], max_tool_rounds=2)
        for rounds in (2, 0):
            response = runner.send_chat_completion_request(evolve(request, max_tool_rounds=rounds))
            assert len(response.agentic_tool_calls or []) == rounds
            assert response.choices[0].finish_reason == "tool_calls"
        hidden = evolve(request, tool_choice=ToolChoice.NoTools, max_tool_rounds=None)
        assert runner.send_chat_completion_request(hidden).choices[0].message.content == CALL


def runner_of(*texts: str, callbacks: Any) -> Runner:
    """Return a runner whose model says these texts."""
    return runner_with(fake_model(*texts), callbacks=callbacks)


def runner_with(model: FakeModel, *, callbacks: Any) -> Runner:
    """Return a runner that has this model."""
    runner = Runner.__new__(Runner)
    runner._which = Which.Plain("fake")
    runner._generations = Generations({}, AdapterLimits())
    runner._residence = Residence(lambda: BlockingModel(model))
    runner._answers = Answers(runner._residence.model, runner._generations, callbacks, seed=None)
    return runner


@pytest.mark.parametrize("callbacks", [{"f": 5}, [print], "f"])
def test_callbacks_that_are_none(callbacks: Any) -> None:
    with pytest.raises(ConfigError, match="tool_callbacks"):
        Runner(Which.Plain("no/such/directory/here"), tool_callbacks=callbacks)


def test_tools_as_mistral_rs_has_them() -> None:
    schema = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    request = ChatCompletionRequest(
        QUESTION, "default", tool_schemas=[json.dumps(schema)], tool_choice=ToolChoice.Auto, reasoning_effort="low"
    )
    options = request.build(seed=None, default_temperature=None).options
    assert [tool.name for tool in options.shown_tools] == ["weather"]
    assert options.reasoning_effort == "low"
    hidden = evolve(request, tool_choice=ToolChoice.NoTools).build(seed=None, default_temperature=None)
    assert hidden.options.shown_tools == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [("tool_schemas", "{}"), ("tool_schemas", ["{"]), ("tool_schemas", [{}]), ("tool_choice", "auto")],
)
def test_tools_that_are_none(field: str, value: Any) -> None:
    request: Any = ChatCompletionRequest(QUESTION, "default", **{field: value})
    with pytest.raises(InvalidRequestError) as caught:
        request.build(seed=None, default_temperature=None)
    assert caught.value.field == field


def test_fields_that_only_completions_refuse() -> None:
    anything: Any = "!"
    for field in ("tool_schemas", "tool_choice"):
        with pytest.raises(ConfigError, match=field):
            CompletionRequest("Hello", "default", **{field: anything})
    with pytest.raises(InvalidRequestError, match="best_of"):
        CompletionRequest("Hello", "default", best_of=2)
    with pytest.raises(ConfigError, match="suffix"):
        CompletionRequest("Hello", "default", suffix=anything)


# Parameters of mistral.rs 0.9.2 whose features this version does not have, with their defaults there.
RUNNER = dict.fromkeys(
    [
        "num_device_layers",
        "anymoe_config",
        "search_embedding_model",
        "search_callback",
        "mcp_client_config",
        "code_execution_config",
        "shell_config",
    ]
) | {"no_kv_cache": False, "enable_search": False}
PLAIN = dict.fromkeys(
    [
        "write_uqff",
        "from_uqff",
        "auto_map_params",
        "hf_cache_path",
        "matformer_config_path",
        "matformer_slice_name",
    ]
)
GGUF = dict.fromkeys(
    [
        "auto_map_params",
        "write_uqff",
        "max_edge",
        "multimodal_auto_map_params",
        "hf_cache_path",
        "matformer_config_path",
        "matformer_slice_name",
    ]
)
LORA = dict.fromkeys(["write_uqff", "from_uqff", "auto_map_params", "hf_cache_path"])
COMPLETION = dict.fromkeys(["tool_schemas", "tool_choice", "suffix"])
CHAT = dict.fromkeys(
    [
        "web_search_options",
        "tool_dispatch_url",
        "shell_skills",
        "agent_permission",
        "agent_approval_callback",
        "code_execution_permission",
        "session_id",
        "files",
        "input_files",
    ]
) | {"enable_code_execution": False, "enable_shell": False}
MAKES: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "Runner": (lambda **settings: Runner(Which.Plain("no/such/directory/here"), **settings), RUNNER),
    "Plain": (lambda **settings: Which.Plain("model", **settings), PLAIN),
    "Lora": (lambda **settings: Which.Lora("model", **settings), LORA),
    "LoraAdapter": (lambda **settings: LoraAdapter("alias", "path", **settings), {"revision": None}),
    "GGUF": (lambda **settings: Which.GGUF("model", "file", **settings), GGUF),
    "GGML": (lambda **settings: Which.GGML("model", "file", gqa=8, **settings), {"auto_map_params": None}),
    "ChatCompletionRequest": (lambda **fields: ChatCompletionRequest("Hello", "default", **fields), CHAT),
    "CompletionRequest": (lambda **fields: CompletionRequest("Hello", "default", **fields), COMPLETION),
}


@pytest.mark.parametrize("kind", MAKES)
def test_parameters_of_later_versions_may_be_given_at_their_defaults_only(kind: str) -> None:
    make, defaults = MAKES[kind]
    if kind == "Runner":
        with pytest.raises(ModelLoadError):  # the settings are fine
            make(**defaults)
    else:
        make(**defaults)
    for name in defaults:
        for value in ("something", 1, [], object(), "x" * 10**6):
            with pytest.raises(ConfigError) as caught:
                make(**{name: value})
            assert caught.value.setting == name
            assert len(str(caught.value)) < 300


def test_ways_to_describe_models_that_there_are_not() -> None:
    for name in ("LoraGGUF", "LoraGGML", "XLora", "XLoraGGUF", "XLoraGGML"):
        with pytest.raises(ConfigError, match=rf"Which\.{name}.*(Which\.GGUF|Which\.Lora)"):
            getattr(Which, name)("model", "file", order="x")
    for adapters in ("", "path", ["path"], 3, [None]):
        with pytest.raises(ConfigError, match="LoraAdapter"):
            Which.GGUF("model", "file", adapters=adapters)  # type: ignore[arg-type]


def test_a_runner_holds_one_model(runner: Runner) -> None:
    other: Any = "another"
    with pytest.raises(ConfigError, match="model_id"):
        runner.send_chat_completion_request(ChatCompletionRequest("Hello", "default"), other)
    with pytest.raises(ConfigError, match="model_id"):
        runner.send_completion_request(CompletionRequest("Hello", "default"), other)


def test_stream_decides_the_type() -> None:
    """mypy judges these, and fails for a wrong one."""

    def types(runner: Runner, either: bool) -> None:
        assert_type(
            runner.send_chat_completion_request(ChatCompletionRequest("Hello", "default")), ChatCompletionResponse
        )
        assert_type(
            runner.send_chat_completion_request(ChatCompletionRequest("Hello", "default", stream=True)),
            ChatCompletionStream,
        )
        assert_type(
            runner.send_chat_completion_request(ChatCompletionRequest("Hello", "default", stream=either)),
            ChatCompletionResponse | ChatCompletionStream,
        )

    assert callable(types)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": ""}, None),
        ({"messages": [{"role": "nobody", "content": ""}]}, "role"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"n_choices": 0}, "n_choices"),
        ({"n_choices": 9}, "n_choices"),
        ({"max_tokens": 0}, "max_len"),
        ({"top_logprobs": 2}, "logprobs is true"),
        ({"dry_base": 1.5}, "dry_base .* dry_multiplier"),
        ({"dry_sequence_breakers": ["\n"]}, "dry_sequence_breakers .* dry_multiplier"),
    ],
)
def test_requests_that_cannot_be_done(runner: Runner, fields: dict[str, Any], named: str | None) -> None:
    if named is None:
        assert chat(runner, **fields).choices
        return
    with pytest.raises((InvalidRequestError, ConfigError), match=named):
        chat(runner, **fields)


def test_requests_of_another_kind(runner: Runner) -> None:
    anything: Any = {"messages": QUESTION}
    with pytest.raises(InvalidRequestError, match="ChatCompletionRequest"):
        runner.send_chat_completion_request(anything)
    with pytest.raises(InvalidRequestError, match="CompletionRequest"):
        runner.send_completion_request(anything)


def test_text_becomes_tokens_and_tokens_text(runner: Runner, reference: BlockingModel) -> None:
    text = "Blocks, tables and 32 tokens."
    assert runner.tokenize_text(text, False) == reference.tokenize(text)
    special = runner.tokenize_text(text, add_special_tokens=True, enable_thinking=True, model_id=None)
    assert special == reference.tokenize(text, add_special_tokens=True)
    assert runner.detokenize_text(special, skip_special_tokens=True) == text
    assert runner.detokenize_text([1, *special], False).startswith("<|im_start|>")
    assert runner.max_sequence_length() == reference.max_sequence_length
    another: Any = "another"
    for refused in (
        lambda: runner.tokenize_text(text, True, model_id=another),
        lambda: runner.detokenize_text([1], True, another),
        lambda: runner.max_sequence_length(another),
    ):
        with pytest.raises(ConfigError):
            refused()
