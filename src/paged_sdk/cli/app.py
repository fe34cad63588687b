"""Define the commands."""

from __future__ import annotations

import typer

from paged_sdk.cli.options import Version
from paged_sdk.cli.run import run

__all__ = ["app"]

# Errors of this package are shown in one line; any other is a bug, and its traceback is what a report needs.
app: typer.Typer = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(run)


# A callback keeps `run` a command of its own as long as it is the only one.
@app.callback()
def paged_sdk(version: Version = False) -> None:
    """Run large language models on a paged-attention engine."""
