"""Adapters come, go and are replaced while a runner answers, as in mistral.rs."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from attrs import evolve

import tiny
from adapter_files import write_adapter
from paged_sdk import (
    AdapterInfo,
    BlockingModel,
    CalledFunction,
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    Choice,
    ChunkChoice,
    ConfigError,
    Delta,
    InvalidRequestError,
    ModelClosedError,
    RequestBuilder,
    ResponseMessage,
    ToolCallResponse,
    Usage,
)
from paged_sdk.config.sampling import GenerationDefaults
from paged_sdk.mistralrs import (
    Architecture,
    ChatCompletionRequest,
    ChatCompletionStream,
    CompletionRequest,
    LoraAdapter,
    LoraAdapterError,
    LoraAdapterGeneration,
    Runner,
    Which,
)
from paged_sdk.mistralrs.answers import Answers
from paged_sdk.mistralrs.generations import AdapterLimits, Generations

REQUEST: ChatCompletionRequest[Literal[False]] = ChatCompletionRequest("Hello!", "default", max_tokens=12)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("adapters")
    model = tiny.build_model("llama")
    for seed in range(2):
        write_adapter(directory / str(seed), model, seed=seed)
    return [str(directory / str(seed)) for seed in range(2)]


@pytest.fixture
def runner(tiny_checkpoint: Path, adapters: list[str]) -> Iterator[Runner]:
    which = Which.Lora(str(tiny_checkpoint), [LoraAdapter("one", adapters[0])], Architecture.Llama, dtype="float32")
    with Runner(which, pa_ctxt_len=4096) as runner:
        yield runner


def say(runner: Runner, adapter: str | LoraAdapterGeneration | None) -> str | None:
    return runner.send_chat_completion_request(evolve(REQUEST, adapter=adapter)).choices[0].message.content


def code_of(call: Any, *arguments: Any, **settings: Any) -> str:
    with pytest.raises(LoraAdapterError) as caught:
        call(*arguments, **settings)
    return caught.value.code


def test_requests_go_through_adapters(runner: Runner, adapters: list[str], tiny_checkpoint: Path) -> None:
    (one,) = runner.list_lora_adapters()
    assert (one.alias, one.source, one.revision) == ("one", adapters[0], None)
    assert one.rank > 0
    assert one.bytes > 0
    two = runner.load_lora_adapter("two", Path(adapters[1]))
    assert runner.list_lora_adapters() == [one, two]
    assert one.generation != two.generation
    with Runner(Which.Plain(str(tiny_checkpoint), dtype="float32")) as plain:
        base = say(plain, None)
        again = plain.load_lora_adapter("again", adapters[0])  # any model takes adapters
        assert again.generation == one.generation
        assert say(plain, "again") == say(runner, "one")
    assert say(runner, None) == base
    assert len({base, say(runner, "one"), say(runner, "two")}) == 3
    completion = CompletionRequest("Once upon", "default", max_tokens=8)
    through = [runner.send_completion_request(evolve(completion, adapter=name)) for name in (None, "one", one.exact())]
    assert through[0].choices[0].text != through[1].choices[0].text == through[2].choices[0].text
    assert [response.adapter_generation for response in through] == [None, one.generation, one.generation]
    assert runner.unload_lora_adapter("two") == two
    with pytest.raises(InvalidRequestError, match="one of one"):
        say(runner, "two")
    with pytest.raises(ConfigError, match="alias"):
        runner.load_lora_adapter(3, adapters[1])  # type: ignore[arg-type]


def test_an_alias_goes_over_to_another_content(runner: Runner, adapters: list[str]) -> None:
    (one,) = runner.list_lora_adapters()
    first = say(runner, "one")
    stream = runner.send_chat_completion_request(
        ChatCompletionRequest("Hello!", "default", max_tokens=12, stream=True, adapter="one")
    )
    begun = next(stream)
    assert begun.adapter_generation == one.generation
    two = runner.load_lora_adapter("one", adapters[1], load_inplace=True, expected_generation=one.generation)
    rest = [begun, *stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == first
    assert two.generation != one.generation
    response = runner.send_chat_completion_request(evolve(REQUEST, adapter="one"))
    assert (response.adapter_generation, response.choices[0].message.content) == (
        two.generation,
        say(runner, two.exact()),
    )
    assert response.choices[0].message.content != first
    with pytest.raises(InvalidRequestError, match="adapter"):
        say(runner, one.exact())
    stale = {"load_inplace": True, "expected_generation": one.generation}
    assert code_of(runner.load_lora_adapter, "one", adapters[0], **stale) == "lora_generation_mismatch"
    assert code_of(runner.unload_lora_adapter, "one", None, one.generation) == "lora_generation_mismatch"
    assert runner.load_lora_adapter("new", adapters[0], load_inplace=True).generation == one.generation
    assert say(runner, "new") == first
    assert runner.unload_lora_adapter("one", expected_generation=two.generation) == two
    assert [info.alias for info in runner.list_lora_adapters()] == ["new"]


def test_requests_of_many_threads_get_the_content_that_they_say(runner: Runner, adapters: list[str]) -> None:
    texts = {info.generation: say(runner, "one") for info in runner.list_lora_adapters()}
    two = runner.load_lora_adapter("two", adapters[1])
    texts[two.generation] = say(runner, "two")
    ended = threading.Event()

    def ask(is_streamed: bool) -> set[str]:
        seen: set[str] = set()
        while not ended.is_set():
            request: ChatCompletionRequest[bool] = ChatCompletionRequest(
                "Hello!", "default", max_tokens=12, adapter="one", stream=is_streamed
            )
            answer = runner.send_chat_completion_request(request)
            if isinstance(answer, ChatCompletionStream):
                chunks = list(answer)
                generation = chunks[0].adapter_generation
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            else:
                generation, text = answer.adapter_generation, answer.choices[0].message.content or ""
            assert generation is not None
            assert text == texts[generation]
            seen.add(generation)
        return seen

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, bool(index % 2)) for index in range(4)]
        try:
            for turn in range(1, 9):
                runner.load_lora_adapter("one", adapters[turn % 2], load_inplace=True)
        finally:
            ended.set()
        assert set.union(*(each.result() for each in asked)) <= set(texts)
    status = runner.lora_adapter_status()
    assert [generation.active_leases for generation in status.generations] == [0, 0]
    assert status.retired_generations == 0


class Contents:
    """Stands in for a model that has adapters: each content is a letter, whose digest is the same letter."""

    def __init__(self) -> None:
        self.digests = {"one": "a" * 64}
        self._loaded = {"one"}

    @property
    def adapter_infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(AdapterInfo(name=name, digest=self.digests[name], rank=1, num_bytes=1) for name in [*self._loaded])

    def load_adapter(self, path: str, *, name: str) -> None:
        self.digests[name] = path * 64
        self._loaded = {*self._loaded, name}

    def unload_adapter(self, name: str) -> None:
        self._loaded = self._loaded - {name}


def test_a_content_is_selected_by_its_own_name_at_any_moment() -> None:
    contents, ended = Contents(), threading.Event()
    model, generations = cast(BlockingModel, contents), Generations({"one": "a"}, AdapterLimits())

    def replace() -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            generations.load(model, "one", "ab"[turn % 2], is_replaced=True, expected=None)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as thread:
            replacing = thread.submit(replace)
            try:
                for _ in range(2000):
                    selected = generations.select(model, "one")
                    assert selected is not None
                    assert contents.digests[selected.name] == selected.generation
            finally:
                ended.set()
            replacing.result()
    finally:
        sys.setswitchinterval(before)


class Calling(Contents):
    """Calls a tool, and then says the letter of the content that it is asked through."""

    generation_defaults = GenerationDefaults()

    def __init__(self) -> None:
        super().__init__()
        self.unloaded = threading.Event()

    def unload_adapter(self, name: str) -> None:
        super().unload_adapter(name)
        self.unloaded.set()

    def send_chat_request(self, request: RequestBuilder) -> ChatCompletionResponse:
        adapter = request.options.adapter
        if adapter not in self._loaded:
            raise InvalidRequestError.of("adapter", adapter, "one that is loaded")
        is_told = request.messages[-1].role.value == "tool"
        call = ToolCallResponse(index=0, id="c", function=CalledFunction(name="weather", arguments="{}"))
        message = ResponseMessage(
            content=self.digests[adapter][0] if is_told else "", tool_calls=() if is_told else (call,)
        )
        return ChatCompletionResponse(
            id="r",
            choices=(Choice(finish_reason="stop", index=0, message=message),),
            created=0,
            model="calling",
            usage=Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2),
        )

    def stream_chat_request(self, request: RequestBuilder) -> Streamed:
        return Streamed(self, request)


class Streamed:
    """Asks when its first chunk is wanted, and gives the content in one chunk and all else in another."""

    def __init__(self, calling: Calling, request: RequestBuilder) -> None:
        self._ask = partial(calling.send_chat_request, request)
        self._response: ChatCompletionResponse | None = None

    def __next__(self) -> ChatCompletionChunkResponse:
        is_first = self._response is None
        if self._response is None:
            self._response = self._ask()
        message = self._response.choices[0].message
        choice = (
            ChunkChoice(index=0, delta=Delta(content=message.content or "Let me see: "))
            if is_first
            else ChunkChoice(index=0, delta=Delta(content="", tool_calls=message.tool_calls), finish_reason="stop")
        )
        return ChatCompletionChunkResponse(
            id="r", choices=(choice,), created=0, model="calling", usage=None if is_first else self._response.usage
        )

    def collect(self) -> ChatCompletionResponse:
        assert self._response is not None
        return self._response

    response_so_far = collect

    def close(self) -> None:
        pass


SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def test_a_content_stays_while_tools_are_run_for_a_request_through_it() -> None:
    calling = Calling()
    model, generations = cast(BlockingModel, calling), Generations({"one": "a"}, AdapterLimits())
    told, replacing = [], []

    def weather(name: str, arguments: dict[str, Any]) -> str:
        told.append(name)
        replacing.append(thread.submit(generations.load, model, "one", "b", is_replaced=True, expected=None))
        while generations.infos(model)[0].generation != "b" * 64:
            time.sleep(0.001)
        calling.unloaded.wait(0.1)
        return "20 degrees"

    answers = Answers(lambda: model, generations, {"weather": weather}, seed=None)
    with ThreadPoolExecutor(1) as thread:
        response = answers.chat(evolve(REQUEST, adapter="one", tool_schemas=[json.dumps(SCHEMA)]))
        replaced = [each.result().generation for each in replacing]
    assert not isinstance(response, ChatCompletionStream)
    assert (response.choices[0].message.content, response.adapter_generation) == ("a", "a" * 64)
    assert (told, replaced) == (["weather"], ["b" * 64])
    assert calling.unloaded.is_set()
    (left,) = generations.status(model).generations
    assert (left.generation, left.active_leases) == ("b" * 64, 0)


def test_a_tool_may_replace_the_content_that_it_is_run_for() -> None:
    calling = Calling()
    model, generations = cast(BlockingModel, calling), Generations({"one": "a"}, AdapterLimits())

    def weather(name: str, arguments: dict[str, Any]) -> str:
        if not calling.unloaded.is_set():
            generations.load(model, "one", "b", is_replaced=True, expected=None)
        return "20 degrees"

    answers = Answers(lambda: model, generations, {"weather": weather}, seed=None)
    response = answers.chat(evolve(REQUEST, adapter="one", tool_schemas=[json.dumps(SCHEMA)]))
    assert not isinstance(response, ChatCompletionStream)
    assert (response.choices[0].message.content, response.adapter_generation) == ("a", "a" * 64)
    assert not calling.unloaded.is_set()
    (left,) = generations.status(model).generations
    assert left.generation == "b" * 64
    assert calling.unloaded.is_set()


@pytest.mark.parametrize("is_in_tool", [False, True])
def test_a_stream_with_tools_goes_on_through_the_content_it_began_with(is_in_tool: bool) -> None:
    calling = Calling()
    model, generations = cast(BlockingModel, calling), Generations({"one": "a"}, AdapterLimits())

    def replace() -> None:
        generations.load(model, "one", "b", is_replaced=True, expected=None)

    def weather(name: str, arguments: dict[str, Any]) -> str:
        if is_in_tool:
            replace()
        return "20 degrees"

    answers = Answers(lambda: model, generations, {"weather": weather}, seed=None)
    request: ChatCompletionRequest[Literal[True]] = ChatCompletionRequest(
        "Hello!", "default", adapter="one", tool_schemas=[json.dumps(SCHEMA)], stream=True
    )
    stream = answers.chat(request)
    assert isinstance(stream, ChatCompletionStream)
    if not is_in_tool:
        replace()  # by the thread that is to go on reading
    with stream:
        chunks = list(itertools.takewhile(lambda chunk: chunk.choices[0].finish_reason is None, stream))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me see: a"
    (left,) = generations.status(model).generations
    assert (left.generation, left.active_leases) == ("b" * 64, 0)


def test_a_stream_may_end_at_the_moment_in_which_its_content_is_left_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks about adapters then frees it, and whoever has replaced it does not once more."""
    calling = Calling()
    model, generations = cast(BlockingModel, calling), Generations({"one": "a"}, AdapterLimits())
    selected = generations.select(model, "one")
    generations.lease(selected, is_held=True)
    lock, asked = generations._lock, list[int]()

    class Watched:
        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()
            if generations._left and not asked:  # another thread gets it now
                asked.append(1)
                generations.release(selected, is_held=True)
                assert len(generations.status(model).generations) == 1

    monkeypatch.setattr(generations, "_lock", Watched())
    generations.load(model, "one", "b", is_replaced=True, expected=None)
    assert asked
    (left,) = generations.status(model).generations
    assert (left.generation, left.retired) == ("b" * 64, False)


def test_contents_that_cannot_be_freed_are_gone_once_the_model_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it is unloaded at that very moment."""
    calling = Calling()
    model, generations = cast(BlockingModel, calling), Generations({"one": "a"}, AdapterLimits())
    generations.load(model, "one", "b", is_replaced=True, expected=None)  # of another name than the first
    going_on = []
    for letter in "cd":
        going_on.append(generations.select(model, "one"))
        generations.lease(going_on[-1], is_held=True)
        generations.load(model, "one", letter, is_replaced=True, expected=None)
    for selected in going_on:
        generations.release(selected, is_held=True)

    def unload_adapter(name: str) -> None:
        raise ModelClosedError("the model is closed")

    monkeypatch.setattr(calling, "unload_adapter", unload_adapter)
    with pytest.raises(ModelClosedError):
        generations.status(model)
    generations.reset()
    assert [each.generation for each in generations.status(cast(BlockingModel, Calling())).generations] == ["a" * 64]


def test_tools_that_each_free_the_content_of_the_other_do_not_wait_for_ever() -> None:
    calling = Calling()
    model, generations = cast(BlockingModel, calling), Generations({"one": "a"}, AdapterLimits())
    generations.load(model, "two", "b", is_replaced=False, expected=None)
    both = threading.Barrier(2)

    def answer(own: str, other: str) -> None:
        with generations.leased(generations.select(model, own)):
            both.wait(10)
            generations.unload(model, other, None)

    threads = [threading.Thread(target=answer, args=names, daemon=True) for names in (("one", "two"), ("two", "one"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert not generations.status(model).generations
    assert not calling.adapter_infos


def test_what_cannot_be_done_has_a_code(runner: Runner, adapters: list[str], tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    load, unload = runner.load_lora_adapter, runner.unload_lora_adapter
    generation = "0" * 64
    assert code_of(load, "one", adapters[1]) == "lora_adapter_already_loaded"
    assert code_of(load, "new", str(tmp_path / "none")) == "adapter_file_not_found"
    assert code_of(load, "new", tmp_path / "broken") == "invalid_lora_adapter"
    assert code_of(load, "", adapters[1]) == "invalid_lora_name"
    assert code_of(load, "new", adapters[1], expected_generation=generation) == "invalid_lora_load_policy"
    assert code_of(load, "one", adapters[1], None, True, "x") == "invalid_lora_generation"
    assert code_of(load, "new", adapters[1], None, True, generation) == "lora_generation_mismatch"
    assert code_of(unload, "new") == "lora_adapter_not_found"
    assert code_of(unload, "one", expected_generation="X" * 64) == "invalid_lora_generation"
    assert [info.alias for info in runner.list_lora_adapters()] == ["one"]
    with pytest.raises(ConfigError, match="generation"):
        LoraAdapterGeneration("one")
    with pytest.raises(ConfigError, match="adapter"):
        ChatCompletionRequest("Hello!", "default", adapter=5)  # type: ignore[arg-type]


def test_an_alias_may_look_like_a_name_of_the_models(tiny_checkpoint: Path, adapters: list[str]) -> None:
    given = [LoraAdapter("one", adapters[0]), LoraAdapter("one#1", adapters[0])]
    with Runner(Which.Lora(str(tiny_checkpoint), given)) as runner:
        for alias in ("one", "one#2", "one", "one#1"):
            runner.load_lora_adapter(alias, adapters[1], load_inplace=True)
        assert {info.alias: info.source for info in runner.list_lora_adapters()} == dict.fromkeys(
            ("one", "one#1", "one#2"), adapters[1]
        )


def test_limits(tiny_checkpoint: Path, adapters: list[str]) -> None:
    given = [LoraAdapter("one", adapters[0])]
    with Runner(Which.Lora(str(tiny_checkpoint), given)) as runner:
        (one,) = runner.list_lora_adapters()
    cases: list[tuple[dict[str, int], str]] = [
        ({"max_adapters": 1}, "lora_adapter_limit_exceeded"),
        ({"max_bytes": 2 * one.bytes - 1}, "lora_byte_limit_exceeded"),
    ]
    for limits, code in cases:
        with Runner(Which.Lora(str(tiny_checkpoint), given, **limits)) as runner:  # type: ignore[arg-type]
            assert code_of(runner.load_lora_adapter, "two", adapters[1]) == code
            status = runner.lora_adapter_status()
            assert (status.resident_generations, status.resident_bytes) == (1, one.bytes)
            assert {name: getattr(status, name) for name in limits} == limits
            assert say(runner, "one")
    for limits in ({"max_rank": one.rank - 1}, {"max_bytes": one.bytes - 1}):
        code = f"lora_{next(iter(limits))[4:].rstrip('s')}_limit_exceeded"
        assert code_of(Runner, Which.Lora(str(tiny_checkpoint), given, **limits)) == code  # type: ignore[arg-type]
        with Runner(Which.Lora(str(tiny_checkpoint), **limits)) as runner:  # type: ignore[arg-type]
            assert code_of(runner.load_lora_adapter, "one", adapters[0]) == code
    two = [*given, LoraAdapter("two", adapters[1])]
    assert code_of(Runner, Which.Lora(str(tiny_checkpoint), two, max_adapters=1)) == "lora_adapter_limit_exceeded"
    with pytest.raises(ConfigError, match="max_rank"):
        Which.Lora("model", max_rank=0)


def test_status_counts_requests(runner: Runner, adapters: list[str]) -> None:
    request: ChatCompletionRequest[Literal[True]] = ChatCompletionRequest(
        "Hello!", "default", max_tokens=12, stream=True, adapter="one"
    )
    stream, dropped = (runner.send_chat_completion_request(request) for _ in range(2))
    status = runner.lora_adapter_status()
    (generation,) = status.generations
    assert status.adapters == runner.list_lora_adapters()
    assert (generation.aliases, generation.retired, generation.active_leases) == (["one"], False, 2)
    assert (status.retired_generations, status.resident_bytes) == (0, generation.bytes)
    list(stream)
    del dropped
    assert runner.lora_adapter_status().generations[0].active_leases == 0
    with runner.send_chat_completion_request(request) as closed:
        next(closed)
    assert runner.lora_adapter_status().generations[0].active_leases == 0


def test_a_model_that_is_loaded_again_has_the_adapters_it_began_with(runner: Runner, adapters: list[str]) -> None:
    (one,), first = runner.list_lora_adapters(), say(runner, "one")
    runner.load_lora_adapter("one", adapters[1], load_inplace=True)
    runner.load_lora_adapter("two", adapters[1])
    (name,) = runner.list_models()
    runner.unload_model(name)
    runner.reload_model(name)
    assert runner.list_lora_adapters() == [one]
    assert say(runner, "one") == first
    assert runner.lora_adapter_status().retired_generations == 0
