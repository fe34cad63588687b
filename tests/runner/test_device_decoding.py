"""Decode on the device: recorded steps, overlapping steps, sampling without the host.

Without CUDA, Triton's interpreter runs the attention, and "recorded" steps are run again as they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from attrs import evolve
from torch import Tensor

pytest.importorskip("triton")

import tiny
from adapter_files import write_adapter
from arrivals import gather
from paged_sdk import (
    CompletionResponse,
    Constraint,
    MemoryGpuConfig,
    Model,
    NumericalError,
    PagedAttentionMeta,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.runner.decode_graphs import DecodeGraphs, batch_sizes, context_bounds
from paged_sdk.runner.device_decoding import DeviceDecoding, Way
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.runner.output import PendingStep, RunnerOutput
from paged_sdk.runner.overlap import OverlapTokens
from paged_sdk.runner.sampled_step import SampledStep
from paged_sdk.runner.step_results import Recorded
from paged_sdk.sampling.device_sampler import Drawn
from paged_sdk.scheduler.output import SchedulerOutput
from paged_sdk.types.step import StepRow
from recorded_steps import Recorder, let_record

CPU: Final = torch.device("cpu")
NEEDS_GPU: Final = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
INTERPRETED: Final = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for CUDA here")
GREEDY: Final = SamplingParams(temperature=0.0, max_len=6, ignore_eos=True)
SMALL: Final = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(512))
PROMPTS: Final = ("What is paging? It is", "What is paging? Nothing", "So", "One two three four five six")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, triton_device: torch.device) -> Recorder:
    """Let engines built in the test take the way for CUDA."""
    recorder = Recorder()
    let_record(monkeypatch, triton_device, recorder)
    return recorder


def small(builder: TextModelBuilder) -> TextModelBuilder:
    return builder.with_paged_attn(SMALL).with_max_num_batched_tokens(13).with_max_num_seqs(4).with_max_model_len(64)


def texts(builder: TextModelBuilder, sampling: SamplingParams, *, together: bool) -> list[list[str]]:
    """Return what a model makes of the prompts, side by side or one after the other."""

    async def send(model: Model) -> list[CompletionResponse]:
        if together:
            return await gather(model, *(model.send_completion_request(prompt, sampling) for prompt in PROMPTS))
        return [await model.send_completion_request(prompt, sampling) for prompt in PROMPTS]

    async def run() -> list[CompletionResponse]:
        async with small(builder).build() as model:
            responses = await send(model)
            assert model.stats().blocks_used == 0
            return responses

    return [[choice.text for choice in response.choices] for response in asyncio.run(run())]


@INTERPRETED
@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.long)])
def test_greedy_texts_are_the_same(
    builder: TextModelBuilder, request: pytest.FixtureRequest, *, together: bool
) -> None:
    expected = texts(builder, GREEDY, together=together)
    recorder: Recorder = request.getfixturevalue("recorder")
    assert texts(builder, GREEDY, together=together) == expected
    # Of 6 tokens, the first comes out of the prompt's last step.
    assert len(recorder.replays) >= 5 if together else len(recorder.replays) == 5 * len(PROMPTS)


@pytest.mark.long
@INTERPRETED
def test_vectors_and_scores_beside_texts_are_the_same(
    builder: TextModelBuilder, request: pytest.FixtureRequest
) -> None:
    """Nothing of them is sampled, and a step under way when they end goes on."""
    short = evolve(GREEDY, max_len=4)

    async def run() -> tuple[list[str], list[Any]]:
        async with small(builder).build() as model:
            said = asyncio.gather(*(model.send_completion_request(prompt, short) for prompt in PROMPTS[:2]))
            last, mean, scores = await gather(
                model, model.embed(PROMPTS, pooling="last"), model.embed(PROMPTS, pooling="mean"), model.score(PROMPTS)
            )
            responses = await said
            assert model.stats().blocks_used == 0
        found = [last.embeddings, mean.embeddings, *(score.logprobs for score in scores.scores)]
        return [response.choices[0].text for response in responses], found

    expected_texts, expected = asyncio.run(run())
    recorder: Recorder = request.getfixturevalue("recorder")
    texts_there, found = asyncio.run(run())
    assert texts_there == expected_texts
    assert recorder.replays
    for own, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, wanted, atol=1e-3)


@INTERPRETED
def test_texts_through_adapters_are_the_same(
    builder: TextModelBuilder, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = tiny.build_model("llama")
    write_adapter(tmp_path / "first", model, seed=1)
    write_adapter(tmp_path / "second", model, seed=2, rank=20, use_dora=True)
    short = evolve(GREEDY, max_len=3)

    async def run() -> list[str]:
        async with small(builder.with_adapter(tmp_path / "first")).with_prefix_cache_n(None).build() as model:
            await model.load_adapter(tmp_path / "second")
            asked = [model.send_completion_request("So", short, adapter=name) for name in (None, "first", "second")]
            return [response.choices[0].text for response in await gather(model, *asked)]

    expected = asyncio.run(run())
    assert len(set(expected)) == 3
    recorder: Recorder = request.getfixturevalue("recorder")
    assert asyncio.run(run()) == expected
    assert len(recorder.replays) >= 2


@INTERPRETED
def test_penalized_texts_through_adapters_that_come_and_go_are_the_same(
    builder: TextModelBuilder, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """An adapter takes the place in the tables that another has had, while texts of a third go on."""
    for seed in range(3):
        write_adapter(tmp_path / str(seed), tiny.build_model("llama"), seed=seed + 1)
    sampling = evolve(GREEDY, max_len=2, presence_penalty=0.5)
    long = evolve(sampling, max_len=9)

    async def run() -> list[str]:
        own = small(builder.with_adapter(tmp_path / "0").with_adapter(tmp_path / "1")).with_prefix_cache_n(None)
        async with own.build() as model:
            going_on = asyncio.ensure_future(model.send_completion_request("So", long, adapter="0"))
            first = await model.send_completion_request("So", sampling, adapter="1")
            await model.unload_adapter("1")
            await model.load_adapter(tmp_path / "2")
            second = await model.send_completion_request("So", sampling, adapter="2")
            return [response.choices[0].text for response in (first, second, await going_on)]

    expected = asyncio.run(run())
    assert expected[0] != expected[1]
    recorder: Recorder = request.getfixturevalue("recorder")
    assert asyncio.run(run()) == expected
    assert len(recorder.replays) >= 4


@INTERPRETED
def test_sampled_texts_do_not_depend_on_their_batch(builder: TextModelBuilder, recorder: Recorder) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=7, max_len=4, ignore_eos=True)
    alone = texts(builder, sampling, together=False)
    assert texts(builder, sampling, together=True) == alone
    assert recorder.replays


@INTERPRETED
@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.long)])
def test_penalized_texts_are_the_same(
    builder: TextModelBuilder, request: pytest.FixtureRequest, *, together: bool
) -> None:
    """With a penalty that favours what there is already, since random weights hardly repeat themselves."""
    sampling = SamplingParams(
        temperature=0.0, repetition_penalty=0.5, frequency_penalty=0.3, presence_penalty=0.2, max_len=9, ignore_eos=True
    )
    expected = texts(builder, sampling, together=together)
    assert expected != texts(builder, evolve(GREEDY, max_len=9), together=together)
    recorder: Recorder = request.getfixturevalue("recorder")
    assert texts(builder, sampling, together=together) == expected
    assert len(recorder.replays) >= 8


@INTERPRETED
def test_penalized_texts_that_are_preempted(builder: TextModelBuilder, request: pytest.FixtureRequest) -> None:
    """A token that was under way is lost: the device has counted it, and chooses it once more."""
    sampling = SamplingParams(temperature=0.0, repetition_penalty=3.0, max_len=20, ignore_eos=True)

    async def run(memory: MemoryGpuConfig) -> tuple[list[str], int]:
        async with small(builder).with_paged_attn(evolve(SMALL, gpu_memory=memory)).build() as model:
            requests = [model.send_completion_request(prompt, sampling) for prompt in PROMPTS[:2]]
            responses = await gather(model, *requests)
            return [response.choices[0].text for response in responses], model.stats().preemptions

    expected, _ = asyncio.run(run(MemoryGpuConfig.ContextSize(512)))
    request.getfixturevalue("recorder")
    found, num_preemptions = asyncio.run(run(MemoryGpuConfig.ContextSize(40)))
    assert found == expected
    assert num_preemptions > 0


@INTERPRETED
def test_logprobs_are_the_same(builder: TextModelBuilder, request: pytest.FixtureRequest) -> None:
    """Of the raw logits, whatever penalties make of them; each text lists as many as it asks for."""
    samplings = [evolve(GREEDY, repetition_penalty=0.5, top_n_logprobs=top_n) for top_n in (3, None, 0, 5)]

    async def run() -> list[CompletionResponse]:
        async with small(builder).build() as model:
            return await gather(model, *map(model.send_completion_request, PROMPTS, samplings))

    expected = asyncio.run(run())
    recorder: Recorder = request.getfixturevalue("recorder")
    found = asyncio.run(run())
    assert recorder.replays
    for response, one, sampling in zip(found, expected, samplings, strict=True):
        assert response.choices[0].text == one.choices[0].text
        assert (response.choices[0].logprobs is None) == (sampling.top_n_logprobs is None)
        compare_logprobs(response, one)


def compare_logprobs(response: CompletionResponse, expected: CompletionResponse) -> None:
    (choice,), (expected_choice,) = response.choices, expected.choices
    if choice.logprobs is None or expected_choice.logprobs is None:
        return
    assert len(choice.logprobs.content) == len(expected_choice.logprobs.content) == 6
    for one, other in zip(choice.logprobs.content, expected_choice.logprobs.content, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [each.token for each in one.top_logprobs] == [each.token for each in other.top_logprobs]
        assert [each.logprob for each in one.top_logprobs] == pytest.approx(
            [each.logprob for each in other.top_logprobs], abs=1e-4
        )


@INTERPRETED
def test_rows_that_need_the_host_beside_rows_that_do_not(builder: TextModelBuilder, recorder: Recorder) -> None:
    """Several choices and a minimum length are the host's; so are constraints, whose tokens are known early enough for
    drafts."""
    constraint = Constraint.regex("so (one|two) of us")
    host = SamplingParams(
        temperature=0.0, repetition_penalty=1.3, top_n_logprobs=2, n_choices=2, max_len=5, ignore_eos=True, min_tokens=2
    )

    async def run() -> tuple[list[CompletionResponse], CompletionResponse]:
        async with small(builder).with_prefix_cache_n(None).build() as model:
            alone = [await model.send_completion_request(PROMPTS[i], each) for i, each in ((0, GREEDY), (1, host))]
            plain, penalized = await gather(
                model,
                model.send_completion_request(PROMPTS[0], GREEDY),
                model.send_completion_request(PROMPTS[1], host),
            )
            assert plain.choices[0].text == alone[0].choices[0].text
            assert [choice.text for choice in penalized.choices] == [choice.text for choice in alone[1].choices]
            num_before = model.stats().steps
            bound, beside = await gather(
                model,
                model.send_completion_request("So", SamplingParams(temperature=0.0), constraint=constraint),
                model.send_completion_request(PROMPTS[0], evolve(GREEDY, max_len=2)),
            )
            assert bound.choices[0].text in ("so one of us", "so two of us")
            num_forced = bound.usage.completion_tokens_details.forced_tokens
            assert 0 < num_forced == model.stats().forced_tokens
            assert model.stats().steps - num_before < bound.usage.completion_tokens
            assert plain.choices[0].text.startswith(beside.choices[0].text)
            return alone, penalized

    _, penalized = asyncio.run(run())
    assert all(choice.logprobs is not None for choice in penalized.choices)
    assert recorder.replays


@INTERPRETED
def test_rows_that_the_host_samples_hold_nobody_up(
    builder: TextModelBuilder, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's tokens of a step are waited for when the next step is submitted, whatever the host samples."""
    biased = evolve(GREEDY, logits_bias={7: 1.0})
    order: list[str] = []
    result, forward = SampledStep.result, DecodeGraphs.forward

    def watched_result(self: SampledStep) -> RunnerOutput:
        order.append("wait")
        return result(self)

    def watched_forward(self: DecodeGraphs, *arguments: Any) -> Recorded:
        order.append("submit")
        return forward(self, *arguments)

    monkeypatch.setattr(SampledStep, "result", watched_result)
    monkeypatch.setattr(DecodeGraphs, "forward", watched_forward)

    async def run() -> None:
        async with small(builder).with_prefix_cache_n(None).build() as model:
            alone = [await model.send_completion_request("So", each) for each in (GREEDY, biased)]
            order.clear()
            together = [model.send_completion_request("So", each) for each in (GREEDY, biased)]
            for one, other in zip(await gather(model, *together), alone, strict=True):
                assert one.choices[0].text == other.choices[0].text

    asyncio.run(run())
    assert "submit wait submit wait submit wait" in " ".join(order)
    assert "wait wait" not in " ".join(order[:-2])


@INTERPRETED
def test_logits_that_are_not_finite_end_their_request_alone(
    builder: TextModelBuilder, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = DecoderModel.logits
    count = 0

    def spoiled(self: DecoderModel, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        nonlocal count
        result = logits(self, hidden, adapted)
        if len(result) == 2:
            count += 1
            if count == 4:
                result[1] = torch.nan
        return result

    monkeypatch.setattr(DecoderModel, "logits", spoiled)

    async def run() -> list[CompletionResponse | BaseException]:
        async with small(builder).build() as model:
            requests = [model.send_completion_request(prompt, GREEDY) for prompt in ("So", "Or")]
            responses = await gather(model, *requests, return_exceptions=True)
            assert model.stats().blocks_used == 0
            return responses

    good, bad = asyncio.run(run())
    assert isinstance(bad, NumericalError)
    assert not isinstance(good, BaseException)
    assert good.usage.completion_tokens == 6


@INTERPRETED
def test_a_step_is_submitted_before_the_last_one_is_waited_for(
    builder: TextModelBuilder, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    result = SampledStep.result
    forward = DecodeGraphs.forward

    def watched_result(self: SampledStep) -> RunnerOutput:
        order.append("wait")
        return result(self)

    def watched_forward(self: DecodeGraphs, *arguments: Any) -> Recorded:
        order.append("submit")
        return forward(self, *arguments)

    monkeypatch.setattr(SampledStep, "result", watched_result)
    monkeypatch.setattr(DecodeGraphs, "forward", watched_forward)

    async def run() -> None:
        async with small(builder).build() as model:
            await model.send_completion_request("So", GREEDY)

    asyncio.run(run())
    # The prompt's step comes first; each decode step is submitted before the step before it is waited for.
    assert order == ["submit", "wait"] * 5 + ["wait"]
    assert recorder.replays == [recorder.replays[0]] * 5


@pytest.mark.long
@INTERPRETED
def test_a_step_without_memory_is_tried_once_more(
    builder: TextModelBuilder, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the one before it is under way, whose tokens count. What steps write that are checked has no effect."""
    draw, count = DeviceDecoding._draw, 0

    def failing(self: DeviceDecoding, *args: Any) -> Drawn:
        nonlocal count
        count += 1
        if count == 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return draw(self, *args)

    async def run() -> list[str]:
        async with small(builder).build() as model:
            requests = [model.send_completion_request(prompt, GREEDY) for prompt in ("So", "Or")]
            responses = await gather(model, *requests)
            assert model.stats().blocks_used == 0
            assert model.stats().preemptions == (2 if count else 0)
            return [response.choices[0].text for response in responses]

    expected = asyncio.run(run())
    recorder.checks = True
    monkeypatch.setattr(DeviceDecoding, "_draw", failing)
    count = 5
    assert asyncio.run(run()) == expected
    assert count > 9


@INTERPRETED
def test_a_text_that_outgrows_a_bound(builder: TextModelBuilder, request: pytest.FixtureRequest) -> None:
    """Steps over longer contexts are others of the same size."""
    sampling = SamplingParams(temperature=0.0, max_len=9, ignore_eos=True)
    prompt = list(range(20))

    async def run() -> str:
        async with small(builder).build() as model:
            return (await model.send_completion_request(prompt, sampling)).choices[0].text

    expected = asyncio.run(run())
    recorder: Recorder = request.getfixturevalue("recorder")
    assert asyncio.run(run()) == expected
    short, long = recorder.replays[0], recorder.replays[-1]
    # Positions 20 to 23 are below the bound of 24, and 24 to 27 are not.
    assert recorder.replays == [short] * 4 + [long] * 4
    assert short != long


def test_sizes_of_recorded_steps() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 3, 4, 6]
    sizes = batch_sizes(256)
    assert sizes[:6] == [1, 2, 3, 4, 8, 12]
    assert sizes[-1] == 256
    for rows in range(1, 257):
        filled_up = next(size for size in sizes if size >= rows)
        assert filled_up < rows + 8 if rows <= 32 else filled_up <= 1.25 * rows


def test_bounds_of_recorded_steps() -> None:
    assert context_bounds(4096) == [4096]
    assert context_bounds(40_960) == [8192, 40_960]
    assert context_bounds(131_072) == [8192, 32_768, 131_072]


def test_tokens_are_handed_on() -> None:
    overlap = OverlapTokens(4, CPU)
    overlap.put([7, 3, 9], torch.tensor([5, -1, 6]))
    assert overlap.tokens[:3].tolist() == [5, 0, 6]
    assert list(overlap.places([7, 3, 9])) == [0, 1, 2]
    assert list(overlap.places([9, 7])) == [2, 0]


@NEEDS_GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_steps_on_a_gpu_are_replayed_and_wait_for_nothing(
    tiny_checkpoint: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    submit, repeat, run = ModelRunner.submit, DeviceDecoding.repeat, DeviceDecoding.run
    num_replayed = num_mixed = 0

    def watched_submit(self: ModelRunner, output: SchedulerOutput) -> PendingStep:
        if any(row.num_new_tokens > 1 for row in output.scheduled):
            return submit(self, output)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return submit(self, output)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def watched_repeat(self: DeviceDecoding, *arguments: Any) -> Drawn:
        nonlocal num_replayed
        num_replayed += 1
        return repeat(self, *arguments)

    def watched_run(self: DeviceDecoding, way: Way, rows: Sequence[StepRow]) -> tuple[Recorded, Sequence[int]]:
        nonlocal num_mixed
        num_mixed += way is Way.MIXED
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(self, way, rows)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    monkeypatch.setattr(ModelRunner, "submit", watched_submit)
    monkeypatch.setattr(DeviceDecoding, "repeat", watched_repeat)
    monkeypatch.setattr(DeviceDecoding, "run", watched_run)
    penalized = evolve(GREEDY, repetition_penalty=1.3, frequency_penalty=0.1, top_n_logprobs=2)
    long = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_len=40, ignore_eos=True)
    builder = TextModelBuilder(tiny_checkpoint).with_dtype(dtype).with_device("cuda")
    with caplog.at_level(logging.INFO, logger="paged_sdk"):
        found = [texts(builder, sampling, together=True) for sampling in (long, penalized, GREEDY)]
    assert "Decode steps of up to 4 rows recorded" in caplog.text
    assert "Steps with prompts of up to 13 tokens recorded" in caplog.text
    assert num_replayed > 30
    assert num_mixed >= 6  # a step or more of prompts for each of three
    assert [len(each) for each in found] == [len(PROMPTS)] * 3
    if dtype == "float32":
        on_cpu = [texts(builder.with_device("cpu"), sampling, together=True) for sampling in (penalized, GREEDY)]
        assert found[1:] == on_cpu


@INTERPRETED
def test_texts_that_outgrow_longropes_trained_context(recorder: Recorder, tmp_path: Path) -> None:
    """A recorded step has the frequencies of each text's length; a text that grows beyond the trained context is
    computed anew, while its steps overlap with others'.
    """
    config: dict[str, Any] = {
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5],
            "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0],
        },
        "original_max_position_embeddings": 12,
    }
    builder = TextModelBuilder(tiny.make_checkpoint("phi3", tmp_path, **config)).with_force_cpu().with_dtype("float32")
    reference: Any = tiny.build_model("phi3", **config)
    prompts = [[(31 * i + 7 * i * i) % 500 for i in range(length)] for length in (11, 15)]
    sampling = evolve(GREEDY, max_len=4, top_n_logprobs=0)

    async def run() -> list[CompletionResponse]:
        async with small(builder).with_max_num_seqs(2).build() as model:
            return await gather(model, *(model.send_completion_request(prompt, sampling) for prompt in prompts))

    for prompt, response in zip(prompts, asyncio.run(run()), strict=True):
        text = list(prompt)
        for _ in range(4):
            with torch.inference_mode():
                text.append(int(reference(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        logprobs = response.choices[0].logprobs
        assert logprobs is not None
        assert [token.token_id for token in logprobs.content] == text[len(prompt) :]
    assert recorder.replays
