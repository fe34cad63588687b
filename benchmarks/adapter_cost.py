"""Measure what adapters add to a step, and how long running texts wait while one is loaded.

python -m benchmarks.adapter_cost --model qwen1.5b --streams 16 --adapters 8 --rank 16

Rounds with and without adapters alternate in one engine. The adapters have random weights, on all matrices of a layer.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from safetensors.torch import save_file

from benchmarks.models import model_path
from benchmarks.prompts import PromptMaker, tokenizer_of
from paged_sdk import GgufModelBuilder, Model, SamplingParams
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.family import read_config
from paged_sdk.weights.checkpoint import open_checkpoint

__all__ = ["main"]

_ALPHA: Final = 32


def _write_adapter(directory: Path, shape: DecoderConfig, rank: int, seed: int) -> Path:
    """Write an adapter in PEFT's form."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    sides = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(shape.num_layers):
        for name, (columns, rows) in sides.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.01
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in sides]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": _ALPHA, "target_modules": targets, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


async def _round(model: Model, prompts: list[list[int]], names: list[str | None], length: int) -> float:
    """Return how many tokens a second all texts get, once they all run."""
    sampling = SamplingParams(temperature=0.0, max_len=length, ignore_eos=True)
    times: list[float] = []

    async def one(prompt: list[int], name: str | None) -> None:
        options = {} if name is None else {"adapter": name}
        async with model.stream_completion_request(prompt, sampling, **options) as stream:  # type: ignore[arg-type]
            times.extend([time.perf_counter() async for _ in stream])

    await asyncio.gather(*(one(prompt, name) for prompt, name in zip(prompts, names, strict=True)))
    # Prompts come first, and at the end texts of unequal starts end one by one.
    times.sort()
    first, last = len(times) // 4, len(times) * 3 // 4
    return (last - first) / (times[last] - times[first])


async def _longest_wait(model: Model, prompts: list[list[int]], length: int, source: Path | None) -> float:
    """Return the longest time between two tokens of any text, while an adapter is loaded or not."""
    sampling = SamplingParams(temperature=0.0, max_len=length, ignore_eos=True)
    waits: list[float] = []
    running = asyncio.Event()

    async def one(prompt: list[int]) -> None:
        before = None
        async with model.stream_completion_request(prompt, sampling) as stream:
            async for _ in stream:
                now = time.perf_counter()
                if before is not None and running.is_set():
                    waits.append(now - before)
                before = now

    texts = [asyncio.create_task(one(prompt)) for prompt in prompts]
    await asyncio.sleep(1.0)
    running.set()
    if source is not None:
        await model.load_adapter(source, name="late")
    else:
        await asyncio.sleep(0.5)
    running.clear()
    await asyncio.gather(*texts)
    if source is not None:
        await model.unload_adapter("late")
    return max(waits, default=0.0)


async def _measure(path: Path, streams: int, adapters: int, rank: int, length: int, rounds: int) -> None:
    console = Console()
    checkpoint = open_checkpoint(path)
    shape = read_config(checkpoint.config)
    checkpoint.source.close()
    prompts = PromptMaker(tokenizer_of(path))
    with TemporaryDirectory() as scratch:
        sources = [_write_adapter(Path(scratch) / f"a{number}", shape, rank, number) for number in range(adapters + 1)]
        async with GgufModelBuilder(path).build() as model:
            for number, source in enumerate(sources[:-1]):
                await model.load_adapter(source, name=f"a{number}")
            ids = [list(prompts.make(16, f"adapter-{number}").token_ids) for number in range(streams)]
            own: list[str | None] = [f"a{number % adapters}" for number in range(streams)]
            rates: dict[str, list[float]] = {"base": [], "adapters": []}
            for _ in range(rounds):
                rates["base"].append(await _round(model, ids, [None] * streams, length))
                rates["adapters"].append(await _round(model, ids, own, length))
            base, adapted = (median(rates[key]) for key in ("base", "adapters"))
            share = median(b / a for a, b in zip(rates["base"], rates["adapters"], strict=True))
            console.print(f"{streams} texts: {base:.1f} tok/s, through {adapters} adapters {adapted:.1f} ({share:.2f})")
            waits: dict[str, list[float]] = {"loading": [], "not": []}
            for _ in range(rounds):
                waits["not"].append(await _longest_wait(model, ids, length, None))
                waits["loading"].append(await _longest_wait(model, ids, length, sources[-1]))
            without, loading = (median(waits[key]) * 1000 for key in ("not", "loading"))
            console.print(f"longest wait for a token: {without:.0f} ms, while an adapter is loaded {loading:.0f} ms")


def main(
    model: Annotated[str, typer.Option(help="The model, as of `make bench`")] = "qwen1.5b",
    streams: Annotated[int, typer.Option(min=1)] = 16,
    adapters: Annotated[int, typer.Option(min=1)] = 8,
    rank: Annotated[int, typer.Option(min=1)] = 16,
    length: Annotated[int, typer.Option(min=16, help="Tokens of each text")] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Print tokens per second with and without adapters, and the longest wait while one is loaded."""
    asyncio.run(_measure(model_path(model), streams, adapters, rank, length, rounds))


if __name__ == "__main__":
    typer.run(main)
