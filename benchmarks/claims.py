"""Measure the gains by paged attention, the prefix cache, FP8 KV and quantized weights on this engine.

python -m benchmarks.claims --model smollm2
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from attrs import asdict, evolve, frozen
from rich.console import Console
from rich.table import Table
from torch import Tensor

import paged_sdk
from benchmarks.divergence import divergence
from benchmarks.inside import OpenEngine, open_engine
from benchmarks.machine import describe_machine
from benchmarks.models import model_path
from benchmarks.paths import cache_directory
from benchmarks.prompts import PromptMaker, prose
from benchmarks.results import as_text
from paged_sdk import (
    IsqType,
    MemoryGpuConfig,
    Model,
    PagedAttentionMeta,
    PagedCacheType,
    SamplingParams,
    TextModelBuilder,
)
from paged_sdk.kv.manager import KvTable
from paged_sdk.kv.paged import KvCacheManager
from paged_sdk.system.processors import usable_processors

__all__ = [
    "QUICK",
    "Claim",
    "Sizes",
    "fp8_kv",
    "in_situ_quantization",
    "paged_attention",
    "prefix_cache",
    "prefix_cache_cost",
]

_BLOCK_SIZE: Final = PagedAttentionMeta().block_size
_CHUNK: Final = 512
_POOLS: Final = 9


@frozen
class Claim:
    """Holds a figure with and without a feature.

    :ivar gain: factor of improvement by the feature, in memory, time or throughput
    """

    title: str
    unit: str
    without: float
    with_feature: float
    gain: float | None = None


@frozen(kw_only=True)
class Sizes:
    """Sets lengths in tokens, and numbers of requests.

    :ivar prompts: shortest and longest of the mixed prompts
    :ivar requests: numbers of concurrent requests
    :ivar prefix: length of the prefix that requests share, for the prefix cache
    :ivar text: length of the text on which the divergence of FP8 is measured
    :ivar blocks: number of blocks with which the prefix cache's overhead is measured
    """

    requests: tuple[int, ...] = (4, 16)
    prompts: tuple[int, int] = (32, 512)
    output: int = 64
    prefix: int = 1000
    question: int = 32
    text: int = 768
    blocks: int = 4096


QUICK = Sizes(requests=(2,), prompts=(8, 64), output=8, prefix=96, question=8, text=64, blocks=64)
"""Shows that everything runs; its figures mean nothing."""


class PeakKv:
    """Records the peak KV memory of sequences, in bytes."""

    def __init__(self, engine: OpenEngine) -> None:
        self._engine = engine
        self.num_bytes = 0.0
        engine.watch(self._look)

    def _look(self) -> None:
        backend, usage = self._engine.backend, self._engine.kv.usage
        # A pool is allocated as a whole, so count its used part, which a smaller pool would need.
        share = usage.used / usage.total if self._engine.parts.config.paged else 1.0
        self.num_bytes = max(self.num_bytes, backend.num_bytes * share)


async def _tokens_per_second(model: Model, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
    """Return generated tokens per second, from the first request to the end of the last, prefill included."""
    sampling = evolve(SamplingParams.deterministic(), max_len=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    responses = await asyncio.gather(*(model.send_completion_request(prompt, sampling) for prompt in prompts))
    return sum(response.usage.completion_tokens for response in responses) / (time.perf_counter() - start)


def paged_attention(builder: TextModelBuilder, sizes: Sizes) -> Iterator[Claim]:
    """Measure throughput and KV memory of concurrent requests with prompts of mixed lengths, without prefix caches."""
    variants = (builder.without_paged_attn(), builder.with_paged_attn(PagedAttentionMeta()))
    figures: dict[int, list[tuple[float, float]]] = {number: [] for number in sizes.requests}

    async def measure(variant: TextModelBuilder) -> None:
        engine = open_engine(variant.with_prefix_cache_n(0))
        prompts = PromptMaker(engine.parts.text.tokenizer)
        lengths = random.Random(0)
        async with engine.start() as model:
            for number in sizes.requests:
                peak = PeakKv(engine)
                batch = [
                    prompts.make(lengths.randint(*sizes.prompts), f"Mixed {number}.{index}").token_ids
                    for index in range(number)
                ]
                await _tokens_per_second(model, batch, 2)
                figures[number].append((await _tokens_per_second(model, batch, sizes.output), peak.num_bytes / 2**20))

    for variant in variants:
        asyncio.run(measure(variant))
    for number, ((speed, memory), (paged_speed, paged_memory)) in figures.items():
        yield Claim(f"paged attention, {number} requests: throughput", "tok/s", speed, paged_speed, paged_speed / speed)
        yield Claim(f"paged attention, {number} requests: KV held", "MiB", memory, paged_memory, memory / paged_memory)


def prefix_cache(builder: TextModelBuilder, sizes: Sizes) -> Iterator[Claim]:
    """Measure requests that share a prefix: all concurrently, and one after another as in a chat."""
    number = max(sizes.requests)
    figures: list[tuple[float, float]] = []

    async def measure(variant: TextModelBuilder) -> None:
        engine = open_engine(variant)
        prompts = PromptMaker(engine.parts.text.tokenizer)
        async with engine.start() as model:
            prefix = prompts.make(sizes.prefix, "Prefix")
            batch = [prompts.extend(prefix, sizes.question, f"Question {index}").token_ids for index in range(number)]
            speed = await _tokens_per_second(model, batch[:-1], sizes.output)
            sampling = evolve(SamplingParams.deterministic(), max_len=1)
            last = await model.send_completion_request(batch[-1], sampling)
            figures.append((speed, last.usage.time_to_first_token_sec * 1000))

    for prefix_cache_n in (0, 16):
        asyncio.run(measure(builder.with_prefix_cache_n(prefix_cache_n)))
    (speed, first), (cached_speed, cached_first) = figures
    title = f"prefix cache, {sizes.prefix:,} tokens in common"
    yield Claim(f"{title}: {number - 1} requests at once", "tok/s", speed, cached_speed, cached_speed / speed)
    yield Claim(f"{title}: first token of one more", "ms", first, cached_first, first / cached_first)


def fp8_kv(builder: TextModelBuilder, sizes: Sizes) -> Iterator[Claim]:
    """Measure FP8 KV against the model's own dtype: memory, quality, and decode after a long prompt."""
    megabytes = 64
    reference = open_engine(builder.with_dtype("float32"))
    token_ids = reference.parts.text.tokenizer.encode(prose(), add_special_tokens=False)[: sizes.text]
    expected = reference.logits(token_ids, chunk=sizes.text)
    del reference
    tokens: list[int] = []
    speeds: list[float] = []
    logits: list[list[Tensor]] = []

    async def measure(cache_type: PagedCacheType) -> None:
        meta = PagedAttentionMeta(cache_type=cache_type, gpu_memory=MemoryGpuConfig.MB(megabytes))
        engine = open_engine(builder.with_paged_attn(meta))
        config = engine.parts.config
        tokens.append(config.num_blocks * config.block_size)
        logits.append([engine.logits(token_ids, chunk=chunk) for chunk in chunks.values()])
        sampling = evolve(SamplingParams.deterministic(), max_len=sizes.output, ignore_eos=True)
        prompt = PromptMaker(engine.parts.text.tokenizer).make(sizes.prefix, "Long").token_ids
        async with engine.start() as model:
            usage = (await model.send_completion_request(prompt, sampling)).usage
        speeds.append((usage.completion_tokens - 1) / usage.total_completion_time_sec)

    chunks = {"prompt": sizes.text, "decode": 1}
    for cache_type in (PagedCacheType.AUTO, PagedCacheType.F8E4M3):
        asyncio.run(measure(cache_type))
    yield Claim(f"FP8 KV: tokens in {megabytes} MiB", "tokens", tokens[0], tokens[1], tokens[1] / tokens[0])
    for path, own, fp8 in zip(chunks, *logits, strict=True):
        kl, fp8_kl = (divergence(expected, each).mean_kl for each in (own, fp8))
        yield Claim(f"FP8 KV: mean KL against float32, {path}", "nats", kl, fp8_kl)
        yield Claim(f"FP8 KV: mean KL against KV of the model's dtype, {path}", "nats", 0, divergence(own, fp8).mean_kl)
    title = f"FP8 KV: decode after {sizes.prefix:,} tokens"
    yield Claim(title, "tok/s", speeds[0], speeds[1], speeds[1] / speeds[0])


def in_situ_quantization(builder: TextModelBuilder, sizes: Sizes) -> Iterator[Claim]:
    """Measure decode of one stream with weights in bfloat16, and with the same weights quantized to Q4K on loading."""
    figures: list[float] = []

    async def measure(variant: TextModelBuilder) -> None:
        engine = open_engine(variant)
        prompt = PromptMaker(engine.parts.text.tokenizer).make(sizes.question, "Short").token_ids
        sampling = evolve(SamplingParams.deterministic(), max_len=sizes.output, ignore_eos=True)
        async with engine.start() as model:
            usage = [(await model.send_completion_request(prompt, sampling)).usage for _ in range(3)]
        figures.append(
            statistics.median((each.completion_tokens - 1) / each.total_completion_time_sec for each in usage)
        )

    for variant in (builder.with_dtype("bfloat16"), builder.with_isq(IsqType.Q4K)):
        asyncio.run(measure(variant))
    dense, quantized = figures
    yield Claim("Q4K while loading against bfloat16: decode, 1 stream", "tok/s", dense, quantized, quantized / dense)


def prefix_cache_cost(sizes: Sizes) -> Iterator[Claim]:
    """Measure the prefix cache's overhead per block: only book-keeping, without tensors."""
    token_ids = random.Random(0).choices(range(2**16), k=sizes.blocks * _BLOCK_SIZE)
    off, on = (_Cost.of(token_ids, prefix_caching=prefix_caching) for prefix_caching in (False, True))
    yield Claim("prefix cache: time of a block, from taken to given back", "us", off.first_use, on.first_use)
    yield Claim("prefix cache: time of a block that is found again", "us", off.second_use, on.second_use)
    yield Claim("prefix cache: memory of a block's entry", "bytes", off.memory, on.memory)


@frozen(kw_only=True)
class _Cost:
    """Holds microseconds per block, and bytes per block that remain after the sequence has ended."""

    first_use: float
    second_use: float
    memory: float

    @classmethod
    def of(cls, token_ids: list[int], *, prefix_caching: bool) -> _Cost:
        """Run one sequence that fills the pool, twice. Times are medians over several pools."""
        num_blocks = len(token_ids) // _BLOCK_SIZE

        def manager() -> KvCacheManager:
            return KvCacheManager(num_blocks, _BLOCK_SIZE, prefix_caching=prefix_caching)

        runs = [[_microseconds(kv, token_ids) for _ in range(2)] for kv in (manager() for _ in range(_POOLS))]
        first, second = (statistics.median(taken) / num_blocks for taken in zip(*runs, strict=True))
        kv = manager()
        gc.collect()
        tracemalloc.start()
        _run_sequence(kv, token_ids)
        gc.collect()
        # Count only allocations by kv/: other threads may allocate meanwhile.
        own = tracemalloc.Filter(True, str(Path(paged_sdk.__file__).parent / "kv" / "*"))
        memory = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([own]).traces)
        tracemalloc.stop()
        return cls(first_use=first, second_use=second, memory=memory / num_blocks)


def _microseconds(kv: KvCacheManager, token_ids: list[int]) -> float:
    start = time.perf_counter()
    _run_sequence(kv, token_ids)
    return (time.perf_counter() - start) * 1e6


def _run_sequence(kv: KvCacheManager, token_ids: list[int]) -> None:
    """Look a prompt up, allocate it in chunks, and free it."""
    table = KvTable()
    prefix = kv.match(table, token_ids)
    kv.attach(table, prefix, token_ids)
    for start in range(prefix.num_tokens, len(token_ids), _CHUNK):
        num_tokens = min(_CHUNK, len(token_ids) - start)
        kv.grow(table, start, num_tokens)
        kv.commit(table, token_ids, start + num_tokens)
    kv.free(table, token_ids, len(token_ids))


def _as_table(claims: Sequence[Claim], title: str) -> Table:
    table = Table(title=title)
    for heading in ("", "without", "with", "unit", "times better"):
        table.add_column(heading, justify="right" if heading else "left")
    for claim in claims:
        gain = "" if claim.gain is None else f"{claim.gain:.2f}"
        table.add_row(claim.title, as_text(claim.without), as_text(claim.with_feature), claim.unit, gain)
    return table


def main(
    model: Annotated[str, typer.Option(help="smollm2, qwen1.5b, or the path of a GGUF file")] = "smollm2",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file; default: in the cache directory")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny lengths: shows that it runs, measures nothing")] = False,
) -> None:
    """Measure what each feature gains."""
    path, num_threads, sizes = model_path(model), threads or usable_processors(), QUICK if quick else Sizes()
    torch.set_num_threads(num_threads)
    builder = TextModelBuilder(path).with_num_threads(num_threads).with_max_num_seqs(max(sizes.requests))
    claims = [
        *paged_attention(builder, sizes),
        *prefix_cache(builder, sizes),
        *fp8_kv(builder, sizes),
        *in_situ_quantization(builder, sizes),
        *prefix_cache_cost(sizes),
    ]
    report = {
        "command": " ".join(["python -m benchmarks.claims", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": path.name,
        "sizes": asdict(sizes),
        "quick": quick,
        "claims": [asdict(claim) for claim in claims],
    }
    suffix = "-quick" if quick else ""
    target = output or cache_directory("results") / f"{path.stem}-claims{suffix}.json"
    target.write_text(json.dumps(report, indent=2) + "\n")
    console = Console()
    console.print(_as_table(claims, path.name + (" (quick: no measurement)" if quick else "")))
    console.print(f"written to {target}")


if __name__ == "__main__":
    typer.run(main)
