"""Adapters through the public face: names, loading and unloading while requests run, and what is shared."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import anyio
import gguf
import pytest
import torch
from benchmarks.adapter_cost import measure_waits

from adapter_files import write_adapter, write_gguf_adapter
from paged_sdk import (
    AdapterError,
    BlockingModel,
    ConfigError,
    InvalidRequestError,
    IsqType,
    LoraModelBuilder,
    Model,
    ModelClosedError,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextMessageRole,
    TextModelBuilder,
    TextSpeculativeBuilder,
)
from paged_sdk.adapters.bank import AdapterBank, FittedAdapter
from paged_sdk.engine.engine import Engine
from paged_sdk.testing import fake_model
from talk import until
from tiny import build_model, make_checkpoint

pytestmark = pytest.mark.anyio

PROMPT: Final = list(range(5, 75))
GREEDY: Final = SamplingParams(temperature=0.0, max_len=8, ignore_eos=True)
LONG: Final = SamplingParams(temperature=0.0, max_len=400, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a llama, two adapters, and a copy of the first."""
    path = tmp_path_factory.mktemp("adapters")
    make_checkpoint("llama", path / "base")
    for seed, name in enumerate(("first", "second")):
        write_adapter(path / name, build_model("llama"), seed=seed)
    shutil.copytree(path / "first", path / "copy")
    return path


@pytest.fixture
def plain(directory: Path) -> TextModelBuilder:
    return TextModelBuilder(directory / "base").with_dtype("float32").with_force_cpu().with_num_threads(1)


@pytest.fixture
async def model(plain: TextModelBuilder, directory: Path) -> AsyncIterator[Model]:
    async with plain.with_adapter(directory / "first").build() as built:
        yield built


async def text(model: Model, adapter: str | None = None, **options: Any) -> str:
    response = await model.send_completion_request(PROMPT, GREEDY, adapter=adapter, **options)
    return response.choices[0].text


async def cached(model: Model, adapter: str | None = None, **options: Any) -> int:
    """Return how many tokens of the prompt were found in the prefix cache."""
    response = await model.send_completion_request(PROMPT, GREEDY, adapter=adapter, **options)
    return response.usage.prompt_tokens_details.cached_tokens


async def test_chats_go_through_adapters(model: Model) -> None:
    builder = RequestBuilder().add_message(TextMessageRole.USER, "Hello!").with_sampling(GREEDY)
    adapted = await model.send_chat_request(builder.with_adapter("first"))
    assert adapted.choices[0].message.content != (await model.send_chat_request(builder)).choices[0].message.content


async def test_loading_and_unloading(model: Model, directory: Path) -> None:
    before = await text(model, "first")
    await model.load_adapter(directory / "second")
    await model.load_adapter(str(directory / "copy"), name="again")
    assert list(model.adapters) == ["first", "second", "again"]
    assert await text(model, "again") == before != await text(model, "second")
    await model.unload_adapter("first")
    assert list(model.adapters) == ["second", "again"]
    with pytest.raises(InvalidRequestError, match="adapter = 'first' is not allowed: expected one of second, again"):
        await text(model, "first")
    await model.load_adapter(directory / "second", name="first")
    assert await text(model, "first") == await text(model, "second")


async def test_blocks_are_shared_by_content(model: Model, directory: Path) -> None:
    await model.load_adapter(directory / "second")
    await model.load_adapter(directory / "copy")
    assert await cached(model) == 0
    assert await cached(model, "first") == 0
    assert await cached(model, "second") == 0
    for name in (None, "first", "second", "copy"):
        assert await cached(model, name) == 64, name
    assert await cached(model, "copy", cache_salt="mine") == 0
    await model.unload_adapter("first")
    await model.load_adapter(directory / "second", name="first")
    assert await cached(model, "first") == 64
    await model.reset_prefix_cache()
    assert await cached(model, "copy") == 0


async def test_an_activated_adapter_shares_the_base_s_prefix(model: Model, directory: Path, tmp_path: Path) -> None:
    """It changes nothing before its invocation, and is not there where it is not invoked."""
    shutil.copytree(directory / "first", tmp_path / "own")
    config = json.loads((tmp_path / "own" / "adapter_config.json").read_text())
    config["alora_invocation_tokens"] = PROMPT[66:68]
    (tmp_path / "own" / "adapter_config.json").write_text(json.dumps(config))
    await model.load_adapter(tmp_path / "own")
    config["alora_invocation_tokens"] = [99, 98]
    (tmp_path / "own" / "adapter_config.json").write_text(json.dumps(config))
    await model.load_adapter(tmp_path / "own", name="absent")
    plain = await text(model)
    assert await cached(model, "own") == 64
    assert await text(model, "own") not in (plain, await text(model, "first"))
    assert await text(model, "absent") == plain
    assert await cached(model, "absent") == 64


async def test_gguf_files(model: Model, directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "as-file.gguf"
    write_gguf_adapter(file, directory / "first", build_model("llama"), gguf.MODEL_ARCH.LLAMA)
    await model.load_adapter(file)
    assert model.adapters == ("first", "as-file")
    assert await text(model, "as-file") == await text(model, "first")


async def test_unloading_lets_requests_under_way_go_on(model: Model) -> None:
    async with anyio.create_task_group() as tasks:
        stream = model.stream_completion_request(PROMPT, LONG, adapter="first")
        await stream.__anext__()
        tasks.start_soon(model.unload_adapter, "first")
        while model.adapters:
            await anyio.lowlevel.checkpoint()
        with pytest.raises(InvalidRequestError):
            model.stream_completion_request(PROMPT, LONG, adapter="first")
        response = await stream.collect()
    assert response.usage.completion_tokens == 400


@pytest.mark.parametrize("end", ["cancel", "close"])
async def test_requests_that_end_otherwise_let_it_go(plain: TextModelBuilder, directory: Path, end: str) -> None:
    async with plain.with_adapter(directory / "first").build() as model, anyio.create_task_group() as tasks:
        stream = model.stream_completion_request(PROMPT, LONG, adapter="first")
        await stream.__anext__()
        tasks.start_soon(model.unload_adapter, "first")
        while model.adapters:
            await anyio.lowlevel.checkpoint()
        await (stream.aclose() if end == "cancel" else model.aclose())


async def test_a_wait_that_is_cancelled_unloads_all_the_same(model: Model) -> None:
    stream = model.stream_completion_request(PROMPT, LONG, adapter="first")
    await stream.__anext__()
    with anyio.move_on_after(0) as scope:
        await model.unload_adapter("first")
    assert scope.cancelled_caught
    assert model.adapters == ()
    assert (await stream.collect()).usage.completion_tokens == 400


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_load_that_asyncio_itself_cancels_leaves_nothing_in_the_bank(
    model: Model, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is cancelled in the very step in which the engine takes the adapter in."""
    loop, take, remove, held = asyncio.get_running_loop(), AdapterBank.take, AdapterBank.remove, list[int]()

    def taken(bank: AdapterBank, fitted: FittedAdapter) -> int:
        loop.call_soon_threadsafe(loading.cancel)
        held.append(take(bank, fitted))
        return held[-1]

    def removed(bank: AdapterBank, number: int) -> None:
        remove(bank, number)
        held.remove(number)

    with monkeypatch.context() as patched:
        patched.setattr(AdapterBank, "take", taken)
        patched.setattr(AdapterBank, "remove", removed)
        loading = asyncio.ensure_future(model.load_adapter(directory / "second"))
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert model.adapters == ("first",)
        await until(lambda: not held)
    await model.load_adapter(directory / "second")
    assert await text(model, "second") != await text(model, "first")


async def test_texts_go_on_while_an_adapter_is_loaded(model: Model, directory: Path) -> None:
    """No step takes part in the loading but to take the adapter in, so every text gets the tokens that it gets else."""
    expected = (await model.send_completion_request(PROMPT, LONG, adapter="first")).choices[0].text
    found: list[str] = []

    async def write() -> None:
        found.append((await model.send_completion_request(PROMPT, LONG, adapter="first")).choices[0].text)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(write)
        for number in range(6):
            await model.load_adapter(directory / "second", name=f"number {number}")
            await model.unload_adapter(f"number {number}")
    assert found == [expected] * 4


async def test_a_call_that_still_queues_texts_says_that_their_adapter_went(
    plain: TextModelBuilder, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [[*PROMPT, number] for number in range(12)]  # more than fit into the queue
    errors: list[InvalidRequestError] = []
    steps, take_step = threading.Semaphore(1), Engine.step

    def step(engine: Engine) -> Any:
        assert steps.acquire(timeout=60)
        return take_step(engine)

    async def embed(built: Model) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            await built.embed(texts, adapter="first")
        errors.append(caught.value)

    builder = plain.with_adapter(directory / "first").with_max_queue(2).with_max_num_batched_tokens(16)
    async with builder.build() as built:
        async with anyio.create_task_group() as tasks:
            with monkeypatch.context() as patch:
                patch.setattr(Engine, "step", step)
                tasks.start_soon(embed, built)
                await until(lambda: built.stats().running == 1)  # the first text, of which one step has read a part
                tasks.start_soon(built.unload_adapter, "first")
                await until(lambda: not built.adapters)
            steps.release()
        (error,) = errors
        assert "the adapter 'first' was unloaded before this request was queued: unload it after" in str(error)
        assert (error.field, error.value, error.allowed) == ("adapter", "first", "a loaded adapter")
        assert (await built.embed(texts)).embeddings.shape[0] == len(texts)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_loading_holds_up_is_measured(model: Model, directory: Path) -> None:
    waits = await measure_waits(model, [PROMPT[:20], PROMPT[20:30]], directory / "second")
    assert 0 < waits.step <= max(waits.longest, waits.while_loading)
    assert model.adapters == ("first",)


async def test_names(model: Model, directory: Path) -> None:
    with pytest.raises(ConfigError, match="name = 'first' is not allowed: expected a name that no other adapter has"):
        await model.load_adapter(directory / "second", name="first")
    for name in ("", 3):
        with pytest.raises(ConfigError):
            await model.load_adapter(directory / "second", name=name)  # type: ignore[arg-type]
    for path in (3, ""):
        with pytest.raises(ConfigError):
            await model.load_adapter(path)  # type: ignore[arg-type]
    unknown: Any
    for unknown in ("second", None, []):
        with pytest.raises(ConfigError, match="the name of a loaded adapter: first"):
            await model.unload_adapter(unknown)
    for bad in ("", 7):
        with pytest.raises(InvalidRequestError):
            RequestBuilder().with_adapter(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="leave the call out"):
        RequestBuilder().with_adapter(None)  # type: ignore[arg-type]
    # A name whose adapter could not be loaded is free.
    with pytest.raises(AdapterError, match="does not exist"):
        await model.load_adapter(directory / "absent" / "second", name="second")
    await model.load_adapter(directory / "second")


async def test_a_closed_model_and_one_without_weights(plain: TextModelBuilder, directory: Path) -> None:
    async with plain.build() as model:
        with pytest.raises(InvalidRequestError, match="None, as no adapter is loaded"):
            await text(model, "first")
    with pytest.raises(ModelClosedError):
        await model.load_adapter(directory / "first")
    async with fake_model("Hello!") as model:
        with pytest.raises(ConfigError, match="a model with weights"):
            await model.load_adapter(directory / "first")


async def test_builders(plain: TextModelBuilder, directory: Path) -> None:
    paths = {"a": directory / "first", "b": directory / "second"}
    async with LoraModelBuilder.from_text_model_builder(plain, paths).build() as model:
        assert model.adapters == ("a", "b")
    builder = LoraModelBuilder.from_text_model_builder(plain, [directory / "first", str(directory / "second")])
    assert [source.name for source in builder.settings.adapters] == ["first", "second"]
    for adapters in (str(directory / "first"), 3, [3]):
        with pytest.raises(ConfigError):
            LoraModelBuilder.from_text_model_builder(plain, adapters)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a name that no other adapter has"):
        plain.with_adapter(directory / "first").with_adapter(directory / "copy", name="first")
    with pytest.raises(ConfigError, match="a TextModelBuilder, GgufModelBuilder or VisionModelBuilder"):
        LoraModelBuilder(None)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="holds no adapter_config"):
        await plain.with_adapter(directory / "base").build()
    with pytest.raises(ConfigError, match="no adapter for the draft model"):
        TextSpeculativeBuilder(plain, plain.with_adapter(directory / "first"))


async def test_drafts_of_texts_through_adapters(plain: TextModelBuilder, directory: Path) -> None:
    """Of what a text repeats, and of a smaller model, which goes through none."""
    own = plain.with_adapter(directory / "first")
    async with own.build() as model:
        expected = [await text(model, name) for name in (None, "first")]
    async with own.with_speculation(SpeculativeConfig(gamma=4)).build() as model:
        assert [await text(model, name) for name in (None, "first")] == expected
    async with TextSpeculativeBuilder(own, plain, SpeculativeConfig(gamma=3)).build() as model:
        assert [await text(model, name) for name in (None, "first")] == expected


async def test_the_base_is_quantized_anew(plain: TextModelBuilder, directory: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_len=1, prompt_logprobs=0)

    async def scores(model: Model, name: str | None) -> torch.Tensor:
        response = await model.send_completion_request(PROMPT, sampling, adapter=name)
        assert response.prompt_logprobs is not None
        return torch.tensor([token.logprob for token in response.prompt_logprobs.content])

    async with plain.with_adapter(directory / "first").build() as model:
        before = await scores(model, "first")
        await model.re_isq_model(IsqType.Q8_0)
        after, base = await scores(model, "first"), await scores(model, None)
        await model.load_adapter(directory / "copy")
        assert torch.equal(await scores(model, "copy"), after)
    assert 0 < (after - before).norm() < (base - before).norm() / 5


async def test_a_broken_adapter_fails_its_own_requests(model: Model, directory: Path, tmp_path: Path) -> None:
    broken = write_adapter(tmp_path / "broken", build_model("llama"), strength=math.nan)
    await model.load_adapter(broken)
    before = await text(model, "first")
    failed, others = [], []

    async def run(name: str) -> None:
        try:
            others.append(await text(model, name))
        except Exception as error:
            failed.append(type(error).__name__)

    async with anyio.create_task_group() as tasks:
        for name in ("broken", "first"):
            tasks.start_soon(run, name)
    assert failed == ["NumericalError"]
    assert others == [before]


def test_blocking(plain: TextModelBuilder, directory: Path) -> None:
    torch.set_num_threads(1)
    with BlockingModel(plain.build()) as model:
        model.load_adapter(directory / "first", name="a")
        assert list(model.adapters) == ["a"]
        assert model.send_completion_request(PROMPT, GREEDY, adapter="a").choices[0].text
        model.unload_adapter("a")
        assert not model.adapters
