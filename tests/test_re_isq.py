"""Quantizing the weights of a live model again, through the public face."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint, current_token
from attrs import evolve
from safetensors.torch import load_file, save_file

import tiny
from arrivals import Step, num_unheard
from paged_sdk import (
    BlockingModel,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    GgufModelBuilder,
    IsqType,
    Model,
    ModelClosedError,
    ModelLoadError,
    RequestTimeoutError,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.attention.backend import AttentionBackend, KvStorage
from paged_sdk.build import requantization
from paged_sdk.build.assembly import load_parts
from paged_sdk.build.fusing import fuse
from paged_sdk.build.kv_storage import make_storage
from paged_sdk.config.env import read_environment
from paged_sdk.kernels.native.library import why_not
from paged_sdk.mistralrs import Runner, Which
from paged_sdk.models import decoder_layer
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.runner import model_runner
from paged_sdk.testing import fake_model
from rank_threads import ranks_as_threads
from talk import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(why_not() is not None, reason=f"native kernels: {why_not()}"),
]

PROMPT = list(range(5, 75))
LONG = SamplingParams(temperature=0, max_len=150, ignore_eos=True)
LOAD_LAYER = "paged_sdk.models.loading.load_decoder_layer"
SHORT = SamplingParams(temperature=0, max_len=12, ignore_eos=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows of 256, which the K formats need."""
    directory = tmp_path_factory.mktemp("wide")
    return tiny.make_checkpoint("llama", directory, hidden_size=256, intermediate_size=512, head_dim=64)


def builder(path: Path) -> TextModelBuilder:
    return TextModelBuilder(path).with_force_cpu().with_num_threads(1)


def is_closed(model: Model) -> bool:
    """Tell whether a model takes no more requests."""
    try:
        model.check()
    except ModelClosedError:
        return True
    return False


async def said(model: Model, sampling: SamplingParams = SHORT) -> str:
    return (await model.send_completion_request(PROMPT, sampling)).choices[0].text


async def logprobs(model: Model) -> list[float]:
    sampling = SamplingParams(temperature=0, max_len=1, prompt_logprobs=0)
    response = await model.send_completion_request(PROMPT, sampling)
    assert response.prompt_logprobs is not None
    return [token.logprob for token in response.prompt_logprobs.content]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("paged", [True, False])
async def test_the_model_is_the_one_that_a_builder_makes(wide: Path, *, paged: bool) -> None:
    plain = builder(wide) if paged else builder(wide).without_paged_attn()
    async with plain.build() as model:
        first = await logprobs(model)
        for isq in (IsqType.Q4K, IsqType.AFQ8, IsqType.Q2K):
            await model.re_isq_model(isq)
            async with plain.with_isq(isq).build() as fresh:
                again = await logprobs(model)
                assert again == await logprobs(fresh) != first
                assert await said(model) == await said(fresh)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2"])
async def test_experts_and_tied_embeddings(family: str, tmp_path: Path) -> None:
    plain = builder(tiny.make_checkpoint(family, tmp_path))
    async with plain.build() as model, plain.with_isq(IsqType.Q4_0).build() as fresh:
        await model.re_isq_model(IsqType.Q4_0)
        assert await logprobs(model) == await logprobs(fresh)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_gguf_file_is_decoded_and_quantized_again(tmp_path: Path) -> None:
    plain = GgufModelBuilder(tiny.make_gguf(tmp_path, quantization="Q8_0")).with_force_cpu().with_num_threads(1)
    async with plain.build() as model, plain.with_isq(IsqType.Q5_1).build() as fresh:
        assert await logprobs(model) != await logprobs(fresh)
        await model.re_isq_model(IsqType.Q5_1)
        assert await logprobs(model) == await logprobs(fresh)


async def test_requests_under_way_finish_first_and_others_wait(wide: Path) -> None:
    texts: dict[str, str] = {}

    async def send(name: str, sampling: SamplingParams) -> None:
        texts[name] = await said(model, sampling)

    async def requantize(isq: IsqType) -> None:
        await model.re_isq_model(isq)
        texts[isq.value] = ""

    async with builder(wide).build() as model:
        expected = await said(model, LONG)
        async with anyio.create_task_group() as tasks:
            step = Step(model)
            tasks.start_soon(send, "before", LONG)
            await until(step.is_done.is_set)
            tasks.start_soon(requantize, IsqType.Q2K)
            await until(lambda: num_unheard(model) == 1)
            tasks.start_soon(send, "between", SHORT)
            await until(lambda: num_unheard(model) == 2)
            tasks.start_soon(requantize, IsqType.Q8_0)
            await until(lambda: num_unheard(model) == 3)
            tasks.start_soon(send, "after", SHORT)
            await until(lambda: num_unheard(model) == 4)
            step.may_end.set()
        # Each has the text of the weights at its time. Trio's tasks go on in any order when several may.
        assert texts["before"] == expected
        assert texts["after"] == await said(model)
        assert len({texts["before"][: len(texts["after"])], texts["between"], texts["after"]}) == 3
        async with builder(wide).with_isq(IsqType.Q2K).build() as fresh:
            assert texts["between"] == await said(fresh)


async def test_nothing_of_the_old_weights_is_cached(wide: Path) -> None:
    async with builder(wide).build() as model:
        await said(model)
        await said(model)
        hits = model.stats().prefix_hits
        assert hits > 0
        await model.re_isq_model(IsqType.Q4K)
        assert model.stats().blocks_cached == 0
        await said(model)
        assert model.stats().prefix_hits == hits
        await said(model)
        assert model.stats().prefix_hits == 2 * hits


async def test_a_caller_that_gives_up_before_its_turn_changes_nothing(wide: Path) -> None:
    async with builder(wide).build() as model:
        before = await said(model)
        step = Step(model)
        async with model.stream_completion_request(PROMPT, LONG):
            await until(step.is_done.is_set)
            texts: list[str] = []

            async def send() -> None:
                texts.append(await said(model))

            async with anyio.create_task_group() as tasks:
                with anyio.move_on_after(0.01) as scope:
                    tasks.start_soon(send)
                    await model.re_isq_model(IsqType.Q2K)
                assert scope.cancelled_caught
                step.may_end.set()
        assert texts == [before]
        assert await said(model) == before


async def test_a_caller_that_gives_up_later_changes_everything(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = anyio.Event()
    load = decoder_layer.load_decoder_layer

    def telling(*args: Any) -> Any:
        anyio.from_thread.run_sync(begun.set, token=token)
        return load(*args)

    async with builder(wide).build() as model, builder(wide).with_isq(IsqType.Q2K).build() as fresh:
        expected = await logprobs(fresh)
        token = current_token()
        monkeypatch.setattr(LOAD_LAYER, telling)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(model.re_isq_model, IsqType.Q2K)
            await begun.wait()
            tasks.cancel_scope.cancel()
        assert await logprobs(model) == expected


async def test_requests_that_wait_can_be_ended(wide: Path) -> None:
    async with builder(wide).build() as model, anyio.create_task_group() as tasks:
        later, step = Step(model, 3), Step(model)
        async with model.stream_completion_request(PROMPT, LONG):
            await until(step.is_done.is_set)
            tasks.start_soon(model.re_isq_model, IsqType.Q8_0)
            await until(lambda: num_unheard(model) == 1)
            waiting = model.stream_completion_request(PROMPT, LONG)
            tasks.start_soon(anext, waiting)
            await until(lambda: num_unheard(model) == 2)
            step.may_end.set()
            await until(later.is_done.is_set)  # there was a step that knew of it
            assert model.stats().waiting
            with pytest.raises(RequestTimeoutError):
                await model.send_completion_request(PROMPT, SHORT, timeout=0.01)
            tasks.cancel_scope.cancel()
        later.may_end.set()
        await waiting.aclose()
    assert model.stats().blocks_used == 0


def spoil(path: Path, name: str) -> None:
    """Give a tensor a number that no scale fits."""
    tensors = load_file(path / "model.safetensors")
    tensors[name][3, 7] = 1e6
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_weight_that_cannot_be_quantized_leaves_all_as_they_were(tmp_path: Path) -> None:
    path = tiny.make_checkpoint("llama", tmp_path, dtype="bfloat16")
    spoil(path, "model.layers.1.mlp.up_proj.weight")
    async with builder(path).build() as model:
        before = await logprobs(model)
        with pytest.raises(CheckpointError, match="cannot be quantized"):
            await model.re_isq_model(IsqType.Q8_0)
        assert await logprobs(model) == before


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_device_gets_its_memory_back_in_between(
    wide: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """Before new weights come, when keys, values and recorded steps have gone; and before the pool does. A pool that
    was made in vain has gone by then.
    """
    order: list[str] = []
    pools: list[weakref.ref[AttentionBackend]] = []

    def note(what: str) -> None:
        if order[-1:] != [what]:
            order.append(what)

    def noted_load(*args: Any, **named: Any) -> Any:
        note("load")
        return load(*args, **named)

    def noted_storage(*args: Any, **named: Any) -> KvStorage:
        storage = make_storage(*args, **named)

        def make(num_blocks: int) -> AttentionBackend:
            note("pool")
            assert all(pool() is None for pool in pools)
            pool = storage.make(num_blocks)
            pools.append(weakref.ref(pool))
            return pool

        return evolve(storage, make=make)

    def noted_fuse(*args: Any, **named: Any) -> CausalModel:
        if fails and len(pools) == 1:
            raise RuntimeError("no room to record steps")
        return fuse(*args, **named)

    load = decoder_layer.load_decoder_layer
    async with builder(wide).build() as model:
        monkeypatch.setattr(LOAD_LAYER, noted_load)
        monkeypatch.setattr(requantization, "make_storage", noted_storage)
        monkeypatch.setattr(requantization, "fuse", noted_fuse)
        for module in (model_runner, requantization):
            monkeypatch.setattr(module, "return_cached_memory", lambda: order.append("return"))
        before = await logprobs(model)
        if fails:
            with pytest.raises(RuntimeError, match="no room"):
                await model.re_isq_model(IsqType.Q4K)
            assert await logprobs(model) == before
        else:
            await model.re_isq_model(IsqType.Q4K)
    again = ["load", "return", "pool"]
    assert order[: 4 + 3 * fails] == ["return", *again, *(again if fails else ())]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_one_rank_without_storage_of_keys_brings_all_back(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[int] = []

    def failing_storage(loaded: Any, *args: Any) -> KvStorage:
        if loaded.model.group.rank == 1 and not failed:
            failed.append(1)
            raise RuntimeError("no thread to measure keys in")
        return make_storage(loaded, *args)

    own = builder(wide).with_tensor_parallel(2)
    with ranks_as_threads():
        built = Model(load_parts(own.source, own.settings, read_environment({})))
    async with built as model:
        before = await logprobs(model)
        monkeypatch.setattr(requantization, "make_storage", failing_storage)
        with pytest.raises(ModelLoadError, match="rank 1 of 2 could not do its part: RuntimeError: no thread"):
            await model.re_isq_model(IsqType.Q8_0)
        assert await logprobs(model) == before
        await model.re_isq_model(IsqType.Q8_0)
        assert await logprobs(model) != before


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_cannot_be_brought_back_ends_the_model(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = decoder_layer.load_decoder_layer

    def failing(loader: Any, config: Any, names: Any, layer: int) -> Any:
        if layer == 1:
            raise CheckpointError("the disk is gone")
        monkeypatch.setattr(LOAD_LAYER, lambda loader, config, names, layer: failing(loader, config, names, 1))
        return load(loader, config, names, layer)

    async with builder(wide).build() as model:
        monkeypatch.setattr(LOAD_LAYER, failing)
        with pytest.raises(EngineDeadError, match="the disk is gone") as caught:
            await model.re_isq_model(IsqType.Q8_0)
        assert isinstance(caught.value.__cause__, CheckpointError)
        with pytest.raises(EngineDeadError, match="the disk is gone"):
            await said(model)


async def test_closing_meanwhile(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = []
    begun = anyio.Event()
    load = decoder_layer.load_decoder_layer

    def telling(*args: Any) -> Any:
        anyio.from_thread.run(closed_by_another_task, token=token)
        return load(*args)

    async def closed_by_another_task() -> None:
        begun.set()
        while not is_closed(model):
            await checkpoint()

    async def refused(ask: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(ModelClosedError) as caught:
            await ask()
        errors.append(caught.value)

    async with builder(wide).build() as model:
        token = current_token()
        monkeypatch.setattr(LOAD_LAYER, telling)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refused, lambda: model.re_isq_model(IsqType.Q8_0))
            await begun.wait()
            await model.aclose()
    await refused(lambda: model.re_isq_model(IsqType.Q8_0))
    assert len(errors) == 2


async def test_a_drained_model_does_what_was_asked_before(wide: Path) -> None:
    found: dict[str, object] = {}

    async def note(name: str, act: Callable[[], Awaitable[object]]) -> None:
        found[name] = await act()

    async with builder(wide).build() as model, anyio.create_task_group() as tasks:
        step = Step(model)
        tasks.start_soon(note, "before", lambda: said(model, LONG))
        await until(step.is_done.is_set)
        tasks.start_soon(note, "quantized", lambda: model.re_isq_model(IsqType.Q8_0))
        await until(lambda: num_unheard(model) == 1)
        tasks.start_soon(note, "after", lambda: said(model))
        await until(lambda: num_unheard(model) == 2)
        tasks.start_soon(partial(model.aclose, drain=True))
        await until(lambda: num_unheard(model) == 3)
        step.may_end.set()
    async with builder(wide).build() as before, builder(wide).with_isq(IsqType.Q8_0).build() as quantized:
        expected = {"before": await said(before, LONG), "quantized": None, "after": await said(quantized)}
    assert found == expected


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_files_that_are_others_by_now(tmp_path: Path) -> None:
    path = tiny.make_checkpoint("llama", tmp_path)
    async with builder(path).build() as model:
        before = await said(model)
        tiny.make_checkpoint("llama", tmp_path, seed=1)
        with pytest.raises(CheckpointError, match="is not what it was"):
            await model.re_isq_model(IsqType.Q8_0)
        (path / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="is not what it was"):
            await model.re_isq_model(IsqType.Q8_0)
        assert await said(model) == before


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_files_are_found_from_another_working_directory(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(wide)
    async with builder(Path(".")).build() as model:
        assert model.name == wide.name
        monkeypatch.chdir(tmp_path)
        await model.re_isq_model(IsqType.Q4K)
        async with builder(wide).with_isq(IsqType.Q4K).build() as fresh:
            assert await logprobs(model) == await logprobs(fresh)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_name_of_a_directory_above(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (wide / "below").mkdir()
    monkeypatch.chdir(wide / "below")
    async with builder(Path("..")).build() as model:
        assert model.name == wide.name


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_types_that_are_none(wide: Path) -> None:
    async with builder(wide).build() as model:
        wrong: Any = "Q4K"
        with pytest.raises(ConfigError, match="an IsqType"):
            await model.re_isq_model(wrong)
    async with builder(wide).with_dtype("float64").build() as model:
        with pytest.raises(ConfigError, match="float32, bfloat16 or float16"):
            await model.re_isq_model(IsqType.Q4K)
    async with fake_model("Hello.") as fake:
        await fake.re_isq_model(IsqType.Q4K)
        assert (await fake.send_completion_request("x")).choices[0].text == "Hello."


def test_blocking_code_and_the_drop_in(wide: Path) -> None:
    with BlockingModel(builder(wide).build()) as model:
        before = model.send_completion_request(PROMPT, SHORT)
        model.re_isq_model(IsqType.Q2K)
        assert model.send_completion_request(PROMPT, SHORT).choices != before.choices
    with Runner(Which.Plain(str(wide))) as runner:
        runner.send_re_isq("4")
        with pytest.raises(ConfigError, match="dtype"):
            runner.send_re_isq("Q9")
