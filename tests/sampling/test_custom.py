"""Logits processors of an application's own, from the builder to the token."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import pytest
import torch
from attrs import evolve
from rows import encode, make_request, make_row
from torch import Tensor

from arrivals import gather, wait_for_requests
from paged_sdk import (
    BlockingModel,
    ChatCompletionResponse,
    EngineError,
    InvalidRequestError,
    LogitsProcessor,
    LogitsProcessorError,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    RequestBuilder,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.sampling.processors import default_processors
from paged_sdk.sampling.sampler import SampledRows, Sampler
from paged_sdk.testing import fake_model
from paged_sdk.types.logits_processor import AnyLogitsProcessor
from paged_sdk.types.request_options import RequestOptions

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_len=24, ignore_eos=True, top_n_logprobs=0)


class NewMultiplesOf:
    """Leaves the multiples of a number that the text does not have yet."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        kept = logits[:: self.number].clone()
        logits.fill_(-math.inf)
        logits[:: self.number] = kept
        logits[list(token_ids)] = -math.inf


def asked(*processors: AnyLogitsProcessor, text: str = "Hello", sampling: SamplingParams = GREEDY) -> RequestBuilder:
    return RequestBuilder().add_message("user", text).with_sampling(sampling).with_logits_processors(*processors)


def tokens(response: ChatCompletionResponse) -> list[list[int]]:
    """Return the tokens of each choice."""
    found = []
    for choice in response.choices:
        assert choice.logprobs is not None
        found.append([entry.token_id for entry in choice.logprobs.content])
    return found


@pytest.mark.anyio
async def test_a_processor_decides_what_is_said(model: Model) -> None:
    plain = tokens(await model.send_chat_request(asked()))
    (found,) = tokens(await model.send_chat_request(asked(NewMultiplesOf(5))))
    assert plain != [found]
    assert all(token % 5 == 0 for token in found)
    assert len(set(found)) == len(found) == 24
    (both,) = tokens(await model.send_chat_request(asked(NewMultiplesOf(2), NewMultiplesOf(3))))
    assert all(token % 6 == 0 for token in both)
    assert tokens(await model.send_chat_request(asked())) == plain


class Together:
    """Does what a processor does, and keeps how many rows each call had."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor
        self.num_rows: list[int] = []

    def process_batch(self, token_ids: Sequence[Sequence[int]], logits: Tensor) -> None:
        self.num_rows.append(len(token_ids))
        for tokens_of_row, row in zip(token_ids, logits, strict=True):
            self.processor(tokens_of_row, row)


@pytest.mark.anyio
async def test_requests_that_name_the_same_object_share_its_calls(model: Model) -> None:
    texts = ["Hello", "Hi", "Good morning"]
    third, fifth = Together(NewMultiplesOf(3)), Together(NewMultiplesOf(5))
    lists: list[list[AnyLogitsProcessor]] = [[third], [third, fifth], [NewMultiplesOf(2), fifth]]
    expected = [[NewMultiplesOf(3)], [NewMultiplesOf(3), NewMultiplesOf(5)], [NewMultiplesOf(2), NewMultiplesOf(5)]]
    alone = [tokens(await model.send_chat_request(asked(*p, text=t))) for p, t in zip(expected, texts, strict=True)]
    requests = [asked(*p, text=t) for p, t in zip(lists, texts, strict=True)]
    wait_for_requests(model, len(requests))
    assert [tokens(response) for response in await model.send_chat_requests(requests)] == alone
    assert max(third.num_rows) == max(fifth.num_rows) == 2


def test_of_rows_processed_together_those_that_raise_fail_alone() -> None:
    def refuse_seven(token_ids: Sequence[int], logits: Tensor) -> None:
        logits[11] = math.nan if token_ids[-1] == 8 else -math.inf
        if token_ids[-1] == 7:
            raise KeyError("seven")

    together = Together(refuse_seven)
    requests = [
        evolve(
            make_request(SamplingParams(temperature=0.0), [token]), options=RequestOptions(logits_processors=[together])
        )
        for token in (6, 7, 8, 9)
    ]
    sampler = Sampler(12, CPU, default_processors(12, encode))
    rows = [make_row(request, seq_id=index) for index, request in enumerate(requests)]
    sampled = sampler.sample(torch.arange(12.0).repeat(4, 1), sampler.prepare(rows))
    assert sampled.token_ids == [[10], [], [], [10]]
    assert {row: str(error).partition("Together ")[2] for row, error in sampled.failed.items()} == {
        1: "raised KeyError: 'seven'",
        2: "left NaN or Inf in the logits",
    }
    assert together.num_rows == [4, 1, 1, 1, 1]


@pytest.mark.anyio
async def test_every_choice_has_its_own_tokens(model: Model) -> None:
    sampling = evolve(GREEDY, temperature=1.0, seed=5, n_choices=3)
    choices = tokens(await model.send_chat_request(asked(NewMultiplesOf(3), sampling=sampling)))
    assert len({tuple(choice) for choice in choices}) == 3
    for choice in choices:
        assert all(token % 3 == 0 for token in choice)
        assert len(set(choice)) == 24


def test_preempted_texts_go_on_as_if_nothing_had_been(builder: TextModelBuilder) -> None:
    async def run(num_tokens: int) -> tuple[list[list[list[int]]], int]:
        pool = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(num_tokens))
        async with builder.with_paged_attn(pool).with_prefix_cache_n(None).build() as model:
            requests = [asked(NewMultiplesOf(number), text="Hello!") for number in (3, 5)]
            responses = await gather(model, *map(model.send_chat_request, requests))
            return [tokens(response) for response in responses], model.stats().preemptions

    expected, none = asyncio.run(run(2000))
    found, num_preemptions = asyncio.run(run(64))
    assert found == expected
    assert (none, num_preemptions > 0) == (0, True)


def raising(token_ids: Sequence[int], logits: Tensor) -> None:
    raise KeyError("seven")


def returning(token_ids: Sequence[int], logits: Tensor) -> Tensor:
    return logits + 1


def spoiling(token_ids: Sequence[int], logits: Tensor) -> None:
    logits[3] = math.nan


@pytest.mark.anyio
async def test_an_exception_ends_its_request_alone(model: Model) -> None:
    expected = tokens(await model.send_chat_request(asked()))

    class FailsLate:
        def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
            self.num_calls = getattr(self, "num_calls", 0) + 1
            if self.num_calls == 5:
                raise KeyError("seven")

    stream = model.stream_chat_request(asked())
    async with stream:
        with pytest.raises(LogitsProcessorError, match="FailsLate raised KeyError: 'seven'") as raised:
            await model.send_chat_request(asked(FailsLate()))
        async for _ in stream:
            pass
    assert isinstance(raised.value.__cause__, KeyError)
    assert raised.value.request_id
    assert tokens(await model.send_chat_request(asked())) == expected
    assert model.stats().blocks_used == 0


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (raising, "raising raised KeyError: 'seven'"),
        (returning, "returning returned Tensor: it has to change the logits in place"),
        (spoiling, "spoiling left NaN or Inf in the logits"),
    ],
)
def test_rows_that_a_processor_fails_for_fail_alone(processor: Any, reason: str) -> None:
    params = SamplingParams(temperature=0.0)
    requests = [
        make_request(params),
        evolve(make_request(params), options=RequestOptions(logits_processors=(processor, NewMultiplesOf(2)))),
    ]
    rows = [make_row(request, seq_id=index) for index, request in enumerate([*requests, requests[0]])]
    sampler = Sampler(12, CPU, default_processors(12, encode))
    sampled: SampledRows = sampler.sample(torch.arange(12.0).repeat(3, 1), sampler.prepare(rows))
    assert sampled.token_ids == [[11], [], [11]]
    (error,) = sampled.failed.values()
    assert isinstance(error, LogitsProcessorError)
    assert str(error) == f"request r: logits processor {reason}"
    assert error.request_id == "r"


def test_processors_see_the_logits_after_all_others() -> None:
    seen: list[tuple[Sequence[int], list[float]]] = []

    def look(token_ids: Sequence[int], logits: Tensor) -> None:
        seen.append((token_ids, logits.tolist()))

    params = SamplingParams(temperature=0.5, top_k=1, presence_penalty=0.5, logits_bias={1: 2.0}, top_n_logprobs=0)
    request = evolve(make_request(params, [3]), options=RequestOptions(logits_processors=(look,)))
    sampler = Sampler(4, CPU, default_processors(4, encode))
    sampler.sample(torch.zeros(1, 4), sampler.prepare([make_row(request, [0])]))
    assert seen == [((3, 0), [-0.5, 2.0, 0.0, 0.0])]


async def not_awaited(token_ids: Sequence[int], logits: Tensor) -> None:
    pass


class AsyncBatch:
    async def process_batch(self, token_ids: Sequence[Sequence[int]], logits: Tensor) -> None:
        pass


class AsyncCall:
    async def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        pass


@pytest.mark.parametrize(
    "bad", [3, "text", lambda: None, lambda logits: None, not_awaited, AsyncCall(), AsyncBatch(), [raising]]
)
def test_what_is_no_processor_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidRequestError, match="logits_processors") as raised:
        RequestBuilder().with_logits_processors(raising, bad)
    assert raised.value.value is bad


def test_functions_that_hide_their_parameters_are_accepted() -> None:
    processors: Any = (max, raising)
    assert RequestBuilder().with_logits_processors(*processors).options.logits_processors == processors


def test_a_processor_that_would_wait_for_its_own_engine_is_told_so(builder: TextModelBuilder) -> None:
    asked_for: dict[str, Callable[[], object]] = {}
    outcomes: dict[str, object] = {}

    def ask(token_ids: Sequence[int], logits: Tensor) -> None:
        for name, act in asked_for.items():
            try:
                outcomes[name] = act()
            except EngineError as error:
                outcomes[name] = str(error)

    with BlockingModel(builder.build()) as model, BlockingModel(fake_model("Hi!")) as other:
        asked_for |= {
            "send": lambda: model.send_chat_request(asked()),
            "stream": lambda: next(model.stream_chat_request(asked())),
            "reset": model.reset_prefix_cache,
            "close": model.close,
            "tokenize": lambda: len(model.tokenize("a")),
            "other": lambda: other.send_chat_request(asked()).choices[0].message.content,
        }
        sampling = evolve(GREEDY, max_len=1)
        assert model.send_chat_request(asked(ask, sampling=sampling)).choices[0].finish_reason == "length"
    why_not = "the engine's own thread, on which logits processors run, cannot wait for the engine"
    refused = dict.fromkeys(("send", "stream", "reset", "close"), why_not)
    assert outcomes == {**refused, "tokenize": 1, "other": "Hi!"}


@pytest.mark.anyio
async def test_a_blocking_model_may_be_collected_on_its_engine_s_thread(model: Model) -> None:
    """The thread would wait for itself."""
    took: list[float] = []

    async def give() -> Model:
        return model

    blocking = await anyio.to_thread.run_sync(lambda: [BlockingModel(give())])

    def drop(token_ids: Sequence[int], logits: Tensor) -> None:
        begin = time.monotonic()
        blocking.clear()
        took.append(time.monotonic() - begin)

    response = await model.send_chat_request(asked(drop, sampling=evolve(GREEDY, max_len=1000)))
    assert response.choices[0].finish_reason == "canceled"
    assert took[0] < 10
