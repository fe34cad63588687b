"""Decide whether a model's prefix cache is kept in a directory, and open its files there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Final
from uuid import uuid4

from attrs import evolve

from paged_sdk.build.loaded_model import LoadedModel
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.engine import EngineConfig
from paged_sdk.config.env import PREFIX_CACHE_DIR, Environment
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.sources import sources_hash
from paged_sdk.logs import get_logger
from paged_sdk.runner.block_files import BlockFiles

__all__ = ["open_block_files", "resolve_prefix_cache_dir"]

_log = get_logger(__name__)

_NUM_PIECES: Final = 64
_PIECE: Final = 1 << 12  # bytes


def resolve_prefix_cache_dir(
    config: EngineConfig,
    settings: BuildSettings,
    environment: Environment,
    *,
    is_bidirectional: bool,
    has_states: bool,
    is_divided: bool,
) -> EngineConfig:
    """Return the configuration with the directory of the prefix cache, if there is to be one.

    :param has_states: whether the model has recurrent layers
    :param is_divided: whether the model is divided among ranks
    :raises ConfigError: the builder asks for a directory that this model cannot use; for that of the environment, which
        may be meant for another model of the process, there is a line in the log instead
    """
    asked = settings.prefix_cache_dir or environment.prefix_cache_dir
    if asked is None:
        return config
    needed = None
    if is_bidirectional:
        needed = "a model that generates text: an encoder's KV depends on later tokens, too"
    elif has_states:
        needed = "a model without recurrent layers: their states are not stored, without which KV is of no use"
    elif not config.paged:
        needed = "paged attention beside it: contiguous KV has no blocks to store"
    elif not config.prefix_cache_n:
        needed = "a prefix cache beside it, which with_prefix_cache_n or its variable has turned off"
    elif is_divided:
        needed = "a model in one process: the KV of ranks is not stored"
    if needed is None:
        return evolve(config, prefix_cache_dir=asked)
    if settings.prefix_cache_dir is not None:
        raise ConfigError.of("with_prefix_cache_dir", str(asked.path), needed)
    _log.info("%s has no effect here: it needs %s.", PREFIX_CACHE_DIR, needed)
    return config


def open_block_files(
    loaded: LoadedModel, code: bytes, config: EngineConfig, environment: Environment, more_files: Iterable[Path] = ()
) -> BlockFiles | None:
    """Open the directory of a model's stored blocks; None if there is none.

    Blocks are found again by a model with the same files (names, sizes, times of change and samples of the content),
    attention backends and settings that its KV depends on, and version of this package.

    :param code: see :attr:`~paged_sdk.attention.backend.AttentionBackend.code`
    :param more_files: files that the KV depends on beside the checkpoint's
    :raises ConfigError: the directory cannot be made or written to
    """
    directory = config.prefix_cache_dir
    if directory is None:
        return None
    settings = loaded.settings
    others = [each for each in (settings.imatrix, settings.calibration_file, *more_files) if each is not None]
    depends_on = (
        [(file.name, stamp, _sample(file)) for file, stamp in loaded.files.items()],
        [(each.name, _stamp(each)) for each in others],
        [each.name for each in loaded.backends],
        loaded.dtype,
        settings.isq or environment.isq,
        settings.topology,
        settings.batch_invariance,
        [each.type for each in loaded.placement.layers],
        config.block_size,
        config.cache_type,
        code,
        config.max_model_len,
        version("paged-sdk"),
        sources_hash(),
    )
    identity = sha256(repr(depends_on).encode()).hexdigest()[:32]
    return BlockFiles(
        Path(os.path.expanduser(directory.path)),
        identity,
        max_bytes=directory.max_bytes,
        setting=PREFIX_CACHE_DIR if settings.prefix_cache_dir is None else "with_prefix_cache_dir",
    )


def _stamp(path: Path) -> tuple[int, int] | str:
    """Return a file's size and time of change; if it is gone, something that is found by no other model."""
    try:
        found = Path(os.path.expanduser(path)).stat()
    except OSError:
        return uuid4().hex
    return found.st_size, found.st_mtime_ns


def _sample(path: Path) -> str:
    """Hash pieces of a file, as its name, size and time say little where all files were given one time."""
    digest = sha256()
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            for place in range(_NUM_PIECES):
                file.seek(max(size - _PIECE, 0) * place // (_NUM_PIECES - 1))
                digest.update(file.read(_PIECE))
    except OSError:
        return uuid4().hex
    return digest.hexdigest()
