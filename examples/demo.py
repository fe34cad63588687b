"""`make demo`: a streamed chat of two turns, with its figures.

python examples/demo.py [MODEL]
"""

from __future__ import annotations

import sys
import time

import anyio
from rich.console import Console
from rich.table import Table

from paged_sdk import Conversation, Model, SamplingParams, TextModelBuilder, Usage, embedded_model_path

SYSTEM = (
    "You are a friendly teacher of natural science. You explain things to curious beginners in plain words, with one "
    "example from everyday life, and you never use more than four sentences."
)
QUESTIONS = ("What is photosynthesis?", "And what do animals get from it?")
MAX_TOKENS = 96


async def stream_turn(chat: Conversation, question: str, console: Console) -> Usage:
    """Ask, and print the answer as it comes."""
    console.print(f"[bold cyan]You[/]    {question}")
    console.print("[bold green]Model[/]  ", end="")
    async with chat.stream(question) as stream:
        async for chunk in stream:
            for choice in chunk.choices:
                console.out(choice.delta.content, end="", highlight=False)
    console.print("\n")
    return stream.response_so_far().usage


def figures(usages: list[Usage]) -> Table:
    table = Table(title="Figures by turn")
    for heading in ("turn", "prompt", "from prefix cache", "first token", "generated", "tokens/s"):
        table.add_column(heading, justify="right")
    for turn, usage in enumerate(usages, 1):
        cached = usage.prompt_tokens_details.cached_tokens
        table.add_row(
            str(turn),
            f"{usage.prompt_tokens} tokens",
            f"{cached} tokens ({cached / usage.prompt_tokens:.0%})",
            f"{usage.time_to_first_token_sec * 1000:.0f} ms",
            f"{usage.completion_tokens} tokens",
            f"{usage.avg_compl_tok_per_sec:.1f}",
        )
    return table


def summary(model: Model) -> str:
    stats = model.stats()
    return (
        f"Prefix cache: {stats.prefix_hits} of {stats.prefix_queries} prompt tokens found "
        f"({stats.prefix_hit_rate:.0%}); KV pool: {stats.blocks_total} blocks of {model.config.block_size} tokens, "
        f"{stats.blocks_cached} of them hold prefixes for the next turn."
    )


async def main(model_path: str | None = None) -> None:
    console = Console()
    start = time.perf_counter()
    async with TextModelBuilder(model_path or embedded_model_path()).with_logging().build() as model:
        console.print(f"[bold]{model.name}[/] loaded in {time.perf_counter() - start:.1f} s\n")
        sampling = SamplingParams(temperature=0.0, max_len=MAX_TOKENS)
        chat = Conversation(model, system=SYSTEM, sampling=sampling)
        usages = [await stream_turn(chat, question, console) for question in QUESTIONS]
        console.print(figures(usages))
        console.print(summary(model))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
