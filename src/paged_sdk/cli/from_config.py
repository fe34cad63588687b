"""Runs ``paged-sdk from-config``: a command whose options are in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["from_config"]

File = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="A .yaml, .json or .toml file.", exists=True, dir_okay=False)
]
Schema = Annotated[bool, typer.Option("--schema", help="Print the JSON schema of such files.")]


def from_config(ctx: typer.Context, file: File = None, schema: Schema = False) -> None:
    """Run a command with options from a file.

    "command" names the command; the other keys are its options without the leading dashes.
    """
    from paged_sdk.cli.config_file import json_schema, read_arguments  # not needed for --help

    if schema:
        if file is not None:
            raise typer.BadParameter("a file and --schema exclude each other", param_hint="--schema")
        typer.echo(json_schema())
        return
    if file is None:
        raise typer.BadParameter("there is no file: name one, or ask for --schema", param_hint="FILE")
    root = ctx.find_root()
    root.command.main(read_arguments(file), prog_name=root.info_name)
