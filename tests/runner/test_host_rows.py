"""Rows that the host samples while the next step is under way, on a stand-in for a device."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any, Final

import pytest
import torch
from attrs import evolve
from torch import Tensor

pytest.importorskip("triton")

from arrivals import gather
from paged_sdk import (
    ChatCompletionResponse,
    Constraint,
    MemoryGpuConfig,
    Model,
    NumericalError,
    PagedAttentionMeta,
    RequestBuilder,
    RequestFailedError,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.side_stream import SideStream
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.runner.host_rows import HostRows
from paged_sdk.runner.model_runner import ModelRunner
from paged_sdk.runner.output import FinishedStep, PendingStep, RunnerOutput
from paged_sdk.runner.targets import targets_of
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.sampler import PreparedRows, SampledRows, Sampler
from paged_sdk.scheduler.output import ScheduledSequence, SchedulerOutput
from recorded_steps import Recorder, let_record, let_torch_attend
from sequences import make_sequence

INTERPRETED: Final = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for CUDA here")
NEEDS_GPU: Final = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GREEDY: Final = SamplingParams(temperature=0.0, max_len=8, ignore_eos=True)
HOST: Final = evolve(GREEDY, logits_bias={7: 1.0})


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, triton_device: torch.device) -> Recorder:
    """Let engines built in the test take the way for CUDA."""
    recorder = Recorder()
    let_record(monkeypatch, triton_device, recorder)
    let_torch_attend(monkeypatch)
    return recorder


def asked(text: str, sampling: SamplingParams, constraint: Constraint | None = None) -> RequestBuilder:
    request = RequestBuilder().add_message("user", text).with_sampling(sampling)
    return request if constraint is None else request.with_constraint(constraint)


def said(response: ChatCompletionResponse | BaseException) -> Any:
    if isinstance(response, BaseException):
        return type(response)
    return [
        (
            choice.message.content,
            choice.finish_reason,
            None if choice.logprobs is None else [token.token_id for token in choice.logprobs.content],
        )
        for choice in response.choices
    ]


def answers(builder: TextModelBuilder, requests: Sequence[RequestBuilder], *, context: int = 1024) -> list[Any]:
    """Return what a small model makes of requests that come together."""
    paging = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(context))
    small = builder.with_paged_attn(paging).with_max_num_batched_tokens(24).with_max_num_seqs(6).with_max_model_len(96)

    async def run() -> list[Any]:
        async with small.with_prefix_cache_n(None).build() as model:
            responses = await gather(model, *map(model.send_chat_request, requests), return_exceptions=True)
            assert model.stats().blocks_used == 0
            return list(map(said, responses))

    return asyncio.run(run())


@INTERPRETED
def test_the_next_step_is_submitted_before_the_host_samples(
    builder: TextModelBuilder, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, prepare, sample_later = ModelRunner.submit, HostRows.prepare.__func__, HostRows.sample_later  # type: ignore[attr-defined]
    submitted: list[int] = []  # how many rows each step has
    step_of: dict[int, int] = {}
    num_ahead: list[int] = []

    def watched_submit(self: ModelRunner, output: SchedulerOutput) -> PendingStep:
        submitted.append(len(output.scheduled))
        return submit(self, output)

    def watched_prepare(cls: type[HostRows], *args: Any) -> HostRows:
        made: HostRows = prepare(cls, *args)
        step_of[id(made.prepared)] = len(submitted)
        return made

    def watched_sample(self: HostRows, logits: Tensor, result: RunnerOutput) -> None:
        num_ahead.append(len(submitted) - step_of[id(self.prepared)])
        sample_later(self, logits, result)

    monkeypatch.setattr(ModelRunner, "submit", watched_submit)
    monkeypatch.setattr(HostRows, "prepare", classmethod(watched_prepare))
    monkeypatch.setattr(HostRows, "sample_later", watched_sample)
    requests = [asked("So", evolve(GREEDY, max_len=20)), asked("So", HOST)]
    together = answers(builder, requests)
    assert num_ahead == [1] * 8  # tokens of the host's text
    assert together == [answers(builder, [each])[0] for each in requests]


KINDS: Final = (
    GREEDY,
    *[evolve(GREEDY, max_len=20)] * 3,
    evolve(GREEDY, temperature=0.8, top_p=0.9, seed=3, max_len=14),
    evolve(GREEDY, repetition_penalty=0.7, top_n_logprobs=1),
    HOST,
    evolve(HOST, temperature=0.9, top_p=0.8, seed=5, top_n_logprobs=2),
    evolve(GREEDY, min_tokens=4, max_len=12),  # the host's at first, then the device's
    evolve(GREEDY, temperature=1.2, seed=9, n_choices=2),
    evolve(HOST, stop=("e", "a"), max_len=20),
    evolve(GREEDY, logits_bias=dict.fromkeys(range(512), -float("inf"))),  # fails: every token is banned
)
CONSTRAINTS: Final = (Constraint.regex("so (one|two|three) of us"), Constraint.regex("[a-f]{3,9}"))


@INTERPRETED
@pytest.mark.parametrize("seed", range(3))
def test_texts_are_those_of_an_engine_whose_steps_do_not_overlap(
    builder: TextModelBuilder, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Of requests of all kinds, in an order drawn by lot, with memory for some of them."""
    draw = random.Random(seed)
    requests = [asked(draw.choice(("So", "One two", "What is paging?")), each) for each in KINDS]
    requests += [asked("So", evolve(GREEDY, max_len=16), constraint) for constraint in CONSTRAINTS]
    requests.append(asked("So", GREEDY).with_prediction("So it goes"))
    draw.shuffle(requests)
    submit, sample_later, num_later = ModelRunner.submit, HostRows.sample_later, 0

    def submit_and_wait(self: ModelRunner, output: SchedulerOutput) -> PendingStep:
        return FinishedStep(submit(self, output).result())

    def counted(self: HostRows, logits: Tensor, result: RunnerOutput) -> None:
        nonlocal num_later
        num_later += 1
        sample_later(self, logits, result)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "submit", submit_and_wait)
        expected = answers(builder, requests)
    monkeypatch.setattr(HostRows, "sample_later", counted)
    assert answers(builder, requests, context=168) == expected
    assert num_later > 5
    assert recorder.replays


@INTERPRETED
def test_what_fails_on_the_host_fails_alone(
    builder: TextModelBuilder, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever raises again when it is sampled alone, from the logits as they were."""
    sample = Sampler.sample

    def failing(self: Sampler, logits: Tensor, prepared: PreparedRows) -> SampledRows:
        if any(len(row.token_ids) - row.num_prompt_tokens == 3 for row in prepared.rows) and (
            len(prepared.rows) > 1 or prepared.rows[0].request.sampling.seed == 13
        ):
            logits.zero_()
            raise ValueError("what nobody foresaw")
        return sample(self, logits, prepared)

    requests = [asked("So", evolve(HOST, seed=seed)) for seed in (12, 13)] + [asked("Or", KINDS[1])] * 3
    expected = answers(builder, requests)
    monkeypatch.setattr(Sampler, "sample", failing)
    found = answers(builder, requests)
    assert [found[0], *found[2:]] == [expected[0], *expected[2:]]
    assert found[1] is RequestFailedError


@INTERPRETED
def test_logits_that_are_not_finite_end_a_withheld_text(
    builder: TextModelBuilder, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, num_steps = DecoderModel.logits, 0

    def spoiled(self: DecoderModel, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        nonlocal num_steps
        result = logits(self, hidden, adapted)
        if len(result) == 3:  # as recorded steps are from now on, of which two are of all three texts
            num_steps += 1
            result[0 if num_steps > 3 else slice(0, 0)] = torch.nan
        return result

    requests = [asked("So", HOST), *[asked("Or", evolve(GREEDY, max_len=9))] * 2]
    expected = answers(builder, requests)
    monkeypatch.setattr(DecoderModel, "logits", spoiled)
    found = answers(builder, requests)
    assert found[0] is NumericalError
    assert found[1:] == expected[1:]


@INTERPRETED
def test_texts_that_are_left_while_they_are_withheld(builder: TextModelBuilder, recorder: Recorder) -> None:
    async def run() -> None:
        async with builder.with_max_num_seqs(4).with_max_model_len(96).build() as model:
            long = evolve(GREEDY, max_len=40)
            stays = asyncio.create_task(model.send_chat_request(asked("Or", long)))
            for _ in range(3):
                await leave(model)
            assert said(await stays) == said(await model.send_chat_request(asked("Or", long)))
            assert model.stats().blocks_used == 0

    async def leave(model: Model) -> None:
        async with model.stream_chat_request(asked("So", evolve(HOST, max_len=40))) as stream:
            async for _ in stream:
                return

    asyncio.run(run())


class Watched(Sampler):
    """Keeps which texts it was to sample."""

    def __init__(self) -> None:
        super().__init__(16, torch.device("cpu"), default_processors(16, lambda text: []))
        self.sampled: list[int] = []

    def sample(self, logits: Tensor, prepared: PreparedRows) -> SampledRows:
        self.sampled += [row.seq_id for row in prepared.rows]
        return super().sample(logits, prepared)


def row_of(seq_id: int, start: int = 2, drafts: Sequence[int] = ()) -> ScheduledSequence:
    sequence = make_sequence(seq_id, [1, 2, 3])
    return ScheduledSequence(sequence, start, 1 + len(drafts), 1, [0], 0, list(drafts))


def test_what_has_ended_or_begun_anew_is_not_sampled() -> None:
    sampler = Watched()
    scheduled = [row_of(0), row_of(1, drafts=[4, 5]), row_of(2, drafts=[6]), row_of(3)]
    host = HostRows.prepare(sampler, scheduled, targets_of(scheduled))
    logits = torch.zeros(7, 16)
    logits[range(7), [9, 4, 5, 10, 6, 11, 12]] = 1.0
    before = logits.clone()
    for ended in (0, 2):
        scheduled[ended].sequence.epoch += 1
    result = RunnerOutput(token_ids=[[] for _ in scheduled], logprobs=[None] * 4)
    host.sample_later(logits, result)
    assert sampler.sampled == [1, 1, 1, 3]
    assert result.token_ids == [[], [4, 5, 10], [], [12]]
    assert torch.equal(logits, before)
    for row in scheduled:
        row.sequence.epoch += 1
    host.sample_later(logits, result)
    assert sampler.sampled == [1, 1, 1, 3]


def test_without_a_device_beside_is_in_order() -> None:
    stream = SideStream(torch.device("cpu"))
    with stream.beside(stream.mark()):
        found = torch.ones(3) + 1
    assert found.tolist() == [2.0] * 3


@NEEDS_GPU
def test_the_host_waits_for_what_is_beside_alone() -> None:
    """A kernel that spins is under way all the time."""
    device = torch.device("cuda")
    stream = SideStream(device)
    with stream.beside(stream.mark()):
        torch.zeros(1 << 16, device=device).add_(1)  # kernels are loaded, which may wait for all that is under way
    torch.cuda.synchronize()
    made = torch.arange(1 << 16, device=device) * 3
    mark = stream.mark()
    spin: Any = torch.cuda._sleep  # it has no annotations
    spin(1 << 31)  # a second or more
    with stream.beside(mark):
        found = made.clone().cpu()
    assert not torch.cuda.current_stream().query()
    assert found.tolist() == list(range(0, 3 << 16, 3))
    torch.cuda.synchronize()
