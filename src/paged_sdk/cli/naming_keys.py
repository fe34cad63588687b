"""Reports errors of a configuration file by its keys, where a command line would be told its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from paged_sdk import ConfigError, ModelLoadError
from paged_sdk.cli.flags import naming_options
from paged_sdk.cli.groups import spellings_of_settings
from paged_sdk.cli.service_file import ServiceFile

__all__ = ["naming_keys"]


@contextmanager
def naming_keys(command: Callable[..., None], file: ServiceFile) -> Iterator[None]:
    """Translate errors of options into errors of the file's keys that set them.

    :param command: the command whose options the file holds
    :param file: without the options that the command line overrides
    :raises typer.BadParameter: naming the file and the key; where the file says nothing of the option, the option
    """
    try:
        with naming_options(command, file.values):
            yield
    except typer.BadParameter as error:
        key = file.key_of(_option_named(command, str(error.param_hint)), _wrong_value(error.__cause__))
        if key is None:
            raise
        raise file.refused(f"{key}: {error.message}") from error.__cause__


def _option_named(command: Callable[..., None], spelling: str) -> str:
    """Return the name in Python of the option with this spelling; empty if there is none."""
    spellings = spellings_of_settings(command)
    return next((name for name in inspect.signature(command).parameters if spellings.get(name) == spelling), "")


def _wrong_value(error: BaseException | None) -> object:
    """Return the value that an error is about; None: unknown."""
    match error:
        case ConfigError():
            return error.value
        case ModelLoadError():
            return error.path
    return None
