"""A pinned prefix stays in the pool, whatever else is computed, until it is released."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from adapter_files import write_adapter
from arrivals import obeyed
from paged_sdk import (
    BlockingModel,
    ContextLengthError,
    InvalidRequestError,
    IsqType,
    Model,
    ModelClosedError,
    NumericalError,
    PagedAttentionMeta,
    PagedCacheType,
    PinLimitError,
    RequestBuilder,
    RequestTimeoutError,
    SamplingParams,
    TextModelBuilder,
    VisionMessages,
    VisionModelBuilder,
)
from paged_sdk.build.assembly import load_parts
from paged_sdk.chat.renderer import Interruption
from paged_sdk.config.env import read_environment
from paged_sdk.kernels.native.library import why_not
from paged_sdk.testing import fake_model
from pinning import BLOCK, MESSAGES, SYSTEM, answer, asked, cached, fill, pooled
from rank_threads import ranks_as_threads
from talk import until
from tiny_vision import make_vision_checkpoint, picture

pytestmark = pytest.mark.anyio

FAMILIES = ("llama", "mistral", "gemma3_text")
"""mistral has a window of 32 tokens in every layer, gemma3 in some."""
MODES = ("paged", "FP8", "two ranks")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint("llama", tmp_path_factory.mktemp("pins"))


def opened(builder: TextModelBuilder) -> Model:
    """Build a model whose ranks, if it has several, are threads."""
    with ranks_as_threads():
        return Model(load_parts(builder.source, builder.settings, read_environment({})))


@pytest.mark.parametrize(
    ("family", "mode"), [*((family, "paged") for family in FAMILIES), *(("llama", mode) for mode in MODES[1:])]
)
async def test_it_is_found_however_much_else_is_computed(family: str, mode: str, tmp_path: Path) -> None:
    builder = pooled(
        tiny.make_checkpoint(family, tmp_path),
        cache_type=PagedCacheType.F8E4M3 if mode == "FP8" else PagedCacheType.AUTO,
    ).with_tensor_parallel(2 if mode == "two ranks" else 1)
    async with opened(builder) as model:
        assert model.config.sliding_window == (32 if family == "mistral" else None)
        text, found = await answer(model)
        await fill(model)
        assert (await answer(model), found) == ((text, 0), 0)
        await fill(model)
        async with await model.pin(MESSAGES) as pin:
            assert pin.num_tokens >= 100
            assert pin.num_tokens == model.stats().blocks_pinned * BLOCK
            await fill(model, seed=1)
            assert await answer(model) == (text, pin.num_tokens)
            # A sequence with a window frees what is outside of it; the pin keeps all.
            await fill(model, seed=2)
            assert await answer(model, asked("And the other?")) != (text, pin.num_tokens)
            assert await cached(model, asked("And the other?")) >= pin.num_tokens
            assert model.stats().blocks_used == model.stats().blocks_pinned
            assert not pin.is_released
        assert pin.is_released
        assert model.stats().blocks_pinned == model.stats().blocks_used == 0
        await fill(model)
        assert await answer(model) == (text, 0)


async def test_what_is_cached_is_not_computed_again_when_it_is_pinned(checkpoint: Path) -> None:
    async with pooled(checkpoint).build() as model:
        await answer(model)
        before = model.stats().prompt_tokens
        async with await model.pin(MESSAGES) as pin:
            assert model.stats().prompt_tokens - before <= BLOCK
            async with await model.pin(asked()) as longer:  # which shares all but its own blocks
                assert model.stats().blocks_pinned * BLOCK == longer.num_tokens > pin.num_tokens


async def test_two_that_are_pinned_at_once_are_computed_once(checkpoint: Path) -> None:
    async with pooled(checkpoint).build() as model:
        pins = []

        async def pin() -> None:
            pins.append(await model.pin(MESSAGES))

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(pin)
        num_tokens = pins[0].num_tokens
        assert model.stats().prompt_tokens < 2 * num_tokens
        assert model.stats().blocks_pinned * BLOCK == num_tokens
        for place, each in enumerate(pins):
            await fill(model, seed=place)
            assert await cached(model) == num_tokens
            await each.aclose()
            await each.aclose()
        assert model.stats().blocks_pinned == 0


@pytest.mark.parametrize(
    "messages",
    [
        asked(),
        [{"role": "user", "content": SYSTEM}],
        [*MESSAGES, {"role": "user", "content": "Which one?"}, {"role": "assistant", "content": "The first of them."}],
    ],
    ids=["question", "question alone", "answer"],
)
async def test_whatever_the_last_message_is_its_continuations_find_it(checkpoint: Path, messages: object) -> None:
    begun = messages if isinstance(messages, RequestBuilder) else RequestBuilder.from_messages(messages)  # type: ignore[arg-type]
    text = "".join(message.content for message in begun.messages)
    async with pooled(checkpoint).build() as model:
        num_text_tokens = len(await model.tokenize(text))
        pin = await model.pin(begun)
        assert pin.num_tokens > num_text_tokens - BLOCK
        await model.reset_prefix_cache()  # so that only what is pinned is found
        ends = begun.messages[-1].role.value == "user"
        longer = begun.add_message("assistant", "A village.") if ends else begun
        assert await cached(model, longer.add_message("user", "Why?")) == pin.num_tokens
        if ends:
            assert await cached(model, begun) >= pin.num_tokens


async def test_a_prefix_of_less_than_a_block_is_pinned_as_nothing(checkpoint: Path) -> None:
    builder = pooled(checkpoint).with_paged_attn(PagedAttentionMeta(block_size=32))
    async with builder.build() as model, await model.pin([{"role": "system", "content": "Be brief."}]) as pin:
        assert pin.num_tokens == 0 == model.stats().blocks_pinned


async def test_what_it_is_computed_with_counts(checkpoint: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny.build_model("llama"))

    def weather(city: str) -> str:
        """Return the weather."""
        return city

    template = "{{ (tools or []) | tojson }}{# <tool_call> #}" + tiny.CHAT_TEMPLATE
    async with pooled(checkpoint, longest=512).with_adapter(adapter).with_chat_template(template).build() as model:
        for with_what in ({"adapter": "adapter"}, {"cache_salt": "tenant"}, {"tools": [weather]}):
            system = RequestBuilder().add_message("system", SYSTEM)
            for name, value in with_what.items():
                system = getattr(system, f"with_{name}")(value)
            async with await model.pin(system) as pin:
                await model.reset_prefix_cache()
                assert await cached(model) < pin.num_tokens
                assert await cached(model, asked(**with_what)) == pin.num_tokens


async def test_unloading_an_adapter_releases_its_pins(checkpoint: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny.build_model("llama"))
    async with pooled(checkpoint).with_adapter(adapter).build() as model:
        other = await model.pin(MESSAGES)
        pin = await model.pin(RequestBuilder().add_message("system", SYSTEM).with_adapter("adapter"))
        with anyio.fail_after(20):
            await model.unload_adapter("adapter")
        await until(lambda: pin.is_released)
        assert not other.is_released
        await until(lambda: model.stats().blocks_pinned * BLOCK == other.num_tokens)
        await pin.aclose()


async def test_images_are_pinned_with_their_text(tmp_path: Path) -> None:
    make_vision_checkpoint("qwen2_vl", tmp_path)
    builder = VisionModelBuilder(tmp_path).with_dtype("float32").with_force_cpu().with_num_threads(1)
    messages = VisionMessages().add_image_message("user", "What is this? " * 8, [picture(40, 60)])
    other = VisionMessages().add_image_message("user", "What is this? " * 8, [picture(40, 60, seed=1)])
    async with builder.build() as model, await model.pin(messages) as pin:
        worker: Any = model._worker
        assert not worker._engine._images._wants  # whose memory other images need
        await model.reset_prefix_cache()
        sampling = SamplingParams(temperature=0.0, max_len=4)
        assert pin.num_tokens > 0
        question = RequestBuilder.from_messages(messages).with_sampling(sampling)
        assert await cached(model, question) == pin.num_tokens
        assert await cached(model, RequestBuilder.from_messages(other).with_sampling(sampling)) < pin.num_tokens


async def drop(model: Model) -> None:
    pin = await model.pin(MESSAGES)
    assert model.stats().blocks_pinned * BLOCK == pin.num_tokens


async def test_one_that_is_dropped_is_released(checkpoint: Path) -> None:
    async with pooled(checkpoint).build() as model:
        await drop(model)
        gc.collect()
        await obeyed(model)
        assert model.stats().blocks_pinned == model.stats().blocks_used == 0


@pytest.mark.parametrize("drain", [False, True])
async def test_closing_the_model_releases_it(checkpoint: Path, drain: bool) -> None:
    model = await pooled(checkpoint).build()
    pin = await model.pin(MESSAGES)
    with anyio.fail_after(20):
        await model.aclose(drain=drain)
    assert model.stats().blocks_pinned == model.stats().blocks_used == 0
    await until(lambda: pin.is_released)
    await pin.aclose()
    with pytest.raises(ModelClosedError):
        await model.pin(MESSAGES)


async def test_who_gives_up_while_it_is_computed_leaves_nothing(checkpoint: Path) -> None:
    async with pooled(checkpoint).with_max_num_batched_tokens(4).build() as model:
        with anyio.CancelScope() as scope:

            async def give_up() -> None:
                await until(lambda: model.stats().running == 1)
                scope.cancel()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(give_up)
                await model.pin(MESSAGES)
        await until(lambda: model.stats().running == 0)
        await obeyed(model)
        assert model.stats().blocks_used == 0
        with pytest.raises(RequestTimeoutError):
            await model.pin(RequestBuilder().add_message("system", SYSTEM).with_timeout(1e-9))


async def test_the_pool_is_never_pinned_as_a_whole(checkpoint: Path) -> None:
    async with pooled(checkpoint).build() as model:  # 160 blocks, of which one sequence takes 64
        pins = [await model.pin([{"role": "system", "content": f"{place} {SYSTEM}"}]) for place in range(3)]
        num_pinned = model.stats().blocks_pinned
        with pytest.raises(
            PinLimitError, match=r"more blocks of 4 tokens, and \d+ of the 96 that may be pinned"
        ) as caught:
            await model.pin([{"role": "system", "content": f"4 {SYSTEM}"}])
        assert (caught.value.num_pinned, caught.value.limit) == (num_pinned, 96)
        assert caught.value.num_pinned + caught.value.num_blocks > 96
        longest = [7] * (model.max_sequence_length - 1)
        response = await model.send_completion_request(longest, SamplingParams(temperature=0.0, max_len=1))
        assert response.usage.prompt_tokens == 255
        assert model.stats().blocks_pinned == num_pinned
        await pins.pop().aclose()
        pins.append(await model.pin([{"role": "system", "content": f"4 {SYSTEM}"}]))
        with pytest.raises(
            ContextLengthError, match=r"255 fit \(.*\): shorten it(, or give the KV pool more memory)?$"
        ):
            await model.pin([{"role": "system", "content": SYSTEM * 3}])  # pins are not truncated


async def test_a_single_long_sequence_gets_the_room_of_pins_in_a_small_pool(checkpoint: Path) -> None:
    async with pooled(checkpoint, tokens=240).build() as model:  # 60 blocks, half of which may be pinned
        text, _ = await answer(model)
        pin = await model.pin(MESSAGES)
        response = await model.send_completion_request([7] * 200, SamplingParams(max_len=56, ignore_eos=True))
        assert response.choices[0].finish_reason == "length"
        assert response.usage.total_tokens > 240  # all of the pool
        assert model.stats().preemptions == 1
        await until(lambda: model.stats().blocks_pinned * BLOCK == pin.num_tokens)
        assert await answer(model) == (text, pin.num_tokens)


async def test_it_stays_when_the_cache_is_reset(checkpoint: Path) -> None:
    async with pooled(checkpoint).build() as model:
        text, _ = await answer(model)
        pins = [await model.pin(MESSAGES), await model.pin(asked())]
        await model.reset_prefix_cache()
        assert model.stats().blocks_cached == 0
        assert await answer(model) == (text, pins[1].num_tokens)
        await pins[1].aclose()
        await model.reset_prefix_cache()
        assert await answer(model) == (text, pins[0].num_tokens)


@pytest.mark.skipif(why_not() is not None, reason=f"native kernels: {why_not()}")
async def test_it_is_computed_again_with_new_weights(tmp_path: Path) -> None:
    wide = tiny.make_checkpoint("llama", tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    async with pooled(wide).build() as model:
        pin = await model.pin(MESSAGES)
        await model.re_isq_model(IsqType.Q4K)
        text, found = await answer(model)
        assert found == pin.num_tokens
        await fill(model)
        assert await answer(model) == (text, pin.num_tokens)
    async with pooled(wide).with_isq(IsqType.Q4K).build() as model:
        assert await answer(model) == (text, 0)


async def test_it_is_read_from_the_directory_of_the_prefix_cache(checkpoint: Path, tmp_path: Path) -> None:
    builder = pooled(checkpoint).with_prefix_cache_dir(tmp_path / "kept")
    async with builder.build() as model, await model.pin(MESSAGES):
        text, _ = await answer(model)
    async with builder.build() as model, await model.pin(MESSAGES) as pin:
        assert model.stats().prefix_restored >= pin.num_tokens
        assert model.stats().prompt_tokens <= BLOCK
        await fill(model)
        said, found = await answer(model)
        assert said == text
        assert found >= pin.num_tokens


# A system prompt that is part of the first question, and no two turns of one role after each other.
PICKY = (
    "{% set said = messages[0].content + '\\n' if messages[0].role == 'system' else '' %}"
    "{% for message in messages[1:] if said %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' + (said if loop.first else '') + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


async def test_a_template_may_put_the_system_prompt_into_the_first_question(checkpoint: Path) -> None:
    async with pooled(checkpoint).with_chat_template(PICKY).build() as model:
        for begun in (RequestBuilder.from_messages(MESSAGES), asked(), asked().add_message("assistant", "The first.")):
            async with await model.pin(begun) as pin:
                assert pin.num_tokens >= 96
                await model.reset_prefix_cache()
                ends = begun.messages[-1].role.value == "user"
                assert await cached(model, begun if ends else begun.add_message("user", "Why?")) == pin.num_tokens


async def test_it_needs_paged_attention_and_a_prefix_cache(checkpoint: Path) -> None:
    for builder, why in (
        (pooled(checkpoint).without_paged_attn(), "with paged attention"),
        (pooled(checkpoint).with_prefix_cache_n(None), "with_prefix_cache_n"),
    ):
        async with builder.build() as model:
            with pytest.raises(InvalidRequestError, match=f"cannot be pinned: .*{why}"):
                await model.pin(MESSAGES)


async def test_a_model_for_tests_pins_too() -> None:
    async with fake_model("Yes.", "No.") as model, await model.pin(MESSAGES) as pin:
        assert pin.num_tokens == model.stats().blocks_pinned * model.config.block_size > 0
        response = await model.send_chat_request(asked())
        assert response.choices[0].message.content == "Yes."
        assert response.usage.prompt_tokens_details.cached_tokens == pin.num_tokens
        assert len(model.requests) == 1  # a pin takes no reply


@pytest.mark.skipif(why_not() is not None, reason=f"native kernels: {why_not()}")
async def test_a_nan_in_a_request_that_shares_it_has_it_computed_again(tmp_path: Path) -> None:
    directory = tiny.make_checkpoint("llama", tmp_path)
    weights = load_file(directory / "model.safetensors")
    broken = 511
    weights["model.embed_tokens.weight"][broken] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    async with pooled(directory).build() as model:
        prefix = asked()
        pin = await model.pin(prefix)
        text, found = await answer(model)
        assert found >= pin.num_tokens
        computed = model.stats().prompt_tokens
        tokens = list(model._preparer.encode_chat(prefix.messages, prefix.options, Interruption()).token_ids)
        with pytest.raises(NumericalError):
            await model.send_completion_request([*tokens, broken, 7], SamplingParams(max_len=2))
        await until(lambda: model.stats().blocks_pinned * BLOCK == pin.num_tokens)
        assert model.stats().prompt_tokens >= computed + pin.num_tokens
        await fill(model)
        assert await answer(model) == (text, found - found % BLOCK)


async def test_it_is_released_from_another_event_loop(checkpoint: Path) -> None:
    async with pooled(checkpoint).build() as model:
        pin = await model.pin(MESSAGES)
        await anyio.to_thread.run_sync(partial(anyio.run, pin.aclose))
        assert pin.is_released
        await until(lambda: model.stats().blocks_pinned == 0)


def test_synchronous_code_pins_too(checkpoint: Path) -> None:
    with BlockingModel(pooled(checkpoint).build()) as model:
        with model.pin(MESSAGES) as pin:
            assert pin.num_tokens == model.stats().blocks_pinned * BLOCK >= 100
            assert not pin.is_released
        assert pin.is_released
        assert model.stats().blocks_pinned == 0
        left = model.pin(MESSAGES)
    left.close()
