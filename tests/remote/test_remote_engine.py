"""An engine whose face is elsewhere: everything that a request says and gets goes through bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from loopback import remotely

from adapter_files import write_adapter
from caught_errors import KnownError, goes_when_caught
from compose import CASES, MODES, PROPOSERS, Matrix, covering, llama_checkpoint
from paged_sdk import (
    ConfigError,
    Constraint,
    ConstraintError,
    EngineDeadError,
    InvalidRequestError,
    IsqType,
    LogitsProcessorError,
    Model,
    ModelClosedError,
    NumericalError,
    RequestTimeoutError,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.errors import PagedError
from paged_sdk.remote.sent_error import SentError
from paged_sdk.testing import fake_model
from talk import hello
from tiny import build_model, make_checkpoint
from tiny_ranker import logits_of, make_answering_ranker, make_decoder_ranker

pytestmark = pytest.mark.anyio

SAMPLINGS = (
    SamplingParams(temperature=0.0, max_len=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_len=12, n_choices=2, top_n_logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=7, max_len=12, stop=["a"], logits_bias={7: 3.0}, prompt_logprobs=1),
)


def only_seven(token_ids: Sequence[int], logits: Any) -> None:
    logits[:7] = float("-inf")
    logits[8:] = float("-inf")


def failing(token_ids: Sequence[int], logits: Any) -> None:
    raise KeyError("not there")


async def texts(model: Model, **options: Any) -> list[str]:
    responses = [await model.send_completion_request([5, 6, 7, 8], sampling, **options) for sampling in SAMPLINGS]
    return [repr((choice.text, choice.logprobs, choice.finish_reason)) for each in responses for choice in each.choices]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("remote"))


def builder(checkpoint: Path) -> TextModelBuilder:
    builder = TextModelBuilder(checkpoint).with_dtype("float32").with_force_cpu().with_num_threads(1)
    return builder.with_token_healing()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("make", [make_decoder_ranker, make_answering_ranker])
async def test_it_ranks_as_the_model_itself(make: Callable[[str, Path], object], tmp_path: Path) -> None:
    make("llama", tmp_path)
    async with builder(tmp_path).build() as own:
        expected = logits_of(await own.rank("the sea", ["a ship", "x"]))
    async with remotely(await builder(tmp_path).build()) as (model, _):
        assert model.ranks_texts
        assert logits_of(await model.rank("the sea", ["a ship", "x"])) == expected


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_it_answers_as_the_model_itself(checkpoint: Path) -> None:
    constraint = Constraint.regex("[ab]{3,6}")
    async with builder(checkpoint).build() as own:
        expected = await texts(own), await texts(own, constraint=constraint)
        healed = await own.send_completion_request("for index in ra", SAMPLINGS[0])
        vector = (await own.embed(["a text"])).embeddings[0]
        scores = (await own.score(["a text"], prefix="b")).scores[0].logprobs
    async with remotely(await builder(checkpoint).build()) as (model, _):
        assert (await texts(model), await texts(model, constraint=constraint)) == expected
        assert (await model.send_completion_request("for index in ra", SAMPLINGS[0])).choices == healed.choices
        assert (await model.embed(["a text"])).embeddings[0].tolist() == vector.tolist()
        assert (await model.score(["a text"], prefix="b")).scores[0].logprobs.tolist() == scores.tolist()
        response = await model.send_completion_request(
            [5, 6], SamplingParams(max_len=3), logits_processors=[only_seven]
        )
        assert await model.tokenize(response.choices[0].text) in ([7, 7, 7], [7])
        usage = response.usage
        assert 0 <= usage.queue_time_sec <= usage.time_to_first_token_sec <= usage.total_time_sec < 60
        assert model.stats().running == 0
        assert model.stats().completion_tokens > 0
        await model.reset_prefix_cache()
        assert model.stats().blocks_cached == 0
        await model.re_isq_model(IsqType.Q8_0)
        assert (await model.send_completion_request([5, 6])).choices
        with pytest.raises(ConfigError):
            await model.re_isq_model("Q4K")  # type: ignore[arg-type]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_adapters_are_loaded_where_the_engine_is(checkpoint: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "one", build_model("llama"))
    async with builder(checkpoint).with_adapter(path, name="first").build() as own:
        expected = await texts(own, adapter="first")
    async with remotely(await builder(checkpoint).build()) as (remote, _):
        await remote.load_adapter(path, name="second")
        assert remote.adapters == ("second",)
        assert await texts(remote, adapter="second") == expected
        with pytest.raises(InvalidRequestError, match="one of second"):
            await texts(remote, adapter="first")
        with pytest.raises(ConfigError, match="no other adapter"):
            await remote.load_adapter(path, name="second")
        await remote.unload_adapter("second")
        assert not remote.adapters
        with pytest.raises(ConfigError, match="there is none"):
            await remote.unload_adapter("second")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_errors_keep_their_types_and_what_they_know(checkpoint: Path) -> None:
    def local(token_ids: Sequence[int], logits: Any) -> None:
        raise AssertionError("it cannot be sent")

    async with remotely(await builder(checkpoint).build()) as (model, _):
        with pytest.raises(InvalidRequestError, match="another process can import") as invalid:
            await model.send_completion_request([5], logits_processors=[local])
        assert invalid.value.field == "logits_processors"
        with pytest.raises(LogitsProcessorError) as failed:
            await model.send_completion_request([5], logits_processors=[failing])
        assert isinstance(failed.value.__cause__, KeyError)
        with pytest.raises(ConstraintError) as constraint:
            await model.send_completion_request([5], constraint=Constraint.regex("(?=a)b"))
        assert constraint.value.kind == "regex"
        assert constraint.value.request_id.startswith("cmpl-")
        assert model.stats().running == 0


async def test_a_tool_stays_where_its_function_is() -> None:
    called: list[str] = []

    def weather(city: str) -> str:
        """Return the weather.

        :param city: a place
        """
        called.append(city)
        return "Rain."

    says = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    async with remotely(fake_model(says, "It rains.")) as (model, _):
        run = await model.send_chat_with_tools(hello("How is it?", tools=[weather]))
        assert run.response.choices[0].message.content == "It rains."
    assert called == ["Ulm"]


async def test_cancelling_and_leaving_end_the_request_there() -> None:
    fake = fake_model("A sentence that takes a while. " * 200, delay=0.002)
    async with remotely(fake) as (model, _):
        async with model.stream_chat_request(hello()) as stream:
            await anext(stream)
        with pytest.raises(RequestTimeoutError) as caught:
            await model.send_chat_request(hello(timeout=0.05))
        assert caught.value.partial_response is not None
        with anyio.move_on_after(0.02):
            await model.send_chat_request(hello())
        with anyio.fail_after(10):
            while fake.stats().running or model.stats().running or model.stats().blocks_used:
                await anyio.sleep(0.001)


async def test_closing_and_dying() -> None:
    async with remotely(fake_model("Half a", delay=0.001, error=RuntimeError("the device is gone"))) as (model, _):
        with pytest.raises(EngineDeadError, match=r"replica 0 \(here\): .*the device is gone") as dead:
            await model.send_chat_request(hello())
        assert isinstance(dead.value.__cause__, RuntimeError)
        assert dead.value.partial_response is not None
        with pytest.raises(EngineDeadError):
            model.check()
    async with remotely(fake_model("Whole.")) as (model, _):
        assert (await model.send_chat_request(hello())).choices[0].message.content == "Whole."
        await model.aclose(drain=True)
        with pytest.raises(ModelClosedError):
            await model.send_chat_request(hello())


async def test_a_cut_link_ends_what_is_under_way() -> None:
    async with remotely(fake_model("A sentence. " * 1000, delay=0.002)) as (model, link):
        async with model.stream_chat_request(hello()) as stream:
            await anext(stream)
            link.cut()
            with pytest.raises(EngineDeadError, match="it was cut") as caught:
                async for _ in stream:
                    pass
            assert caught.value.partial_response is not None
        with pytest.raises(EngineDeadError):
            await model.reset_prefix_cache()


class StubbornError(Exception):
    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{number} {text}")


def test_what_cannot_be_sent_of_an_error_becomes_text() -> None:
    error = InvalidRequestError("no", field="f", value=lambda: None)
    error.__cause__ = StubbornError(1, "two")
    received = SentError.of(error).received()
    assert isinstance(received, InvalidRequestError)
    assert (str(received), received.field) == ("no", "f")
    assert "lambda" in str(received.value)
    assert isinstance(received.__cause__, RuntimeError)
    assert str(received.__cause__) == "StubbornError: 1 two"
    numerical = SentError.of(NumericalError("nan", request_id="r")).received()
    assert isinstance(numerical, PagedError)
    assert vars(numerical) == {"request_id": "r"}


@asynccontextmanager
async def face_of(model: Model) -> AsyncIterator[Model]:
    async with remotely(model) as (face, _):
        yield face


def test_drafts_constraints_and_samplings_go_through(tmp_path: Path) -> None:
    """Cases are those of tests/compose.py, some of each."""
    matrix = Matrix(llama_checkpoint(tmp_path), through=face_of)
    cases = covering(2)["all", "paged"] + covering(2)["none", "paged"]
    assert matrix.compare("all", "paged", cases) > 0


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_everything_goes_through(tmp_path: Path, mode: str) -> None:
    matrix = Matrix(llama_checkpoint(tmp_path), through=face_of)
    for proposer in PROPOSERS:
        assert matrix.compare(proposer, mode, CASES) > 0


async def test_an_error_that_was_sent_goes_with_whoever_has_caught_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SentError, "received", lambda self: KnownError())
    async with remotely(fake_model("Hello!")) as (model, _):
        await goes_when_caught(lambda: model.load_adapter("nowhere"))
