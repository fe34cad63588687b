"""Define the options of ``paged-sdk run`` that say what to ask, and how the answer is chosen."""

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
    """Says what the prompt is, and in which form it is sent."""

    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="What to say. Without it: stdin if that is a pipe or file, else a chat."),
    ] = None
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Chat, keeping the turns.")] = False
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")] = None
    image: Annotated[
        tuple[Path, ...],
        typer.Option(
            "--image",
            metavar="FILE",
            help="An image that the prompt is about; may be given several times.",
            exists=True,
            dir_okay=False,
        ),
    ] = ()
    json_schema: Annotated[
        str | None,
        typer.Option(
            "--json-schema", metavar="FILE_OR_JSON", help="Hold answers to a JSON schema: a file, or the schema itself."
        ),
    ] = None
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as plain text, without a chat template.")] = (
        False
    )


@frozen(kw_only=True)
class SamplingOptions:
    """Says how the next token is chosen: greedy, unless any option but ``--max-tokens`` is given."""

    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", help="Tokens to generate at most.", rich_help_panel=SAMPLING),
        Setting("max_len"),
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            help="Divides the logits; 0 is greedy. Without any option but --max-tokens the choice is greedy.",
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
            "--min-p", help="Keep tokens at least this times as likely as the likeliest.", rich_help_panel=SAMPLING
        ),
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", help="Repeat the same choices.", rich_help_panel=SAMPLING)] = (
        None
    )
