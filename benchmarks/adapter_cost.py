"""Measure what adapters add to a step's time, and how long running texts stall while an adapter is loaded.

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
from attrs import define
from rich.console import Console
from safetensors.torch import save_file

from benchmarks.models import model_path
from benchmarks.prompts import PromptMaker, tokenizer_of
from benchmarks.timings import tokens_per_second
from paged_sdk import GgufModelBuilder, Model, SamplingParams
from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.models.family import read_config
from paged_sdk.weights.checkpoint import open_checkpoint

__all__ = ["Waits", "main", "measure_waits"]

_ALPHA: Final = 32


def _write_adapter(directory: Path, shape: DecoderConfig, rank: int, seed: int) -> Path:
    """Write an adapter in PEFT's format."""
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


@define
class Waits:
    """Holds times between tokens, in seconds.

    :ivar step: median
    :ivar longest: longest time of any text, while no adapter was loaded
    :ivar while_loading: longest time of any text, while an adapter was loaded
    """

    step: float
    longest: float
    while_loading: float


async def measure_waits(model: Model, prompts: list[list[int]], source: Path) -> Waits:
    """Load an adapter while a text of each prompt is generated.

    :param source: the adapter, which is unloaded afterwards
    """
    sampling = SamplingParams(temperature=0.0, max_len=4096, ignore_eos=True)
    counts, waits, arrived = [0] * len(prompts), list[float](), asyncio.Event()
    running = set(range(len(prompts)))

    async def one(number: int) -> None:
        before = None
        async with model.stream_completion_request(prompts[number], sampling) as stream:
            async for _ in stream:
                now = time.perf_counter()
                if before is not None:
                    waits.append(now - before)
                before = now
                counts[number] += 1
                arrived.set()
        running.discard(number)
        arrived.set()

    async def take() -> list[float]:
        """Wait until each text has one more token or has ended, and return the times that they waited."""
        seen = list(counts)
        while any(counts[number] == seen[number] for number in running):
            arrived.clear()
            await arrived.wait()
        taken = list(waits)
        waits.clear()
        return taken

    texts = [asyncio.create_task(one(number)) for number in range(len(prompts))]
    try:
        for _ in range(3):  # the prompts' steps
            await take()
        begun = time.perf_counter()
        await model.load_adapter(source, name="late")
        took, loading = time.perf_counter() - begun, await take()
        await asyncio.sleep(took)
        plain = await take()
    finally:
        for text in texts:
            text.cancel()
        await asyncio.gather(*texts, return_exceptions=True)
    await model.unload_adapter("late")
    return Waits(step=median([*plain, *loading]), longest=max(plain), while_loading=max(loading))


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
                rates["base"].append(await tokens_per_second(model, ids, length))
                rates["adapters"].append(await tokens_per_second(model, ids, length, own))
            base, adapted = (median(rates[key]) for key in ("base", "adapters"))
            share = median(b / a for a, b in zip(rates["base"], rates["adapters"], strict=True))
            console.print(f"{streams} texts: {base:.1f} tok/s, through {adapters} adapters {adapted:.1f} ({share:.2f})")
            found = [await measure_waits(model, ids, sources[-1]) for _ in range(rounds)]
            step, longest, loading = (
                1000 * median(values)
                for values in zip(*((each.step, each.longest, each.while_loading) for each in found), strict=True)
            )
            console.print(
                f"a token each {step:.0f} ms; longest wait for one: {longest:.0f} ms, "
                f"while an adapter is loaded {loading:.0f} ms: {(loading - longest) / step:.1f} steps more"
            )


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
