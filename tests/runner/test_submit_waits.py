"""Whether the host waits for a device within ``submit``, which would hold up all texts of the step."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from attrs import evolve
from device_rig import VOCAB, Rig
from test_model_runner import PROMPTS, build, reference
from torch import Tensor

from arrivals import gather
from paged_sdk import MemoryGpuConfig, PagedAttentionMeta, SamplingParams, TextModelBuilder
from paged_sdk.attention import paged
from paged_sdk.chat.text_processor import TextProcessor
from paged_sdk.config.pooling import POOLINGS
from paged_sdk.kernels import placement, transfer
from paged_sdk.kernels.lora import AdaptedRows, Lora, LoraPart, LoraWeights
from paged_sdk.kernels.transfer import HostCopies
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.runner.output import PendingStep
from paged_sdk.runner.prompt_logprobs import add_prompt_logprobs
from paged_sdk.runner.prompt_reader import PromptReader
from paged_sdk.scheduler.output import SchedulerOutput
from paged_sdk.types.reading import PooledVector, PromptScores, Reading
from paged_sdk.types.step import StepRow

# What takes values of a tensor to the host. ``Tensor.numpy`` does too, but only the CPU's have it.
READS: Final = ("cpu", "item", "tolist", "nonzero", "__bool__", "__float__", "__int__")

#: What pins memory where there is a device, what is never on one, and what carries tensors from device to device.
NOT_WATCHED: Final = (transfer.__name__, paged.__name__, placement.__name__)

READINGS: Final[dict[str, Reading]] = {
    "scores": PromptScores(1),
    **{pooling: PooledVector(pooling) for pooling in POOLINGS},
}


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write down when steps are submitted, what is read within that, and when copies are waited for."""
    order: list[str] = []
    submit, wait = ModelRunner.submit, HostCopies.wait
    is_submitting = False

    def watched_submit(self: ModelRunner, output: SchedulerOutput) -> PendingStep:
        nonlocal is_submitting
        if output.scheduled:
            order.append("submit")
        is_submitting = True
        try:
            return submit(self, output)
        finally:
            is_submitting = False

    def watched_wait(self: HostCopies) -> list[Tensor]:
        order.append("wait within submit" if is_submitting else "wait")
        return wait(self)

    def watched(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def watched_read(self: Tensor, *args: Any, **named: Any) -> Any:
            if is_submitting:
                order.append(f"{name} within submit")
            return read(self, *args, **named)

        return watched_read

    move = Tensor.to

    def watched_move(self: Tensor, *args: Any, **named: Any) -> Tensor:
        # From memory that is not pinned, it waits for the device.
        caller = sys._getframe(1).f_globals["__name__"]
        if is_submitting and caller not in NOT_WATCHED and any(isinstance(each, torch.device) for each in args):
            order.append(f"to by {caller} within submit")
        return move(self, *args, **named)

    monkeypatch.setattr(Tensor, "to", watched_move)
    monkeypatch.setattr(ModelRunner, "submit", watched_submit)
    monkeypatch.setattr(HostCopies, "wait", watched_wait)
    for name in READS:
        monkeypatch.setattr(Tensor, name, watched(name, getattr(Tensor, name)))
    return order


def waited_within(order: list[str], rig: Rig) -> list[str]:
    """Run, and return what was waited for within the steps' submissions."""
    rig.run()
    assert [each for each in order if not each.endswith("within submit")][:3] == ["submit", "submit", "wait"]
    return [each for each in order if each.endswith("within submit")]


def test_prompt_logprobs_hold_nobody_up(smollm2_text: TextProcessor, order: list[str]) -> None:
    rig = Rig(smollm2_text.tokenizer, build(reference()))
    for top_n in (0, 3):
        rig.ask(f"top {top_n}", PROMPTS[3], prompt_logprobs=top_n)
    rig.ask("text", PROMPTS[0])
    assert not waited_within(order, rig)
    assert len(rig.heard["top 3"].found["prompt"]) == len(PROMPTS[3]) - 1


@pytest.mark.parametrize("name", list(READINGS))
def test_what_is_read_of_prompts_holds_nobody_up(smollm2_text: TextProcessor, order: list[str], name: str) -> None:
    rig = Rig(smollm2_text.tokenizer, build(reference()))
    for place, prompt in enumerate(PROMPTS[1:4]):
        rig.ask(f"{name} {place}", prompt, READINGS[name])
    rig.ask("text", PROMPTS[0])
    assert not waited_within(order, rig)


def test_the_rows_of_adapters_hold_nobody_up(smollm2_text: TextProcessor, order: list[str]) -> None:
    model = build(reference())
    down, up = (torch.zeros(1, size, dtype=torch.float64) for size in (model.config.hidden_size, VOCAB))
    lora = Lora({}, head=LoraWeights(down, (LoraPart(slice(0, VOCAB), slice(0, 1), up),)))
    used: list[AdaptedRows | None] = []

    class Adapters:
        def rows(self, rows: Sequence[StepRow]) -> AdaptedRows | None:
            lengths = [row.num_new_tokens for row in rows]
            used.append(AdaptedRows.of([lora] * len(rows), lengths, [0] * len(rows), model.device))
            return used[-1]

    rig = Rig(smollm2_text.tokenizer, model)
    adapters: Any = Adapters()
    assert rig.runner._step_runner is not None
    rig.runner._step_runner = evolve(rig.runner._step_runner, adapters=adapters)
    for place, prompt in enumerate(PROMPTS[:2]):
        rig.ask(f"text {place}", prompt)
    # What it takes for a list is in the host's memory.
    assert set(waited_within(order, rig)) == {"tolist within submit"}
    assert None not in used
    assert len(used) > 2


def test_what_is_waited_for_is_seen(
    smollm2_text: TextProcessor, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, where it is there at once."""
    monkeypatch.setattr("paged_sdk.sampling.logprobs.load", lambda: None)  # natively, no tensor is read
    rig = Rig(smollm2_text.tokenizer, build(reference()), overlaps=False)
    rig.ask("logprobs", PROMPTS[1], prompt_logprobs=1)
    rig.ask("scores", PROMPTS[1], READINGS["scores"])
    rig.ask("mean", PROMPTS[1], READINGS["mean"])
    rig.run()
    assert {"__bool__ within submit", "tolist within submit", "wait within submit"} <= set(order)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_gpu_is_not_waited_for(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own account, in what is computed beside tokens."""
    launch, read = add_prompt_logprobs, PromptReader.read
    num_launched = 0

    def unwaited(function: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            nonlocal num_launched
            num_launched += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                function(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    async def found(device: str) -> list[Any]:
        builder = TextModelBuilder(tiny_checkpoint).with_dtype("float32").with_device(device)
        builder = builder.with_paged_attn(PagedAttentionMeta(gpu_memory=MemoryGpuConfig.ContextSize(512)))
        async with builder.with_max_num_batched_tokens(24).with_max_model_len(128).build() as model:
            sampling = SamplingParams(temperature=0.0, max_len=3, prompt_logprobs=3)
            asked = gather(model, *(model.send_completion_request(prompt, sampling) for prompt in PROMPTS))
            scores = await model.score(["What is paging", "It is"])
            vectors = [await model.embed(PROMPTS, pooling=pooling) for pooling in POOLINGS]
            responses = await asked
        logprobs = [response.prompt_logprobs for response in responses]
        assert None not in logprobs
        return [
            *([token.logprob for token in each.content] for each in logprobs if each is not None),
            *(score.logprobs for score in scores.scores),
            *(vector for each in vectors for vector in each.embeddings),
        ]

    expected = asyncio.run(found("cpu"))
    monkeypatch.setattr("paged_sdk.runner.step_runner.add_prompt_logprobs", unwaited(launch))
    monkeypatch.setattr(PromptReader, "read", unwaited(read))
    for own, wanted in zip(asyncio.run(found("cuda")), expected, strict=True):
        np.testing.assert_allclose(own, wanted, atol=1e-3)
    assert num_launched
