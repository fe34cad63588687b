"""Reports errors of a command line by the options as the user typed them."""

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
    """Run a command's body with a terminal, and turn exceptions into an error line and an exit code.

    :param command: the command, by whose options errors are named
    :raises typer.Exit: the command failed or was interrupted
    :raises typer.BadParameter: invalid value of an option
    """
    terminal = Terminal(quiet=output.quiet)
    with terminal.reporting(verbose=output.verbose), _naming_options(command):
        exclusive({"--verbose": output.verbose, "--quiet": output.quiet})
        yield terminal


@contextmanager
def _naming_options(command: Callable[..., None]) -> Iterator[None]:
    """Translate errors of settings into errors of the options that set them.

    :raises typer.BadParameter: instead of a ConfigError that concerns an option or argument
    """
    try:
        yield
    except ConfigError as error:
        spelling = spellings_of_settings(command).get(error.setting.rpartition(".")[2])
        if spelling is None:  # for example, a setting from an environment variable
            raise
        _, _, why = str(error).partition(" = ")
        # On a command line, None means to leave the option out.
        raise typer.BadParameter(why.removesuffix(" or None") or str(error), param_hint=spelling) from error


def exclusive(flags: Mapping[str, object]) -> None:
    """Check that at most one of these flags was given.

    :param flags: values by spelling; None, False and () mean that the flag was not given
    :raises typer.BadParameter: naming the flags that were given
    """
    given = [flag for flag, value in flags.items() if value is not None and value is not False and value != ()]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} exclude each other")


def only(flags: Mapping[str, str | None]) -> str | None:
    """Return the value of the only flag that was given; None if none was.

    :param flags: values by spelling
    :raises typer.BadParameter: several were given
    """
    exclusive(flags)
    return next((value for value in flags.values() if value is not None), None)
