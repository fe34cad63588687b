"""An image that is being encoded holds nobody up but the request that shows it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import pytest
from attrs import define, field

from paged_sdk import (
    MemoryGpuConfig,
    ModelClosedError,
    PagedAttentionMeta,
    RequestBuilder,
    RequestTimeoutError,
    SamplingParams,
    TextMessages,
    VisionMessages,
    VisionModelBuilder,
)
from paged_sdk.vision.encoder import EncodedImage, ImageEncoder
from tiny_vision import make_vision_checkpoint, picture

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

TEXT = RequestBuilder.from_messages(TextMessages().add_message("user", "Hello")).with_sampling(
    SamplingParams(temperature=0.0, max_len=40, ignore_eos=True)
)


def shows(seed: int) -> RequestBuilder:
    messages = VisionMessages().add_image_message("user", "What is this?", picture(40, 60, seed=seed))
    return RequestBuilder.from_messages(messages).with_sampling(SamplingParams(temperature=0.0, max_len=4))


@define
class HeldEncoder:
    """Encodes nothing until it may.

    :ivar begun: how many images were begun
    :ivar ended: how many of them were encoded or abandoned
    """

    may_go_on: threading.Event = field(factory=threading.Event)
    begun: list[int] = field(factory=list)
    ended: list[str] = field(factory=list)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldEncoder]:
    encoder, encode = HeldEncoder(), ImageEncoder.encode

    def wait_and_encode(self: ImageEncoder, inputs: Any, before_layer: Any) -> EncodedImage:
        encoder.begun.append(1)
        try:
            while not encoder.may_go_on.wait(0.001):
                before_layer()
            made = encode(self, inputs, before_layer)
        except BaseException as error:
            encoder.ended.append(type(error).__name__)
            raise
        encoder.ended.append("encoded")
        return made

    monkeypatch.setattr(ImageEncoder, "encode", wait_and_encode)
    yield encoder
    encoder.may_go_on.set()


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> VisionModelBuilder:
    directory = tmp_path_factory.mktemp("llava")
    make_vision_checkpoint("llava", directory)
    meta = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(1024))
    return VisionModelBuilder(directory).with_dtype("float32").with_paged_attn(meta)


async def until(condition: Any) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_texts_go_on(builder: VisionModelBuilder, held: HeldEncoder, anyio_backend: str) -> None:
    async with builder.build() as model, anyio.create_task_group() as tasks:
        answers: list[str | None] = []

        async def ask(seed: int) -> None:
            answers.append((await model.send_chat_request(shows(seed))).choices[0].message.content)

        for seed in (0, 0, 1):
            tasks.start_soon(ask, seed)
        await until(lambda: model.stats().awaiting_images == 3)
        before = model.stats()
        assert (before.waiting, before.running, before.blocks_used) == (3, 0, 0)
        for _ in range(2):  # a text comes while there is nothing else to compute
            response = await model.send_chat_request(TEXT)
            assert response.usage.completion_tokens == 40
        after = model.stats()
        # Each step gave the text a token: the images took none of its steps.
        assert after.steps - before.steps <= 2 * (40 + 1)
        assert after.awaiting_images == 3
        assert not answers
        held.may_go_on.set()
        await until(lambda: len(answers) == 3)
        assert len(held.begun) == 2  # of two requests with one image, it was encoded once
        assert len(set(answers)) == 2
        assert model.stats().awaiting_images == model.stats().waiting == 0


async def test_requests_that_leave(builder: VisionModelBuilder, held: HeldEncoder, anyio_backend: str) -> None:
    async with builder.build() as model:
        timeout, num_begun = 0.05, 0
        while not held.begun:  # on a busy machine the time may be over before the image is begun
            with pytest.raises(RequestTimeoutError):
                await model.send_chat_request(shows(0).with_timeout(timeout))
            await until(lambda: len(held.ended) == len(held.begun))
            timeout *= 2
        num_begun = len(held.begun)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(model.send_chat_request, shows(1))
            await until(lambda: len(held.begun) > num_begun)
            tasks.cancel_scope.cancel()
        async with model.stream_chat_request(shows(2)):
            pass
        await until(lambda: not model.stats().waiting)
        held.may_go_on.set()
        assert (await model.send_chat_request(shows(3))).usage.completion_tokens
        assert held.ended[-1] == "encoded"
        assert set(held.ended[:-1]) == {"AbandonedError"}


async def test_closing(builder: VisionModelBuilder, held: HeldEncoder, anyio_backend: str) -> None:
    model = await builder.build()
    errors = []

    async def ask() -> None:
        try:
            await model.send_chat_request(shows(0))
        except ModelClosedError as error:
            errors.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: held.begun)
        await model.aclose()
    assert held.ended == ["AbandonedError"]
    assert not [thread for thread in threading.enumerate() if thread.name == "paged-sdk-images"]


async def test_closing_with_a_drain(builder: VisionModelBuilder, held: HeldEncoder, anyio_backend: str) -> None:
    model = await builder.build()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(model.send_chat_request, shows(0))
        await until(lambda: held.begun)
        tasks.start_soon(partial(model.aclose, drain=True))
        await anyio.lowlevel.checkpoint()
        held.may_go_on.set()
    assert held.ended == ["encoded"]
