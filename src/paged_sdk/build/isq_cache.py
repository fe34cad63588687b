"""Find the file that caches a checkpoint's weights after in-situ quantization."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch
from attrs import evolve

from paged_sdk.config.build import BuildSettings
from paged_sdk.config.isq import IsqType
from paged_sdk.errors import ConfigError
from paged_sdk.kernels.native.sources import sources_hash
from paged_sdk.logs import get_logger
from paged_sdk.parallel.group import Group
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.weights.quantized_cache import QuantizedCache

__all__ = ["with_isq_cache"]

_log = get_logger(__name__)


@contextmanager
def with_isq_cache(
    path: Path,
    files: Mapping[Path, tuple[int, int]],
    settings: BuildSettings,
    policy: WeightPolicy,
    device: torch.device,
    group: Group | None,
    *,
    with_mtp: bool,
) -> Iterator[WeightPolicy]:
    """Return the weight policy to use in the block: the given one, or one that reads quantized weights from the cache.
    A missing or stale cache file is written when the block ends without an error.

    :param files: the checkpoint's files, with their stamps
    :param group: the ranks that the weights are divided among; None: one process
    :param with_mtp: whether the layer for multi-token prediction is among the weights
    :raises ConfigError: a cache directory is set, and the model is not on the CPU
    """
    cache = _open(path, files, settings, policy, device, group, with_mtp=with_mtp)
    if cache is None:
        yield policy
        return
    is_complete = False
    try:
        yield evolve(policy, cached=cache.cached)
        is_complete = True
    finally:
        cache.close(is_complete=is_complete)


def _open(
    path: Path,
    files: Mapping[Path, tuple[int, int]],
    settings: BuildSettings,
    policy: WeightPolicy,
    device: torch.device,
    group: Group | None,
    *,
    with_mtp: bool,
) -> QuantizedCache | None:
    """Open the cache file of a checkpoint and its quantization types; None if no cache is requested, or nothing is
    quantized.
    """
    if settings.isq_cache is None:
        return None
    if policy.isq is None and not policy.isq_by_name:
        _log.warning("Nothing is cached in %s: no weights are quantized while they are loaded.", settings.isq_cache)
        return None
    if device.type != "cpu":
        raise ConfigError.of("with_isq_cache", str(settings.isq_cache), f"a model on the CPU, here {device}")
    rules = [(pattern.pattern, _name(isq)) for pattern, isq in policy.isq_by_name]
    others = [each for each in (settings.imatrix, settings.calibration_file) if each is not None]
    # One file per checkpoint and quantization settings, under a stable name, so that a stale file is overwritten.
    place = repr((os.path.abspath(path), _name(policy.isq), rules, [str(each) for each in others]))
    place += "" if group is None else f" {group.rank} of {group.size}"
    place += " mtp" if with_mtp else ""
    name = f"{path.name[:100]}-{_name(policy.isq)}-{sha256(place.encode()).hexdigest()[:16]}.weights"
    stamps = [(file.name, *stamp) for file, stamp in files.items()]
    stamps += [(each.name, *_stamp(each)) for each in others]
    made_by = (version("paged-sdk"), sources_hash())
    directory = Path(os.path.expanduser(settings.isq_cache))
    return QuantizedCache(directory / name, sha256(repr((place, stamps, made_by)).encode()).hexdigest())


def _name(isq: IsqType | None) -> str:
    return "none" if isq is None else isq.value


def _stamp(path: Path) -> tuple[int, int]:
    found = Path(os.path.expanduser(path)).stat()
    return found.st_size, found.st_mtime_ns
