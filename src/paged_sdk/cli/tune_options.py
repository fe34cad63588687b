"""Defines the options of ``paged-sdk tune`` that describe the intended use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from attrs import frozen

__all__ = ["TuneOptions"]

USE = "Intended use"


@frozen(kw_only=True)
class TuneOptions:
    """Describes the intended use of the model, and which suggestions are acceptable."""

    streams: Annotated[int, typer.Option("--streams", min=1, help="Concurrent texts.", rich_help_panel=USE)] = 4
    context_len: Annotated[
        int | None,
        typer.Option(
            "--context-len",
            min=1,
            help="Tokens per text, prompt and output together. Default: 4096, or the model's context if that is less.",
            rich_help_panel=USE,
        ),
    ] = None
    max_loss: Annotated[
        float,
        typer.Option(
            "--max-loss",
            min=0,
            metavar="PERCENT",
            help="How much quantization may raise the perplexity of a short text.",
            rich_help_panel=USE,
        ),
    ] = 3.0
    types: Annotated[
        tuple[str, ...],
        typer.Option(
            "--try",
            metavar="TYPE",
            help="A quantization type to try; repeatable. Default: Q8_0, Q6K and Q4K.",
            rich_help_panel=USE,
        ),
    ] = ()
    emit_config: Annotated[
        Path | None,
        typer.Option(
            "--emit-config",
            metavar="FILE",
            help="Write the suggestion to a new JSON file for from-config and serve --config.",
            rich_help_panel=USE,
        ),
    ] = None
