"""Holds what benchmarks of a decode step's cost share: their options, and an engine with prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Self

import torch
import typer
from attrs import frozen

from benchmarks.inside import open_engine
from benchmarks.models import model_path
from benchmarks.prompts import PromptMaker
from paged_sdk import Model, TextModelBuilder
from paged_sdk.system.processors import usable_processors

__all__ = ["ModelName", "Rounds", "StepRounds", "Streams", "Threads", "Tokens"]

ModelName = Annotated[str, typer.Option(help="smollm2, qwen1.5b, or the path of a GGUF file")]
Streams = Annotated[int, typer.Option(min=1)]
Tokens = Annotated[int, typer.Option(min=8, help="Tokens of each text")]
Rounds = Annotated[int, typer.Option(min=1)]
Threads = Annotated[int | None, typer.Option(min=1)]


@frozen
class StepRounds:
    """Describes rounds of texts that one engine generates.

    :ivar path: the model's file
    :ivar streams: texts of each round
    :ivar rounds: rounds of each kind
    """

    path: Path
    streams: int
    rounds: int
    num_threads: int

    @classmethod
    def of(cls, model: str, streams: int, rounds: int, threads: int | None) -> Self:
        """Make the description from options, and set torch's number of threads."""
        made = cls(model_path(model), streams, rounds, threads or usable_processors())
        torch.set_num_threads(made.num_threads)
        return made

    @property
    def title(self) -> str:
        """Return a title for results."""
        return f"{self.path.name}: {self.streams} streams, {self.num_threads} threads, {self.rounds} rounds"

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Model, list[list[int]]]]:
        """Load the model, and yield it with a prompt of 64 tokens for each stream."""
        builder = TextModelBuilder(self.path).with_num_threads(self.num_threads).with_max_num_seqs(self.streams)
        engine = open_engine(builder)
        maker = PromptMaker(engine.parts.text.tokenizer)
        prompts = [maker.make(64, f"Stream {index}").token_ids for index in range(self.streams)]
        async with engine.start() as model:
            yield model, prompts
