"""Measure quality: the divergence of this engine, with its default settings, from the dequantized model in float32.

python -m benchmarks.quality --model smollm2

The reference is this engine in float32 on the same file, which the tests compare with transformers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from attrs import asdict, evolve, frozen
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.divergence import Divergence, divergence
from benchmarks.environments import installed_engines
from benchmarks.inside import open_engine
from benchmarks.machine import describe_machine
from benchmarks.models import model_path
from benchmarks.paths import cache_directory
from benchmarks.process import EngineProcess
from benchmarks.prompts import PromptMaker, prose
from benchmarks.protocol import EngineSettings, LogitsPath
from paged_sdk import Model, SamplingParams, TextModelBuilder
from paged_sdk.system.processors import usable_processors

__all__ = ["BatchDependence", "batch_dependence", "own_paths"]

_STREAMS = 16
_PEER = "llama_cpp"
_TIMEOUT = 600.0
_PEER_PATHS: tuple[LogitsPath, ...] = ("prefill", "decode")


@frozen(kw_only=True)
class BatchDependence:
    """Compares greedy texts generated alone with the same texts generated in a batch.

    :ivar different: number of texts that differ
    :ivar common_characters: mean length of these texts' common beginnings, in characters
    """

    texts: int
    different: int
    common_characters: float


def own_paths(builder: TextModelBuilder, token_ids: Sequence[int], streams: int) -> Iterator[tuple[str, Tensor]]:
    """Compute logits on each path that a token can take through the engine."""
    engine = open_engine(builder)
    budget = engine.parts.config.max_num_batched_tokens
    yield "prefill", engine.logits(token_ids, chunk=budget)
    yield "decode", engine.logits(token_ids, chunk=1)
    yield f"decode, {streams} streams", engine.logits(token_ids, chunk=1, streams=streams)


async def batch_dependence(model: Model, prompts: Sequence[Sequence[int]], max_tokens: int) -> BatchDependence:
    """Measure how often a text depends on the other rows of its batch."""
    sampling = evolve(SamplingParams.deterministic(), max_len=max_tokens)

    async def text(prompt: Sequence[int]) -> str:
        # Reset, so that everything compared is really computed.
        await model.reset_prefix_cache()
        return (await model.send_completion_request(prompt, sampling)).choices[0].text

    alone = [await text(prompt) for prompt in prompts]
    together = await asyncio.gather(*map(text, prompts))
    shared = [_num_common(*pair) for pair in zip(alone, together, strict=True) if pair[0] != pair[1]]
    return BatchDependence(
        texts=len(prompts), different=len(shared), common_characters=sum(shared) / len(shared) if shared else 0.0
    )


def _num_common(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def _peer_logits(settings: EngineSettings, token_ids: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield llama.cpp's logits, computed in its own environment."""
    peer = EngineProcess(_PEER, settings, cache_directory("logs") / f"{_PEER}.log", timeout=_TIMEOUT)
    try:
        for path in _PEER_PATHS:
            with TemporaryDirectory() as folder:
                output = Path(folder) / "logits.f32"
                shape = peer.ask("logits", token_ids=token_ids, path=path, output=str(output))
                yield f"{_PEER}: {path}", torch.from_numpy(np.fromfile(output, "<f4").reshape(shape))
    finally:
        peer.close()


def _as_table(rows: dict[str, Divergence], title: str) -> Table:
    table = Table(title=title)
    for heading in ("", "mean KL", "p99 KL", "top-1 agreement"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in rows.items():
        table.add_row(name, f"{row.mean_kl:.5f}", f"{row.p99_kl:.5f}", f"{row.top1:.2%}")
    return table


def main(
    model: Annotated[str, typer.Option(help="smollm2, qwen1.5b, or the path of a GGUF file")] = "smollm2",
    tokens: Annotated[int, typer.Option(min=2, help="Length of the text")] = 768,
    text: Annotated[Path | None, typer.Option(help="A text file instead of the Python reference's prose")] = None,
    streams: Annotated[int, typer.Option(min=1, help="Streams of the batched decode")] = _STREAMS,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the greedy texts")] = 64,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    output: Annotated[Path | None, typer.Option(help="JSON file; default: in the cache directory")] = None,
) -> None:
    """Measure mean KL and top-1 agreement against float32, by path through the engine, and how texts depend on the
    batch.
    """
    path, num_threads = model_path(model), threads or usable_processors()
    torch.set_num_threads(num_threads)
    builder = TextModelBuilder(path).with_num_threads(num_threads)
    reference = open_engine(builder.with_dtype("float32"))
    tokenizer = reference.parts.text.tokenizer
    token_ids = tokenizer.encode(text.read_text() if text else prose(), add_special_tokens=False)[:tokens]
    expected = reference.logits(token_ids, chunk=reference.parts.config.max_num_batched_tokens)
    del reference

    rows = {name: divergence(expected, logits) for name, logits in own_paths(builder, token_ids, streams)}
    if _PEER in installed_engines():
        settings = EngineSettings(str(path), num_threads, len(token_ids), 1)
        rows |= {name: divergence(expected, logits) for name, logits in _peer_logits(settings, token_ids)}

    prompts = [PromptMaker(tokenizer).make(32, f"Text {index}").token_ids for index in range(streams)]

    async def compare_texts() -> BatchDependence:
        async with builder.build() as built:
            return await batch_dependence(built, prompts, max_tokens)

    dependence = asyncio.run(compare_texts())
    report: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.quality", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": path.name,
        "tokens": len(token_ids),
        "text_sha256": hashlib.sha256(tokenizer.decode(token_ids).encode()).hexdigest(),
        "paths": {name: asdict(row) for name, row in rows.items()},
        "batch_dependence": asdict(dependence),
    }
    target = output or cache_directory("results") / f"{path.stem}-quality.json"
    target.write_text(json.dumps(report, indent=2) + "\n")
    console = Console()
    console.print(_as_table(rows, f"{path.name}: against float32, {len(token_ids)} tokens of prose"))
    console.print(
        f"{dependence.different} of {dependence.texts} greedy texts of {max_tokens} tokens differ when {streams} run "
        f"together (after {dependence.common_characters:.0f} characters on average)"
    )
    console.print(f"written to {target}")


if __name__ == "__main__":
    typer.run(main)
