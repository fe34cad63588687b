"""Define the options of ``paged-sdk bench`` that say what is measured."""

from __future__ import annotations

from typing import Annotated

import typer
from attrs import frozen

__all__ = ["BenchOptions"]

MEASURED = "What is measured"


@frozen(kw_only=True)
class BenchOptions:
    """Says what is measured, and how often."""

    prompt_len: Annotated[
        int,
        typer.Option(
            "--prompt-len", min=0, help="Tokens of a prompt that is computed; 0: none.", rich_help_panel=MEASURED
        ),
    ] = 512
    gen_len: Annotated[int, typer.Option("--gen-len", min=2, help="Tokens of each text.", rich_help_panel=MEASURED)] = (
        128
    )
    depth: Annotated[
        int,
        typer.Option("--depth", min=1, help="Tokens of the prompt in front of each text.", rich_help_panel=MEASURED),
    ] = 4
    streams: Annotated[
        tuple[int, ...],
        typer.Option(
            "--streams",
            min=1,
            metavar="N",
            help="Texts at once; may be given several times. By default 1 and 4.",
            rich_help_panel=MEASURED,
        ),
    ] = ()
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas",
            min=1,
            help="Processes that hold the model, each as a whole, as serve has them.",
            rich_help_panel=MEASURED,
        ),
    ] = 1
    iterations: Annotated[
        int, typer.Option("--iterations", min=1, help="Runs, of which the median counts.", rich_help_panel=MEASURED)
    ] = 3
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Runs before them that do not count.", rich_help_panel=MEASURED)
    ] = 1
