"""Defines the commands."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from paged_sdk.cli.bench import bench
from paged_sdk.cli.doctor import doctor
from paged_sdk.cli.from_config import from_config
from paged_sdk.cli.options import PAGED_ATTN, SPECULATE, ModelFormat, PagedAttnMode, Version
from paged_sdk.cli.quantize import quantize
from paged_sdk.cli.run import run
from paged_sdk.cli.serve import serve
from paged_sdk.cli.server_options import LOG_JSON
from paged_sdk.cli.top import top
from paged_sdk.cli.tune import tune
from paged_sdk.cli.usage_error import UsageError

__all__ = ["app"]

KINDS = tuple(kind.value for kind in ModelFormat)
OPTIONS_OF_KINDS = ("-m", "--model-id", "--model", "-a", "--arch", "-t", "--tok-model-id", "-f", "--quantized-file")
"""Options of mistral.rs after ``plain`` or ``gguf``: such a word is a format only before one of these, else a prompt.
"""

OPTIONS_OF_NO_COMMAND = ("--help", "--version", "--install-completion", "--show-completion", "--")


class _Flags:
    """Shows flags without a value in the help; typer would show their type."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # the command class beside this one has it
        for each in params:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return params


class _Group(_Flags, TyperGroup):
    """Takes a command line that begins with an option for one of ``run``, as mistral.rs does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_of_run = bool(args) and args[0].startswith("-") and args[0] not in OPTIONS_OF_NO_COMMAND
        return super().parse_args(ctx, ["run", *args] if is_of_run else args)


# Errors of this package are shown in one line. Any other exception is a bug, for which a report needs the traceback.
app: typer.Typer = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False)


class _Command(_Flags, TyperCommand):
    """Defines a command without special parsing."""


class _ModelCommand(_Command):
    """Parses options with an optional value, which typer does not support, and mistral.rs's words for formats:
    ``plain -m ...`` is ``--format plain -m ...``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from paged_sdk import SpeculativeConfig  # not needed for --help

        takes_value = {name for each in self.params if not getattr(each, "is_flag", True) for name in each.opts}
        given: list[str] = []
        is_value = False
        for place, arg in enumerate(args):
            if arg == "--":
                given += args[place:]
                break
            follows = args[place + 1] if place + 1 < len(args) else ""
            if arg in KINDS and not is_value and follows in OPTIONS_OF_KINDS:
                given += ["--format", arg]
                continue
            given.append(arg)
            is_value = arg in takes_value
            if arg == SPECULATE and not _is_number(follows):
                given.append(str(SpeculativeConfig().gamma))
                is_value = False
            if arg == PAGED_ATTN and follows.lower() not in [mode.value for mode in PagedAttnMode]:
                given.append(PagedAttnMode.ON.value)
                is_value = False
        return super().parse_args(ctx, given)


class _ServerCommand(_ModelCommand):
    """Reports errors of its command line as log lines, if that asks for them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, list(args))
        except UsageError:
            if LOG_JSON in args:
                from paged_sdk.cli.terminal import Terminal  # not needed for --help

                terminal = Terminal(quiet=False)
                terminal.log_as_json()
                with terminal.reporting(verbose=False):
                    raise
            raise


def _is_number(arg: str) -> bool:
    return arg.removeprefix("-").isdecimal()


app.command(cls=_ModelCommand)(run)
app.command(cls=_ServerCommand)(serve)
app.command(cls=_ModelCommand)(bench)
app.command(cls=_ModelCommand)(tune)
app.command(cls=_Command)(quantize)
app.command(cls=_ModelCommand)(doctor)
app.command(cls=_Command)(top)
app.command("from-config", cls=_Command)(from_config)


@app.callback()
def paged_sdk(version: Version = False) -> None:
    """Run large language models on a paged-attention engine."""
