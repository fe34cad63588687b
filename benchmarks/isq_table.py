"""Measure every type of in-situ quantization: size, divergence from float32, decode speed against bfloat16, time and
memory of loading, and errors relative to llama.cpp's quantizer.

python -m benchmarks.isq_table --model smollm2                   every type
python -m benchmarks.isq_table --model qwen1.5b --types Q4K      one type, added to the table measured before

The model is a checkpoint of the file's weights in bfloat16. Each type is measured in a separate process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from attrs import asdict
from rich.console import Console
from rich.table import Table

from benchmarks.inside import open_engine
from benchmarks.isq_row import DENSE, RowSettings
from benchmarks.machine import describe_machine
from benchmarks.models import benchmark_model
from benchmarks.paths import cache_directory
from benchmarks.prompts import prose
from paged_sdk import IsqType, TextModelBuilder
from paged_sdk.system.processors import usable_processors

__all__ = ["shown"]

_HEADINGS: Final = (
    "", "bits per weight", "mean KL", "top-1 agreement", "tok/s", "of bfloat16", "error", "of llama.cpp's",
    "load, s", "peak, MiB", "held, MiB",
)  # fmt: skip


def shown(rows: dict[str, dict[str, Any]], title: str) -> Table:
    """Return measured rows as a table, sorted by bits per weight."""
    table = Table(title=title)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in sorted(rows.items(), key=lambda each: -each[1]["bits"]):
        loading, errors = row["loading"] or {}, row["errors"] or {}
        cells = (
            (row["bits"], ".2f"), (row["mean_kl"], ".5f"), (row["top1"], ".1%"), (row["tokens_per_second"], ".1f"),
            (row["times_dense"], ".2f"), (errors.get("relative"), ".4f"), (errors.get("to_ggml"), ".3f"),
            (loading.get("seconds"), ".1f"), (loading.get("peak_mib"), ".0f"), (loading.get("held_mib"), ".0f"),
        )  # fmt: skip
        table.add_row(name, *("" if value is None else format(value, form) for value, form in cells))
    return table


def _expected(path: Path, target: Path, num_tokens: int, num_threads: int) -> None:
    """Write a text's token ids and the float32 model's logits."""
    torch.set_num_threads(num_threads)
    reference = open_engine(TextModelBuilder(path).with_num_threads(num_threads).with_dtype("float32"))
    token_ids = reference.parts.text.tokenizer.encode(prose(), add_special_tokens=False)[:num_tokens]
    logits = reference.logits(token_ids, chunk=reference.parts.config.max_num_batched_tokens)
    torch.save({"token_ids": list(token_ids), "logits": logits}, target)


def _measured(settings: RowSettings) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.isq_row", json.dumps(asdict(settings))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main(
    model: Annotated[str, typer.Option(help="smollm2, qwen1.5b, or the path of a GGUF file")] = "smollm2",
    types: Annotated[str, typer.Option(help=f"Names with commas between them, {DENSE} too; default: all")] = "",
    tokens: Annotated[int, typer.Option(min=2, help="Length of the text")] = 384,
    output: Annotated[int, typer.Option(min=0, help="Generated tokens of each timed text; 0: no times")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Timed texts, of which the best counts")] = 5,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    again: Annotated[bool, typer.Option(help="Forget what was measured before")] = False,
) -> None:
    """Measure bits per weight, mean KL, decode speed, errors, and the time and memory of loading of every type."""
    dense, num_threads = benchmark_model(f"{model}-bf16"), threads or usable_processors()
    path = dense.path_for(("directory",))
    assert path is not None
    named = [name for name in types.split(",") if name] or [DENSE, *(isq.value for isq in IsqType)]
    chosen = [name if name == DENSE else IsqType.parse(name, setting="--types").value for name in named]
    target = cache_directory("results") / f"{dense.source.stem}-isq.json"
    expected = target.with_name(f"{dense.source.stem}-{tokens}-float32.pt")
    report: dict[str, Any] = json.loads(target.read_text()) if target.exists() and not again else {}
    rows: dict[str, dict[str, Any]] = report["types"] if report.get("tokens") == tokens else {}
    if again or not expected.exists():
        _expected(path, expected, tokens, num_threads)
    machine = describe_machine()
    for name in chosen:
        settings = RowSettings(
            path=str(path), isq=name, expected=str(expected), num_threads=num_threads, output=output, rounds=rounds
        )
        rows[name] = _measured(settings) | {"commit": machine["commit"], "load_average": machine["load_average"]}
        target.write_text(
            json.dumps({"model": path.name, "tokens": tokens, "machine": machine, "types": rows}, indent=2) + "\n"
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(shown(rows, f"{path.name}: against float32, {tokens} tokens of prose"))
    console.print(f"written to {target}")


if __name__ == "__main__":
    typer.run(main)
