"""A model that several processes compute says what one process says, and leaves nothing behind however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import evolve

from adapter_files import ALL, write_adapter
from paged_sdk import (
    AdapterError,
    BlockingModel,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    GgufModelBuilder,
    IsqType,
    MemoryGpuConfig,
    PagedAttentionMeta,
    PagedCacheType,
    RequestBuilder,
    SamplingParams,
    SpeculativeConfig,
    TextModelBuilder,
    TextSpeculativeBuilder,
)
from talk import until
from tiny import build_model, make_checkpoint, make_gguf
from tiny_ranker import logits_of, make_answering_ranker, make_decoder_ranker

PROMPTS = [
    "What is the capital of France?",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 3,
    "def add(first, second): return first + second",
    "Zwölf Boxkämpfer",
    "It kept its memory in pages, as a library keeps its books: every page had a number",
]
SHAPE: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
GREEDY = SamplingParams(temperature=0.0, max_len=24, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, seed=4, max_len=16, top_n_logprobs=2, repetition_penalty=1.1, ignore_eos=True)
SMALL_POOL = PagedAttentionMeta(block_size=8, gpu_memory=MemoryGpuConfig.ContextSize(240))


def builder(path: Path) -> TextModelBuilder:
    return (
        TextModelBuilder(path)
        .with_dtype("float64")
        .with_num_threads(1)
        .with_max_num_batched_tokens(24)
        .with_paged_attn(SMALL_POOL)
        .with_speculation(SpeculativeConfig(gamma=3))
    )


def followers(parent: int | None = None) -> set[int]:
    """Return the processes of other ranks that a process has started, this one if None."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                is_follower = b"paged_sdk.build.ranks.follower" in (entry / "cmdline").read_bytes()
                ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if is_follower and ppid == (parent or os.getpid()):
                found.add(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with three key-value heads, which two ranks cannot halve."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("tp"), **SHAPE)


@pytest.fixture(scope="module")
def one(path: Path) -> Iterator[BlockingModel]:
    with BlockingModel(builder(path).build()) as model:
        yield model


@pytest.fixture(scope="module")
def two(path: Path) -> Iterator[BlockingModel]:
    with BlockingModel(builder(path).with_tensor_parallel(2).build()) as model:
        yield model


def texts(model: BlockingModel, sampling: SamplingParams, prompts: list[str]) -> list[str]:
    return [choice.text for choice in model.send_completion_request(prompts, sampling).choices]


def test_the_same_texts(one: BlockingModel, two: BlockingModel) -> None:
    for sampling in (GREEDY, DRAWN):
        assert texts(two, sampling, PROMPTS) == texts(one, sampling, PROMPTS)
    stats = two.stats()
    assert stats.preemptions > 0  # the pool holds fewer texts than are asked for
    assert stats.prefix_hits > 0
    assert stats.blocks_total == one.stats().blocks_total


def test_logprobs_vectors_and_scores(one: BlockingModel, two: BlockingModel) -> None:
    read = SamplingParams(temperature=0.0, max_len=1, prompt_logprobs=1)
    ours, theirs = [model.send_completion_request(PROMPTS[1], read) for model in (two, one)]
    assert ours.choices[0].logprobs == theirs.choices[0].logprobs
    assert two.embed(PROMPTS[:2]).embeddings[1] == pytest.approx(one.embed(PROMPTS[:2]).embeddings[1])
    scores = [model.score(PROMPTS[:2]).scores[1] for model in (two, one)]
    assert scores[0].logprobs == pytest.approx(scores[1].logprobs)


def test_ranks(path: Path, tmp_path: Path) -> None:
    """By a layer that each rank has, and by an output projection of which each has some tokens."""
    make_decoder_ranker("llama", tmp_path / "layer", **SHAPE)
    make_answering_ranker("llama", tmp_path / "answer", **SHAPE)
    for name in ("layer", "answer"):
        found = []
        for ranks in (1, 2):
            built = builder(tmp_path / name).with_paged_attn(SMALL_POOL).with_tensor_parallel(ranks).build()
            with BlockingModel(built) as model:
                found.append(logits_of(model.rank(PROMPTS[0], PROMPTS[2:])))
        assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_a_closed_stream_gives_its_blocks_back(two: BlockingModel) -> None:
    endless = SamplingParams(temperature=0.0, max_len=150, ignore_eos=True)
    with two.stream_completion_request(PROMPTS[0], endless) as stream:
        next(iter(stream))
    assert texts(two, GREEDY, PROMPTS[:1])
    assert two.stats().blocks_used == 0


def test_adapters(one: BlockingModel, two: BlockingModel, path: Path, tmp_path: Path) -> None:
    targets = (*ALL, "lm_head")
    for seed, name in enumerate(("first", "second")):
        write_adapter(tmp_path / name, build_model("llama", **SHAPE), seed=seed, strength=0.4, targets=targets)
        for model in (one, two):
            model.load_adapter(tmp_path / name)

    def said(model: BlockingModel, adapter: str | None) -> str:
        request = RequestBuilder().add_message("user", PROMPTS[0]).with_sampling(GREEDY)
        return str(
            model.send_chat_request(request if adapter is None else request.with_adapter(adapter)).to_dict()["choices"]
        )

    found = [said(two, adapter) for adapter in (None, "first", "second", "first")]
    assert found == [said(one, adapter) for adapter in (None, "first", "second", "first")]
    assert len(set(found)) == 3
    for model in (one, two):
        model.unload_adapter("first")
    assert said(two, "second") == said(one, "second")
    dora = write_adapter(tmp_path / "dora", build_model("llama", **SHAPE), targets=("o_proj",), use_dora=True)
    with pytest.raises(AdapterError):
        two.load_adapter(dora)


def test_an_adapter_is_found_from_where_the_program_is_by_now(
    two: BlockingModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank's process is still where the program was when it built the model."""
    write_adapter(tmp_path / "here", build_model("llama", **SHAPE), strength=0.4)
    monkeypatch.chdir(tmp_path)
    two.load_adapter("here")
    request = RequestBuilder().add_message("user", PROMPTS[0]).with_sampling(GREEDY)
    assert two.send_chat_request(request.with_adapter("here")).choices[0].message.content
    two.unload_adapter("here")


def test_a_draft_model(one: BlockingModel, path: Path) -> None:
    # The model itself, so that all drafts are right, on the first rank alone.
    target, draft = builder(path).with_tensor_parallel(2), builder(path)
    before = followers()
    with BlockingModel(TextSpeculativeBuilder(target, draft, SpeculativeConfig(gamma=4)).build()) as model:
        assert texts(model, GREEDY, PROMPTS) == texts(one, GREEDY, PROMPTS)
        assert model.stats().accepted_tokens > 0
        assert len(followers() - before) == 1
    with pytest.raises(ConfigError, match="1 for the draft model"):
        TextSpeculativeBuilder(draft, target)


def test_what_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1"):
        builder(path).with_tensor_parallel(0)
    before = followers()
    # Nothing is started for what the model's heads say: so many processes would take minutes.
    with pytest.raises(ConfigError, match=r"with_tensor_parallel = 1000 .* query heads"):
        BlockingModel(builder(path).with_tensor_parallel(1000).build())
    refused: list[Any] = [
        builder(path).with_tensor_parallel(7),
        # A single block of 32 of the experts' neurons, whose sums would have to be parted.
        _gguf(tmp_path / "q8", "Q8_0", family="qwen3_moe", moe_intermediate_size=32)
        .with_num_threads(1)
        .with_tensor_parallel(2),
    ]
    for each in refused:
        with pytest.raises(ConfigError, match="with_tensor_parallel = "):
            BlockingModel(each.build())
    assert followers() == before


def test_a_rank_that_dies_ends_every_request(path: Path) -> None:
    anyio.run(_kill_a_rank, path)


async def _kill_a_rank(path: Path) -> None:
    endless = SamplingParams(temperature=0.0, max_len=200, ignore_eos=True)
    before = followers()
    # In float32 the ranks wait for each other in shared memory.
    async with builder(path).with_dtype("float32").with_tensor_parallel(3).build() as model:
        own = sorted(followers() - before)
        assert len(own) == 2
        heard = 0

        async def go_on() -> None:
            nonlocal heard
            while True:  # so that there is a text to end, however late the rank is killed
                async for _ in model.stream_completion_request(PROMPTS[0], endless):
                    heard += 1

        async def ask() -> None:
            with pytest.raises(EngineDeadError, match=f"rank 2 of 3 has ended: process {own[1]} ended with signal 9"):
                await go_on()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: heard > 0)
            os.kill(own[0], signal.SIGINT)  # as a terminal does, to all processes of a command
            before_signal = heard
            await until(lambda: heard > before_signal + 1)
            start = time.monotonic()
            os.kill(own[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank 2 of 3"):
            await model.send_completion_request(PROMPTS[1], GREEDY)
        assert time.monotonic() - start < 5
    assert not any(map(is_running, own))


_PARENT = """
import asyncio, sys
from paged_sdk import SamplingParams, TextModelBuilder

async def main():
    builder = TextModelBuilder(sys.argv[1]).with_dtype("float64").with_num_threads(1).with_tensor_parallel(2)
    async with builder.build() as model:
        sampling = SamplingParams(temperature=0.0, max_len=1900, ignore_eos=True)
        while True:
            async for _ in model.stream_completion_request("on", sampling):
                print("on", flush=True)

asyncio.run(main())
"""


def test_a_program_that_is_killed_leaves_no_process(path: Path) -> None:
    # The program has no guard against being run once more by its own children.
    arguments = [sys.executable, "-c", _PARENT, str(path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "on\n"
        (follower,) = followers(program.pid)
        program.kill()
    limit = time.monotonic() + 60
    while is_running(follower) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not is_running(follower)


_LOADING = """
import asyncio, os, sys
from paged_sdk import TextModelBuilder
from paged_sdk.build.ranks.child_ranks import ChildRanks

ChildRanks.join = lambda *_: os._exit(130)

async def main():
    await TextModelBuilder(sys.argv[1]).with_num_threads(1).with_tensor_parallel(2).build()

asyncio.run(main())
"""


def test_a_program_that_ends_while_it_loads_leaves_no_directory(path: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the command line like this."""
    arguments, environment = [sys.executable, "-c", _LOADING, str(path)], {**os.environ, "TMPDIR": str(tmp_path)}
    assert subprocess.run(arguments, env=environment, check=False).returncode == 130
    limit = time.monotonic() + 60
    while os.listdir(tmp_path) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not os.listdir(tmp_path)


WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def _gguf(directory: Path, quantization: str, **config: Any) -> GgufModelBuilder:
    return GgufModelBuilder(make_gguf(directory, quantization=quantization, **WIDE, **config))


def _dense(directory: Path) -> TextModelBuilder:
    return TextModelBuilder(make_checkpoint("llama", directory, **WIDE)).with_dtype("float32")


FORMS: dict[str, Callable[[Path], Any]] = {
    "float32": _dense,
    "contiguous": lambda directory: _dense(directory).without_paged_attn(),
    "FP8": lambda directory: _dense(directory).with_paged_attn(PagedAttentionMeta(cache_type=PagedCacheType.F8E4M3)),
    "4 bits": lambda directory: _dense(directory).with_paged_attn(PagedAttentionMeta(cache_type=PagedCacheType.Q4)),
    "bfloat16": lambda directory: _dense(directory).with_dtype("bfloat16"),
    "Q8_0": lambda directory: _gguf(directory, "Q8_0"),
    "Q8_0 decoded": lambda directory: _gguf(directory, "Q8_0").with_dtype("float32"),
    "Q4_0": lambda directory: _gguf(directory, "Q4_0"),
    "Q4_0 decoded": lambda directory: _gguf(directory, "Q4_0").with_dtype("float32"),
    "experts": lambda directory: _gguf(directory, "Q8_0", family="qwen3_moe", moe_intermediate_size=128),
    "Q4K": lambda directory: _dense(directory).with_dtype("auto").with_isq(IsqType.Q4K),
    "NF4": lambda directory: _dense(directory).with_dtype("auto").with_isq(IsqType.NF4),
    "HQQ8": lambda directory: _dense(directory).with_dtype("auto").with_isq(IsqType.HQQ8),
    "one arithmetic": lambda directory: _dense(directory).with_dtype("auto").with_batch_invariance(),
}


def said(model: BlockingModel) -> list[list[float]]:
    """Return the log-probabilities of texts."""
    return [list(each.logprobs) for each in model.score(PROMPTS).scores]


def test_weights_that_are_quantized_again(tmp_path: Path) -> None:
    whole = _dense(tmp_path / "model").with_num_threads(1)
    write_adapter(tmp_path / "adapter", build_model("llama", **WIDE), strength=0.4)
    request = RequestBuilder().add_message("user", PROMPTS[1]).with_sampling(evolve(GREEDY, top_n_logprobs=2))
    with BlockingModel(whole.build()) as one, BlockingModel(whole.with_tensor_parallel(2).build()) as two:
        dense = said(two)
        adapted = []
        for model in (one, two):
            model.load_adapter(tmp_path / "adapter")
            model.re_isq_model(IsqType.Q4_0)
            adapted.append(model.send_chat_request(request.with_adapter("adapter")).to_dict()["choices"])
        quantized = said(two)
        assert quantized != dense
        assert quantized == said(one)
        assert adapted[0] == adapted[1]
        # What cannot be done leaves all ranks as they were.
        (file,) = (tmp_path / "model").glob("*.safetensors")
        times = file.stat()
        os.utime(file, ns=(0, 0))
        with pytest.raises(CheckpointError):
            two.re_isq_model(IsqType.Q8_0)
        assert said(two) == quantized
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        two.re_isq_model(IsqType.Q8_0)
        assert said(two) != quantized


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, tmp_path: Path) -> None:
    whole = FORMS[form](tmp_path / "model").with_num_threads(1)
    with BlockingModel(whole.build()) as one, BlockingModel(whole.with_tensor_parallel(2).build()) as two:
        assert said(two) == said(one)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_of_joined_columns(dtype: str, tmp_path: Path) -> None:
    base = build_model("llama", **WIDE)
    write_adapter(tmp_path / "lora", base, strength=0.4, targets=ALL)
    write_adapter(tmp_path / "dora", base, strength=0.4, targets=ALL, use_dora=True)
    whole = _dense(tmp_path / "model").with_dtype(dtype).with_num_threads(1)
    with BlockingModel(whole.build()) as one, BlockingModel(whole.with_tensor_parallel(2).build()) as two:
        found = []
        for model in (one, two):
            for name in ("lora", "dora"):
                model.load_adapter(tmp_path / name)
            requests = [
                RequestBuilder().add_message("user", PROMPTS[1]).with_sampling(evolve(GREEDY, top_n_logprobs=2))
            ]
            requests += [requests[0].with_adapter(name) for name in ("lora", "dora")]
            found.append([model.send_chat_request(each).to_dict()["choices"] for each in requests])
        assert found[0] == found[1]
