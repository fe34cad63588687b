"""Reports errors of a command line by the options as the user typed them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer

from paged_sdk import ConfigError, ModelLoadError
from paged_sdk.cli.advice import in_options
from paged_sdk.cli.groups import spellings_of_settings
from paged_sdk.cli.options import OutputOptions
from paged_sdk.cli.terminal import Terminal

__all__ = ["excluding", "exclusive", "is_path_of", "naming_options", "only", "reporting", "without_setting"]


@contextmanager
def reporting(
    command: Callable[..., None],
    output: OutputOptions,
    given: Mapping[str, object] | None = None,
    *,
    log_json: bool = False,
) -> Iterator[Terminal]:
    """Run a command's body with a terminal, and turn exceptions into an error line and an exit code.

    :param command: the command, by whose options errors are named
    :param given: values of the options and arguments that may be paths to read from, by name; None: none may
    :param log_json: whether errors are log lines in JSON
    :raises typer.Exit: the command failed or was interrupted
    :raises typer.BadParameter: invalid value of an option
    """
    terminal = Terminal(quiet=output.quiet, spellings=spellings_of_settings(command))
    if log_json:
        terminal.log_as_json()
    with terminal.reporting(verbose=output.verbose), naming_options(command, given or {}):
        exclusive({"--verbose": output.verbose, "--quiet": output.quiet})
        yield terminal


@contextmanager
def naming_options(command: Callable[..., None], given: Mapping[str, object]) -> Iterator[None]:
    """Translate errors of settings, and of paths that do not exist, into errors of the options that set them.

    :raises typer.BadParameter: instead of a ConfigError or ModelLoadError that concerns an option or argument
    """
    try:
        yield
    except ConfigError as error:
        spellings = spellings_of_settings(command)
        spelling = spellings.get(error.setting.rpartition(".")[2])
        if spelling is None:  # for example, a setting from an environment variable
            raise
        raise typer.BadParameter(in_options(without_setting(error), spellings), param_hint=spelling) from error
    except ModelLoadError as error:
        name = _with_missing_path(given, error.path)
        if name is None:
            raise
        spellings = spellings_of_settings(command)
        raise typer.BadParameter(in_options(str(error), spellings), param_hint=spellings[name]) from error


def without_setting(error: ConfigError) -> str:
    """Return what an error says of a setting's value, without the setting's name."""
    _, _, why = str(error).partition(" = ")
    # On a command line, and in a file, None means to leave the option out.
    return why.removesuffix(" or None") or str(error)


def _with_missing_path(given: Mapping[str, object], path: str | Path | None) -> str | None:
    """Return the name of the option whose value is this path, if the path does not exist.

    :param path: the path that an error is about; a text is an id on the Hub
    """
    if not isinstance(path, Path) or os.path.lexists(path):
        return None
    return next((name for name, value in given.items() if is_path_of(name, value, path)), None)


def is_path_of(name: str, value: object, path: Path) -> bool:
    """Tell whether an option's value, or one of its values, names a path.

    :param name: the option's name in Python
    """
    for each in value if isinstance(value, list | tuple) else [value]:
        # --adapter takes NAME=PATH.
        texts = (str(each), str(each).partition("=")[2]) if isinstance(each, str | Path) else ()
        if path in [Path(os.path.expanduser(text)) for text in texts]:
            return True
        # The name of a file within the model's directory.
        if name == "quantized_file" and (parts := Path(str(each)).parts) and path.parts[-len(parts) :] == parts:
            return True
    return False


def exclusive(flags: Mapping[str, object]) -> None:
    """Check that at most one of these flags was given.

    :param flags: values by spelling; None, False and () mean that the flag was not given
    :raises typer.BadParameter: naming the flags that were given
    """
    given = [flag for flag, value in flags.items() if value is not None and value is not False and value != ()]
    if len(given) > 1:
        raise typer.BadParameter(f"{' and '.join(given)} exclude each other")


def excluding(flag: str, value: object, others: Mapping[str, object]) -> None:
    """Check that none of the other flags was given, if this one was. Values are those of :func:`exclusive`.

    :raises typer.BadParameter: naming both flags
    """
    for other, given in others.items():
        exclusive({flag: value, other: given})


def only(flags: Mapping[str, str | None]) -> str | None:
    """Return the value of the only flag that was given; None if none was.

    :param flags: values by spelling
    :raises typer.BadParameter: several were given
    """
    exclusive(flags)
    return next((value for value in flags.values() if value is not None), None)
