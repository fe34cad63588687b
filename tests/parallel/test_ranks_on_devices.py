"""Ranks take the way of those on CUDA devices: recorded steps, and tokens that go from step to step on the device.

Without several GPUs, the ranks are threads, what they have goes through gloo, and "recorded" steps are run again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from paged_sdk import (
    EngineDeadError,
    EngineError,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.build.assembly import load_parts
from paged_sdk.config.env import read_environment
from paged_sdk.config.launch import Launch
from paged_sdk.parallel.group import Group
from paged_sdk.runner.lockstep import recorded_alike
from rank_threads import free_port, run_ranks
from recorded_steps import Recorder, let_record, let_torch_attend
from tiny import make_checkpoint

PROMPTS: Final = ("What is paging? It is", "What is paging? Nothing", "So", "One two three four five six")
SHAPE: Final[dict[str, Any]] = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
GREEDY: Final = SamplingParams(temperature=0.0, max_len=10, ignore_eos=True)
DRAWN: Final = SamplingParams(temperature=0.9, seed=4, max_len=10, ignore_eos=True)
ON_HOST: Final = SamplingParams(temperature=0.0, max_len=6, logits_bias={7: 5.0}, top_n_logprobs=2, ignore_eos=True)
READ: Final = SamplingParams(temperature=0.0, max_len=2, prompt_logprobs=1, ignore_eos=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    recorder.counts = (8, 16)
    let_record(monkeypatch, torch.device("cpu"), recorder)
    let_torch_attend(monkeypatch)
    return recorder


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Let each thread be a rank, which holds what it has on a device."""
    local = threading.local()
    monkeypatch.setattr("paged_sdk.build.assembly.read_launch", lambda: local.launch)
    join = Group.join

    def join_devices(group: Group, *arguments: Any, **named: Any) -> None:
        join(group, *arguments, **named)
        group._devices = group._ranks

    monkeypatch.setattr(Group, "join", join_devices)
    return local


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> TextModelBuilder:
    return (
        TextModelBuilder(make_checkpoint("llama", tmp_path_factory.mktemp("devices"), **SHAPE))
        .with_dtype("float32")
        .with_num_threads(1)
        .with_paged_attn(PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(512)))
        .with_max_num_batched_tokens(13)
        .with_max_num_seqs(4)
        .with_max_model_len(64)
    )


@contextmanager
def ranks(
    builder: TextModelBuilder, launches: threading.local, size: int
) -> Iterator[tuple[Callable[[], Model], list[BaseException]]]:
    """Start ranks after the first as threads. Give what makes the first one's model, and what others end with."""
    builder, port = builder.with_tensor_parallel(size), free_port()
    ended: list[BaseException] = []

    def load(rank: int) -> Model:
        launches.launch = Launch(rank=rank, size=size, address="localhost", port=port)
        return Model(load_parts(builder.source, builder.settings, read_environment({})))

    def follow(rank: int) -> None:
        try:
            load(rank)
        except BaseException as error:
            ended.append(error)

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, size)]
    for thread in threads:
        thread.start()
    yield lambda: load(0), ended
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


async def said(model: Model) -> list[Any]:
    found: list[Any] = []
    for sampling in (GREEDY, DRAWN, ON_HOST, READ):
        async with anyio.create_task_group() as tasks:
            responses: dict[str, Any] = {}

            async def ask(prompt: str, sampling: SamplingParams, responses: dict[str, Any]) -> None:
                response = await model.send_completion_request(prompt, sampling)
                responses[prompt] = [choice.text for choice in response.choices]

            for prompt in PROMPTS:
                tasks.start_soon(ask, prompt, sampling, responses)
        found.append([responses[prompt] for prompt in PROMPTS])
    return found


@pytest.mark.anyio
async def test_the_same_texts(builder: TextModelBuilder, launches: threading.local, recorder: Recorder) -> None:
    async with builder.build() as model:
        expected = await said(model)
    assert recorder.replays
    assert recorder.mixed
    recorder.replays.clear()
    recorder.mixed.clear()
    with ranks(builder, launches, 2) as (load, ended):
        async with load() as model:
            assert await said(model) == expected
    assert [type(error) for error in ended] == [SystemExit]
    for replayed in (recorder.replays, recorder.mixed):  # by one rank as by the other
        assert replayed
        assert len(replayed) % 2 == 0


async def read(model: Model) -> list[Any]:
    """Ask, at once, for logprobs of prompts, scores and vectors."""
    found: dict[str, Any] = {}

    async def look_up(prompt: str) -> None:
        logprobs = (await model.send_completion_request(prompt, READ)).prompt_logprobs
        assert logprobs is not None
        found[prompt] = [token.logprob for token in logprobs.content]
        found[prompt] += [each.logprob for token in logprobs.content for each in token.top_logprobs]

    async def score() -> None:
        found["scores"] = [each.logprobs for each in (await model.score(PROMPTS[:2])).scores]

    async def embed() -> None:
        found["vectors"] = (await model.embed(PROMPTS, pooling="mean")).embeddings

    async with anyio.create_task_group() as tasks:
        for prompt in PROMPTS:
            tasks.start_soon(look_up, prompt)
        tasks.start_soon(score)
        tasks.start_soon(embed)
    return [*(found[prompt] for prompt in PROMPTS), *found["scores"], *found["vectors"]]


@pytest.mark.anyio
async def test_what_is_read_of_prompts(
    builder: TextModelBuilder, launches: threading.local, recorder: Recorder
) -> None:
    """The others compute their part of logits that come to the host when the next step is under way."""
    async with builder.build() as model:
        expected = await read(model)
    with ranks(builder, launches, 2) as (load, ended):
        async with load() as model:
            for own, wanted in zip(await read(model), expected, strict=True):
                np.testing.assert_allclose(own, wanted, atol=1e-4)
    assert [type(error) for error in ended] == [SystemExit]
    assert recorder.mixed


@pytest.mark.anyio
async def test_a_rank_that_ends(
    builder: TextModelBuilder, launches: threading.local, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(group: Group, tensor: torch.Tensor) -> torch.Tensor:
        if group.rank == 1:
            raise RuntimeError("a kernel was not launched")
        return broadcast(group, tensor)

    broadcast = Group.broadcast
    with ranks(builder, launches, 2) as (load, ended):
        model = load()
        monkeypatch.setattr(Group, "broadcast", fail)
        with pytest.raises(EngineDeadError, match="rank 1 of 2 has ended: RuntimeError: a kernel was not launched"):
            await model.send_completion_request(PROMPTS[0], DRAWN)
        await model.aclose()
    assert [str(error) for error in ended] == ["a kernel was not launched"]


def test_steps_are_recorded_on_all_ranks_or_on_none() -> None:
    def refuse(function: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("it cannot be recorded")

    def record(function: Callable[[], None]) -> Callable[[], None]:
        return function

    def none(group: Group) -> None:
        with pytest.raises(RuntimeError, match="it cannot be recorded"):
            recorded_alike(refuse, group)(lambda: None)

    def some(group: Group) -> None:
        with pytest.raises(EngineError, match="on some ranks only"):
            recorded_alike(refuse if group.rank else record, group)(lambda: None)

    def every(group: Group) -> None:
        recorded_alike(record, group)(lambda: None)()

    for run in (none, some, every):
        run_ranks(2, run)
