"""Recorded steps with chunks of prompts: what they compute is what the same steps are when they are launched."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from attrs import evolve
from torch import Tensor

pytest.importorskip("triton")

import tiny
from adapter_files import write_adapter
from arrivals import Step, gather, num_unheard, wait_for_requests
from paged_sdk import (
    CompletionResponse,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    PagedCacheType,
    RequestBuilder,
    SamplingParams,
    TextMessageRole,
    TextModelBuilder,
)
from paged_sdk.attention.pool_settings import PoolSettings
from paged_sdk.attention.triton_paged import TritonPagedBackend
from paged_sdk.runner.device_decoding import DeviceDecoding, Way
from paged_sdk.runner.mixed_graphs import MixedGraphs, token_counts
from paged_sdk.runner.recordable_layers import RecordableLayers
from paged_sdk.runner.step_results import StepResults
from paged_sdk.scheduler.output import ScheduledSequence
from paged_sdk.types.step import AWAITED, StepRow
from recorded_steps import ATTENDING, Attending, Recorder, let_record, let_torch_attend
from spans import span
from talk import until

CPU: Final = torch.device("cpu")
INTERPRETED: Final = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for CUDA here")
GREEDY: Final = SamplingParams(temperature=0.0, max_len=6, ignore_eos=True)
PROMPTS: Final = tuple([(7 * i * i + 3 * length) % 500 for i in range(length)] for length in (3, 20, 9, 14, 1))
SMALL: Final = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(512))


async def together(model: Model, samplings: Sequence[SamplingParams]) -> list[CompletionResponse]:
    asked = zip(PROMPTS, [*samplings, *[GREEDY] * len(PROMPTS)], strict=False)
    return await gather(model, *(model.send_completion_request(prompt, sampling) for prompt, sampling in asked))


def said(responses: Sequence[CompletionResponse]) -> list[Any]:
    """Return what was chosen, with the rounded logprobs."""
    return [
        (
            choice.text,
            choice.finish_reason,
            None
            if choice.logprobs is None
            else [(token.token_id, round(token.logprob, 4)) for token in choice.logprobs.content],
        )
        for response in responses
        for choice in response.choices
    ]


async def greedy(model: Model) -> list[Any]:
    return said(await together(model, ()))


async def sampled(model: Model) -> list[Any]:
    """Penalties and logprobs on the device, drawn tokens, and rows that the host samples, several choices of one."""
    drawn = evolve(GREEDY, temperature=0.8, top_p=0.9, seed=5)
    penalized = evolve(GREEDY, repetition_penalty=1.3, top_n_logprobs=2)
    several = evolve(GREEDY, temperature=0.7, seed=3, n_choices=2, min_tokens=2)
    return said(await together(model, (drawn, penalized, several, evolve(GREEDY, prompt_logprobs=1))))


async def shared(model: Model) -> list[Any]:
    """One prompt is the beginning of others, which are asked for beside it and after it."""
    tails: list[list[int]] = [[], [4], [9, 9, 9], list(range(12))]
    found = await gather(
        model, *(model.send_completion_request([*PROMPTS[1], *tail], evolve(GREEDY, max_len=9)) for tail in tails)
    )
    again = await gather(model, *(model.send_completion_request([*PROMPTS[1], *tail], GREEDY) for tail in tails))
    assert model.stats().prefix_hits > 0
    return said([*found, *again])


async def drafted(model: Model) -> list[Any]:
    """A text that is predicted has drafts, which the host judges, beside prompts and texts without."""
    message = RequestBuilder().add_message(TextMessageRole.USER, "So").with_sampling(evolve(GREEDY, max_len=8))
    expected = (await model.send_chat_request(message)).choices[0].message.content
    assert expected is not None
    predicted, *others = await gather(model, model.send_chat_request(message.with_prediction(expected)), greedy(model))
    return [predicted.choices[0].message.content, *others]


async def read(model: Model) -> list[Any]:
    """Vectors and scores are read of prompts, some of several chunks, beside texts."""
    texts, mean, first, scores = await gather(
        model,
        greedy(model),
        model.embed(PROMPTS[:2], pooling="mean"),
        model.embed([[*PROMPTS[1], 3, 5]], pooling="cls"),
        model.score(["What is paging"]),
    )
    vectors = [vector.round(3).tolist() for found in (mean, first) for vector in found.embeddings]
    return [texts, vectors, scores.scores[0].logprobs.round(3).tolist()]


SCENES: Final[dict[str, Callable[[Model], Awaitable[list[Any]]]]] = {
    "greedy": greedy,
    "sampled": sampled,
    "shared prefixes": shared,
    "drafts": drafted,
    "vectors and scores": read,
}
SETTINGS: Final[dict[str, Callable[[TextModelBuilder], TextModelBuilder]]] = {
    "plain": lambda builder: builder,
    "FP8": lambda builder: builder.with_paged_attn(evolve(SMALL, cache_type=PagedCacheType.F8E4M3)),
    "little memory": lambda builder: builder.with_paged_attn(evolve(SMALL, gpu_memory=MemoryGpuConfig.ContextSize(64))),
    "no prefix cache": lambda builder: builder.with_prefix_cache_n(None),
}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Let engines built in the test take the way for CUDA, but for the kernels."""
    recorder = Recorder()
    let_record(monkeypatch, CPU, recorder)
    let_torch_attend(monkeypatch)
    return recorder


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter[Way]:
    """Count how steps are run."""
    found: Counter[Way] = Counter()
    way = DeviceDecoding.way

    def watched(self: DeviceDecoding, scheduled: Sequence[ScheduledSequence]) -> Way:
        chosen = way(self, scheduled)
        found[chosen] += bool(scheduled)
        return chosen

    monkeypatch.setattr(DeviceDecoding, "way", watched)
    return found


def run(builder: TextModelBuilder, scene: Callable[[Model], Awaitable[list[Any]]]) -> list[Any]:
    async def run() -> list[Any]:
        async with builder.build() as model:
            found = await scene(model)
            assert model.stats().blocks_used == 0
            return found

    return asyncio.run(run())


def small(builder: TextModelBuilder) -> TextModelBuilder:
    return builder.with_paged_attn(SMALL).with_max_num_batched_tokens(13).with_max_num_seqs(4).with_max_model_len(64)


@pytest.mark.parametrize(
    ("scene", "setting"),
    [
        ("greedy", "plain"),
        ("sampled", "FP8"),
        ("shared prefixes", "plain"),
        ("shared prefixes", "FP8"),
        ("drafts", "no prefix cache"),
        ("vectors and scores", "plain"),
        ("greedy", "little memory"),
    ],
)
def test_steps_with_prompts_are_the_same_recorded(
    builder: TextModelBuilder, recorder: Recorder, ways: Counter[Way], scene: str, setting: str
) -> None:
    own = SETTINGS[setting](small(builder))
    expected = run(own, SCENES[scene])
    assert ways[Way.LAUNCHED] > 2
    assert not recorder.mixed
    ways.clear()
    recorder.counts = (4, 9, 13)
    assert run(own, SCENES[scene]) == expected
    assert ways[Way.MIXED] == len(recorder.mixed) > 2
    assert ways[Way.LAUNCHED] == 0
    assert set(recorder.mixed) <= {4, 9, 13}


def test_short_prompts_that_keep_arriving_leave_no_step_to_be_launched(
    builder: TextModelBuilder, recorder: Recorder, ways: Counter[Way]
) -> None:
    """One text is generated while nine short prompts come and go."""
    recorder.counts = (13,)

    async def scene(model: Model) -> list[Any]:
        step = Step(model)
        long = asyncio.create_task(model.send_completion_request(PROMPTS[0], evolve(GREEDY, max_len=40)))
        short = []
        for number in range(9):
            await until(step.is_done.is_set)
            prompt = [number, 5, 6, 7]
            short.append(asyncio.create_task(model.send_completion_request(prompt, evolve(GREEDY, max_len=2))))
            await until(lambda: num_unheard(model) == 1)
            ended, step = step, Step(model, 3)  # by then it has its tokens
            ended.may_end.set()
        step.may_end.set()
        await asyncio.gather(*short)
        return said([await long])

    run(small(builder), scene)
    assert ways[Way.LAUNCHED] == 0
    assert ways[Way.MIXED] >= 9


def test_31_decodes_beside_a_prompt_of_64_tokens_in_every_step(
    builder: TextModelBuilder, recorder: Recorder, ways: Counter[Way]
) -> None:
    """The budget leaves room for one such prompt, and four wait at any time: a step is one replay."""
    recorder.counts = tuple(token_counts(95))
    own = builder.with_max_num_batched_tokens(95).with_max_num_seqs(35).with_max_model_len(128)
    own = own.with_paged_attn(evolve(SMALL, gpu_memory=MemoryGpuConfig.ContextSize(8192)))
    long, short = evolve(GREEDY, max_len=16), evolve(GREEDY, max_len=1)

    async def scene(model: Model) -> list[Any]:
        wait_for_requests(model, 31)
        step = Step(model)
        texts = asyncio.gather(*(model.send_completion_request([number, 1, 2], long) for number in range(31)))
        await until(step.is_done.is_set)
        prompts = [[number, *range(100, 163)] for number in range(8)]
        answers = asyncio.gather(*(model.send_completion_request(prompt, short) for prompt in prompts))
        await until(lambda: num_unheard(model) == 8)
        step.may_end.set()
        await answers
        await texts
        return []

    run(own.with_prefix_cache_n(None), scene)
    assert ways[Way.LAUNCHED] == 0
    assert recorder.mixed.count(95) >= 4


@pytest.mark.long
@INTERPRETED
def test_adapters_of_prompts_in_recorded_steps(
    builder: TextModelBuilder, monkeypatch: pytest.MonkeyPatch, triton_device: torch.device, tmp_path: Path
) -> None:
    """Each token goes through its row's adapter, which a table names; other rows of the step have another, or none."""
    model = tiny.build_model("llama")
    for index, name in enumerate(("first", "second")):
        write_adapter(tmp_path / name, model, seed=index + 1)
    own = small(builder).with_adapter(tmp_path / "first").with_adapter(tmp_path / "second")

    async def scene(model: Model) -> list[Any]:
        names = (None, "first", "second", "first")
        sampling = evolve(GREEDY, max_len=3)
        asked = zip(PROMPTS, names, strict=False)
        return said(
            await gather(
                model, *(model.send_completion_request(prompt, sampling, adapter=name) for prompt, name in asked)
            )
        )

    expected = run(own, scene)
    recorder = Recorder()
    recorder.counts = (13,)
    let_record(monkeypatch, triton_device, recorder)
    assert run(own, scene) == expected
    assert recorder.mixed


@INTERPRETED
@pytest.mark.parametrize(
    ("times", "window", "cache_type"),
    [
        (1, 4, PagedCacheType.AUTO),
        pytest.param(1, None, PagedCacheType.AUTO, marks=pytest.mark.long),
        pytest.param(1, 4, PagedCacheType.F8E4M3, marks=pytest.mark.long),
        pytest.param(3, None, PagedCacheType.AUTO, marks=pytest.mark.long),
        pytest.param(3, 4, PagedCacheType.AUTO, marks=pytest.mark.long),
    ],
)
def test_padding_changes_nothing(
    triton_device: torch.device, times: int, window: int | None, cache_type: PagedCacheType
) -> None:
    """Rows of a recorded step beside rows of padding, and beside tokens of padding, by the kernels themselves.

    :param times: how many times as long prompts are. Of short ones, the decode kernel takes all tokens
    """
    config = evolve(ATTENDING, sliding_windows=(window,))
    settings = PoolSettings(block_size=8, dtype=torch.float32, device=triton_device, cache_type=cache_type)
    model: Any = Attending()
    text = [list(range(7 * row, 7 * row + 40)) for row in range(3)]

    def row(index: int, start: int, end: int) -> StepRow:
        made = span(start, end - start, [5 * index + block for block in range(5)])
        return evolve(made, token_ids=text[index][start:end], num_logits=1)

    first, second, third = 3 * times, 9 * times, 5 * times
    steps = [
        [row(0, 0, first), row(1, 0, second)],
        [row(0, first, first + 1), row(1, second, second + 1), row(2, 0, third)],
    ]
    counts = 8 * times, 16 * times
    launched, recorded = (TritonPagedBackend(config, settings, 15, max_num_seqs=4, max_model_len=40) for _ in range(2))
    pools = [[each for layer in backend._layers for each in layer.tensors] for backend in (launched, recorded)]
    for tensor in itertools.chain(*pools):
        tensor.view(torch.uint8).zero_()
    results = StepResults(torch.zeros(4, dtype=torch.int64), counts[1])
    recorder = Recorder()
    with torch.inference_mode():
        layers = RecordableLayers(model, recorded, results)
        graphs = MixedGraphs(layers, counts=counts, bounds=(40,), record=recorder.record_mixed)
        for rows in steps:
            tokens = torch.tensor([token for each in rows for token in each.token_ids])
            positions = torch.cat([torch.arange(each.start, each.end) for each in rows])
            expected = launched.prepare(rows)
            hidden = model.forward(tokens, positions, type("Context", (), {"attention": expected}))
            found, first_tokens = graphs.forward(rows, [-1] * len(rows), [-1] * len(rows))
            ends = torch.tensor([each.num_new_tokens for each in rows]).cumsum(0)
            assert first_tokens == [0, *ends[:-1].tolist()]
            assert found.positions == (ends - 1).tolist()
            assert torch.allclose(found.hidden, hidden, atol=1e-5)
            assert torch.equal(found.logits, found.hidden[ends - 1, :50])
            assert torch.equal(found.likeliest, found.logits.argmax(-1))
            padding = results.of(counts[1], []).hidden[len(tokens) : recorder.mixed[-1]]
            assert not padding.any()
    assert recorder.mixed == [counts[1], counts[0]]
    for one, other in zip(*pools, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_tokens_that_the_last_step_has_left() -> None:
    class Backend:
        empty_seat = 9

        def seats(self, seq_ids: Sequence[int], versions: object, tables: object) -> Any:
            return torch.tensor(seq_ids).numpy()

        def mixed(self, *args: Tensor, max_context_len: int) -> tuple[Tensor, ...]:
            return args

    class Echo:
        """Its states are what it is given: tokens and positions."""

        def forward(self, token_ids: Tensor, positions: Tensor, ctx: Any) -> Tensor:
            self.seen = ctx.attention
            return torch.stack((token_ids, positions), 1).float()

        def logits(self, hidden: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(hidden[:, 0].long() + 1, 60).float()

    model: Any = Echo()
    backend: Any = Backend()
    results = StepResults(torch.tensor([30, 31, 32]), 8)
    graphs = MixedGraphs(
        RecordableLayers(model, backend, results), counts=(8,), bounds=(40,), record=Recorder().record_mixed
    )
    results.overlap.copy_(torch.tensor([30, 31, 32]))
    rows = [
        StepRow(4, 5, [AWAITED], [0], 5, num_logits=1),
        StepRow(6, 0, [11, 12, 13], [1], 5),
        StepRow(5, 2, [8], [2], 3),
    ]
    rows[2].num_logits = 1
    found, first_tokens = graphs.forward(rows, [2, -1, -1], [-1] * 3)
    assert found.hidden.tolist() == [[32, 5], [11, 0], [12, 1], [13, 2], [8, 2]]
    assert first_tokens == [0, 1, 4]
    assert found.positions == [0, 4]
    assert found.likeliest.tolist() == [33, 9]
    assert results.overlap[:2].tolist() == [33, 9]
    seats, lengths, ends, row_of_token, positions = model.seen
    assert seats.tolist() == [4, 6, 5, 9]
    assert lengths.tolist() == [6, 3, 3, 0]
    assert ends.tolist() == [0, 1, 4, 5, 8]
    assert row_of_token.tolist() == [0, 1, 1, 1, 2, 3, 3, 3]
    assert positions.tolist() == [5, 0, 1, 2, 2, -1, -1, -1]


def test_numbers_of_tokens_to_record() -> None:
    assert token_counts(13) == [13]
    assert token_counts(96) == [16, 32, 48, 64, 96]
    assert token_counts(100) == [16, 32, 48, 64, 96, 100]
    assert token_counts(512) == token_counts(513)
    counts = token_counts(8192)
    assert counts[-1] == 512
    for number in range(1, 513):
        filled_up = next(count for count in counts if count >= number)
        assert filled_up < number + 16 if number <= 64 else filled_up <= 1.5 * number
