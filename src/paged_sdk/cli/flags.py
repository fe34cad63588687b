"""Says what is wrong with a command line, in the person's words: the options as they are typed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import typer

from paged_sdk import ConfigError
from paged_sdk.cli.groups import spellings_of_settings
from paged_sdk.cli.options import OutputOptions
from paged_sdk.cli.terminal import Terminal

__all__ = ["exclusive", "only", "reporting"]


@contextmanager
def reporting(command: Callable[..., None], output: OutputOptions) -> Iterator[Terminal]:
    """Run a command's body with the terminal, and turn what ends it into a line and an exit code.

    :param command: whose options errors are about
    :raises typer.Exit: it failed, or was interrupted
    :raises typer.BadParameter: a value that cannot be used
    """
    terminal = Terminal(quiet=output.quiet)
    with terminal.reporting(verbose=output.verbose), _naming_options(command):
        exclusive({"--verbose": output.verbose, "--quiet": output.quiet})
        yield terminal


@contextmanager
def _naming_options(command: Callable[..., None]) -> Iterator[None]:
    """Show a setting that cannot be used as what the person typed.

    :raises typer.BadParameter: in place of a ConfigError that concerns an option or argument
    """
    try:
        yield
    except ConfigError as error:
        spelling = spellings_of_settings(command).get(error.setting.rpartition(".")[2])
        if spelling is None:  # an environment variable, say
            raise
        _, _, why = str(error).partition(" = ")
        # On a command line, the option is left out instead.
        raise typer.BadParameter(why.removesuffix(" or None") or str(error), param_hint=spelling) from error


def exclusive(flags: Mapping[str, object]) -> None:
    """Check that at most one of these flags was given.

    :param flags: values by spelling; None, False and () are not given
    :raises typer.BadParameter: naming those that were
    """
    given = [flag for flag, value in flags.items() if value is not None and value is not False and value != ()]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} exclude each other")


def only(flags: Mapping[str, str | None]) -> str | None:
    """Return the value of the one of these flags that was given; None: none was.

    :param flags: values by spelling
    :raises typer.BadParameter: several were, which are named
    """
    exclusive(flags)
    return next((value for value in flags.values() if value is not None), None)
