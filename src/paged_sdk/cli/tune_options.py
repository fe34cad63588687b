"""Define the options of ``paged-sdk tune`` that say what the model is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from attrs import frozen

__all__ = ["TuneOptions"]

USE = "What it is for"


@frozen(kw_only=True)
class TuneOptions:
    """Says what the model is for, and what may be suggested."""

    streams: Annotated[
        int, typer.Option("--streams", min=1, help="Texts that are generated at once.", rich_help_panel=USE)
    ] = 4
    context_len: Annotated[
        int | None,
        typer.Option(
            "--context-len",
            min=1,
            help="Tokens of each, prompt and output together: 4096, or what the model takes.",
            rich_help_panel=USE,
        ),
    ] = None
    max_loss: Annotated[
        float,
        typer.Option(
            "--max-loss",
            min=0,
            metavar="PERCENT",
            help="How much higher the perplexity of a short text may become by quantizing.",
            rich_help_panel=USE,
        ),
    ] = 3.0
    types: Annotated[
        tuple[str, ...],
        typer.Option(
            "--try",
            metavar="TYPE",
            help="A type that weights are quantized to; may be given several times. By default Q8_0, Q6K and Q4K.",
            rich_help_panel=USE,
        ),
    ] = ()
    emit_config: Annotated[
        Path | None,
        typer.Option(
            "--emit-config",
            metavar="FILE",
            help="Write what is suggested as a file for from-config and serve --config: JSON, which must not exist.",
            rich_help_panel=USE,
        ),
    ] = None
