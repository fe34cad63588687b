"""Defines the options of ``paged-sdk run`` for prompt and sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from attrs import frozen

from paged_sdk.cli.groups import Setting

__all__ = ["PromptOptions", "SamplingOptions"]

SAMPLING = "Sampling"


@frozen(kw_only=True)
class PromptOptions:
    """Holds the prompt, and how it is sent."""

    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT", help="The prompt. Default: stdin if that is a pipe or file, otherwise a chat."
        ),
    ] = None
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Chat over several turns.")] = False
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")] = None
    image: Annotated[
        tuple[Path, ...],
        typer.Option(
            "--image",
            metavar="FILE",
            help="An image for the prompt; repeatable.",
            exists=True,
            dir_okay=False,
        ),
    ] = ()
    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema",
            metavar="FILE_OR_JSON",
            help="Constrain answers to a JSON schema: a file, or the schema itself.",
        ),
    ] = None
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without a chat template.")] = (
        False
    )


@frozen(kw_only=True)
class SamplingOptions:
    """Holds the sampling settings. Sampling is greedy unless any option but ``--max-tokens`` is given."""

    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="Maximum number of tokens to generate.", rich_help_panel=SAMPLING),
        Setting("max_len"),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            help="Divides the logits; 0 is greedy. Without any sampling option but --max-tokens, sampling is greedy.",
            rich_help_panel=SAMPLING,
        ),
    ] = None
    top_k: Annotated[
        int | None, typer.Option("--top-k", help="Keep the k likeliest tokens.", rich_help_panel=SAMPLING)
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help="Keep the likeliest tokens that together reach p.", rich_help_panel=SAMPLING),
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(
            "--min-p", help="Keep tokens at least this fraction as likely as the likeliest.", rich_help_panel=SAMPLING
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option("--seed", help="Random seed, for repeatable output.", rich_help_panel=SAMPLING)
    ] = None
