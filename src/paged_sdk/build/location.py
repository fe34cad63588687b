"""Finds a model's files, locally or on the Hugging Face Hub."""

from __future__ import annotations

import os
from pathlib import Path

from paged_sdk.build.encoder_file import EncoderFile, find_encoder_file
from paged_sdk.config.build import BuildSettings, ModelSource
from paged_sdk.config.env import read_variable
from paged_sdk.errors import CheckpointError, ConfigError
from paged_sdk.system.files import read_text
from paged_sdk.weights.hub import resolve_model

__all__ = ["encoder_file", "hub_token", "model_path"]


def model_path(source: ModelSource, settings: BuildSettings) -> Path:
    """Return the path of a model's files, after downloading them if necessary. The path is absolute, since weights may
    be read again from another working directory, and its last component is a name, not ``..``.
    """
    path = resolve_model(
        source.location,
        filename=source.filename,
        revision=settings.revision,
        token=hub_token(settings.token_source),
        gguf=source.gguf,
    )
    return path.resolve() if path.name == ".." else path.absolute()


def encoder_file(source: ModelSource, settings: BuildSettings, model: Path) -> EncoderFile | None:
    """Return the file of a GGUF model's image encoder, if it has one, after downloading it if necessary.

    :param model: the decoder's file
    """
    return find_encoder_file(
        source,
        model,
        revision=settings.revision,
        token=hub_token(settings.token_source),
        wants_images=settings.images is not None,
    )


def hub_token(source: str) -> str | bool | None:
    """Return the Hub token of a token source, in huggingface_hub's form: None is the cached token, False no token.

    :raises ConfigError: the environment variable is not set, or the file cannot be read
    """
    kind, _, rest = source.partition(":")
    match kind:
        case "cache":
            return None
        case "none":
            return False
        case "literal":
            return rest
        case "env":
            token = read_variable(rest)
            if token is None:
                raise ConfigError.of("with_token_source", source, f"the environment variable {rest} to be set")
            return token
        case _:
            try:
                return read_text(Path(os.path.expanduser(rest))).strip()
            except CheckpointError as error:
                raise ConfigError.of("with_token_source", source, f"a readable file ({error})") from error
