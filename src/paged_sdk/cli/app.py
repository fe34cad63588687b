"""Define the commands."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from paged_sdk.cli.options import SPECULATE, Version
from paged_sdk.cli.quantize import quantize
from paged_sdk.cli.run import run
from paged_sdk.cli.serve import serve

__all__ = ["app"]

# Errors of this package are shown in one line; any other is a bug, and its traceback is what a report needs.
app: typer.Typer = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class _Command(TyperCommand):
    """Reads the one option whose value may be left out, which typer has no form for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from paged_sdk import SpeculativeConfig  # which help does without

        given: list[str] = []
        for place, arg in enumerate(args):
            if arg == "--":
                given += args[place:]
                break
            given.append(arg)
            follows = args[place + 1] if place + 1 < len(args) else ""
            if arg == SPECULATE and not _is_number(follows):
                given.append(str(SpeculativeConfig().gamma))
        return super().parse_args(ctx, given)


def _is_number(arg: str) -> bool:
    return arg.removeprefix("-").isdecimal()


app.command(cls=_Command)(run)
app.command(cls=_Command)(serve)
app.command()(quantize)


@app.callback()
def paged_sdk(version: Version = False) -> None:
    """Run large language models on a paged-attention engine."""
