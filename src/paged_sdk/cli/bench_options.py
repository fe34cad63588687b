"""Defines the options of ``paged-sdk bench`` that select the measurements."""

from __future__ import annotations

from typing import Annotated

import typer
from attrs import frozen

__all__ = ["BenchOptions"]

MEASURED = "Measurements"


@frozen(kw_only=True)
class BenchOptions:
    """Selects the measurements and their number of runs."""

    prompt_len: Annotated[
        int,
        typer.Option(
            "--prompt-len", min=0, help="Tokens per measured prompt; 0: measure no prompts.", rich_help_panel=MEASURED
        ),
    ] = 512
    gen_len: Annotated[
        int, typer.Option("--gen-len", min=2, help="Tokens to generate per text.", rich_help_panel=MEASURED)
    ] = 128
    depth: Annotated[
        int,
        typer.Option("--depth", min=1, help="Prompt tokens before each text.", rich_help_panel=MEASURED),
    ] = 4
    streams: Annotated[
        tuple[int, ...],
        typer.Option(
            "--streams",
            min=1,
            metavar="N",
            help="Concurrent texts; repeatable. Default: 1 and 4.",
            rich_help_panel=MEASURED,
        ),
    ] = ()
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas",
            min=1,
            help="Number of processes, each with the whole model, as for serve.",
            rich_help_panel=MEASURED,
        ),
    ] = 1
    iterations: Annotated[
        int,
        typer.Option("--iterations", min=1, help="Measured runs; the median is reported.", rich_help_panel=MEASURED),
    ] = 3
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Runs before these that are not measured.", rich_help_panel=MEASURED)
    ] = 1
