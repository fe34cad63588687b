"""Measure every type of in-situ quantization: size, distance from float32, and decode speed against bfloat16.

python -m benchmarks.isq_table --model smollm2
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from attrs import asdict, evolve, frozen
from rich.console import Console
from rich.table import Table

from benchmarks.divergence import divergence
from benchmarks.inside import OpenEngine, open_engine
from benchmarks.machine import describe_machine
from benchmarks.models import model_path
from benchmarks.paths import cache_directory
from benchmarks.prompts import PromptMaker, prose
from paged_sdk import IsqType, SamplingParams, TextModelBuilder
from paged_sdk.processors import usable_processors

__all__ = ["TypeFigures", "measure_type"]

_QUESTION = 16  # tokens of the prompt before what is timed
_REPEATS = 3


@frozen(kw_only=True)
class TypeFigures:
    """Holds what one type reached.

    :ivar bits: bits of a weight in the layers' matrices, scales and padding included
    :ivar mean_kl: Kullback-Leibler divergence from float32 over a text, on the path of a prompt, in nats
    :ivar top1: share of positions whose likeliest token is the same
    :ivar tokens_per_second: one stream of generated tokens
    """

    bits: float
    mean_kl: float
    top1: float
    tokens_per_second: float


def measure_type(
    builder: TextModelBuilder, token_ids: Sequence[int], expected: torch.Tensor, *, output: int
) -> TypeFigures:
    """Measure a builder's model.

    :param expected: the reference's logits of the text, ``[len(token_ids), vocab_size]``
    :param output: generated tokens of each of three texts, of which the median counts
    """
    engine = open_engine(builder)
    found = divergence(expected, engine.logits(token_ids, chunk=engine.parts.config.max_num_batched_tokens))
    bits = engine.bits_per_weight
    return TypeFigures(
        bits=bits, mean_kl=found.mean_kl, top1=found.top1, tokens_per_second=asyncio.run(_speed(engine, output))
    )


async def _speed(engine: OpenEngine, output: int) -> float:
    prompt = PromptMaker(engine.parts.text.tokenizer).make(_QUESTION, "Short").token_ids
    sampling = evolve(SamplingParams.deterministic(), max_len=output, ignore_eos=True)
    async with engine.start() as model:
        usage = [(await model.send_completion_request(prompt, sampling)).usage for _ in range(_REPEATS)]
    return statistics.median((each.completion_tokens - 1) / each.total_completion_time_sec for each in usage)


def _as_table(rows: dict[str, TypeFigures], title: str) -> Table:
    table = Table(title=title)
    for heading in ("", "bits per weight", "mean KL", "top-1 agreement", "tok/s", "of bfloat16"):
        table.add_column(heading, justify="right" if heading else "left")
    dense = rows["bfloat16"].tokens_per_second
    for name, row in rows.items():
        speed = row.tokens_per_second
        cells = (f"{row.bits:.2f}", f"{row.mean_kl:.5f}", f"{row.top1:.1%}", f"{speed:.1f}", f"{speed / dense:.2f}")
        table.add_row(name, *cells)
    return table


def main(
    model: Annotated[str, typer.Option(help="smollm2, qwen1.5b, or the path of a model")] = "smollm2",
    types: Annotated[str, typer.Option(help="Names with commas between them; default: every type")] = "",
    tokens: Annotated[int, typer.Option(min=2, help="Length of the text")] = 512,
    output: Annotated[int, typer.Option(min=2, help="Generated tokens of each timed text")] = 64,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    json_file: Annotated[Path | None, typer.Option(help="Default: in the cache directory")] = None,
) -> None:
    """Measure bits per weight, mean KL against float32 and decode speed of every type."""
    path, num_threads = model_path(model), threads or usable_processors()
    torch.set_num_threads(num_threads)
    builder = TextModelBuilder(path).with_num_threads(num_threads)
    reference = open_engine(builder.with_dtype("float32"))
    token_ids = reference.parts.text.tokenizer.encode(prose(), add_special_tokens=False)[:tokens]
    expected = reference.logits(token_ids, chunk=reference.parts.config.max_num_batched_tokens)
    del reference
    chosen = [IsqType.parse(name, setting="--types") for name in types.split(",") if name] or list(IsqType)
    rows = {"bfloat16": measure_type(builder.with_dtype("bfloat16"), token_ids, expected, output=output)}
    for isq in chosen:
        rows[isq.value] = measure_type(builder.with_isq(isq), token_ids, expected, output=output)
    target = json_file or cache_directory("results") / f"{path.stem}-isq.json"
    report = {
        "command": " ".join(["python -m benchmarks.isq_table", *sys.argv[1:]]),
        "machine": describe_machine(),
        "model": path.name,
        "tokens": len(token_ids),
        "types": {name: asdict(row) for name, row in rows.items()},
    }
    target.write_text(json.dumps(report, indent=2) + "\n")
    console = Console()
    console.print(_as_table(rows, f"{path.name}: against float32, {len(token_ids)} tokens of prose"))
    console.print(f"written to {target}")


if __name__ == "__main__":
    typer.run(main)
