"""Steps for which there is no memory: they are tried once more, and end nothing but their own requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from engine_driver import Driver

from arrivals import gather
from paged_sdk import EngineDeadError, RequestFailedError, SamplingParams, TextModelBuilder
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.runner.output import StepMemoryError
from paged_sdk.runner.step_runner import StepRunner

SHORT = SamplingParams(temperature=0, max_len=8, ignore_eos=True, frequency_penalty=0.3)
PROMPTS = ([1, 2, 3], [4, 5, 6, 7], [8] * 40)


def lack() -> StepMemoryError:
    error = StepMemoryError("no memory for a step of 3 rows")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    return error


def submit(driver: Driver) -> None:
    driver.submit("one", [301, 302, 303])
    driver.submit("two", [304] * 9, n_choices=2)
    driver.submit("three", [305] * 30)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("step", [0, 1, 2, 9])
def test_a_step_is_tried_once_more(smollm2_text: TextProcessor, step: int, *, overlaps: bool) -> None:
    failing = Driver(smollm2_text.tokenizer, overlaps=overlaps, crashes={step: lack()})
    sound = Driver(smollm2_text.tokenizer, overlaps=overlaps)
    for driver in (failing, sound):
        submit(driver)
        driver.run()
        assert driver.kv.usage.used == 0
    assert failing.texts == sound.texts
    assert failing.ends.keys() == sound.ends.keys()
    assert failing.engine.stats().preemptions > 0 == sound.engine.stats().preemptions


def test_requests_end_whose_steps_fail_again(smollm2_text: TextProcessor) -> None:
    """Those that come later do not: theirs are other steps."""
    driver = Driver(smollm2_text.tokenizer, crashes={3: lack(), 4: lack(), 6: lack()})
    submit(driver)
    for _ in range(5):
        driver.step()
    failed = {name for name, end in driver.ends.items() if isinstance(end, RequestFailedError)}
    assert "one" in failed
    assert isinstance(driver.ends["one"].__cause__, torch.OutOfMemoryError)
    later = driver.submit("later", [306, 307])
    driver.run()
    assert later.events[-1].finish_reason == "length"
    assert driver.kv.usage.used == 0


def raise_in_step(monkeypatch: pytest.MonkeyPatch, number: int, error: Exception) -> None:
    """Let the forward pass of a step raise at its end, when KV has been written."""
    forward, count = StepRunner._forward, 0

    def failing(self: StepRunner, *args: Any) -> Any:
        nonlocal count
        count += 1
        made = forward(self, *args)
        if count == number:
            raise error
        return made

    monkeypatch.setattr(StepRunner, "_forward", failing)


async def said(builder: TextModelBuilder) -> list[Any]:
    async with builder.build() as model:
        requests = [model.send_completion_request(prompt, SHORT) for prompt in PROMPTS]
        found = await gather(model, *requests, return_exceptions=True)
        assert model.stats().blocks_used == 0
    return [each if isinstance(each, BaseException) else each.choices[0].text for each in found]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        torch.AcceleratorError(
            "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation"
        ),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        MemoryError(),
    ],
    ids=["device", "host", "library", "pinned", "kernel", "python"],
)
def test_texts_are_the_same_after_a_step_without_memory(
    builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    builder = builder.without_paged_attn() if isinstance(error, MemoryError) else builder
    expected = asyncio.run(said(builder))
    raise_in_step(monkeypatch, 4, error)
    assert asyncio.run(said(builder)) == expected
    assert "its sequences are recomputed" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
    ids=["torch", "triton"],
)
def test_other_errors_of_a_device_end_the_engine(
    builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Every operation fails after them."""
    raise_in_step(monkeypatch, 4, error)
    for found in asyncio.run(said(builder)):
        assert isinstance(found, EngineDeadError)
        assert found.__cause__ is error
