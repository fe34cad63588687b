"""Checks whether several processes can compute a model together, and divides the threads among them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch

from paged_sdk.attention.choice import Candidate
from paged_sdk.build.encoder_file import EncoderFile
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.isq import IsqType
from paged_sdk.errors import ConfigError
from paged_sdk.logs import get_logger
from paged_sdk.parallel.shard import SETTING
from paged_sdk.processors import usable_processors

__all__ = ["check_parts", "check_ranks", "refuse_isq", "thread_shares"]

_log = get_logger(__name__)


def check_ranks(settings: BuildSettings, devices: Iterable[torch.device]) -> None:
    """Check what can be checked before anything is loaded.

    :param devices: those that have part of the model
    :raises ConfigError: several ranks cannot do what else was asked for
    """
    size = settings.tensor_parallel
    if size == 1:
        return
    elsewhere = next((device for device in devices if device.type != "cpu"), None)
    reasons = {
        f"a model on the CPU, not on {elsewhere}": elsewhere is not None,
        "nothing beside images": settings.images is not None,
        "nothing beside a calibration file, which the whole model reads": settings.calibration_file is not None,
        "a system with pipes that can be waited for": sys.platform == "win32",
        "a program with a Python interpreter to start": not sys.executable or getattr(sys, "frozen", False),
    }
    if (allowed := next((text for text, holds in reasons.items() if holds), None)) is not None:
        raise ConfigError.of(SETTING, size, allowed)


def check_parts(settings: BuildSettings, encoder: EncoderFile | None, backends: Sequence[Candidate]) -> None:
    """Check what belongs to a model beside its settings. An image encoder that just lies beside it is left alone.

    :param backends: attention backends of the caller's own
    :raises ConfigError: several ranks cannot do it
    """
    if encoder is not None and encoder.is_asked:
        raise ConfigError.of(SETTING, settings.tensor_parallel, "nothing beside an image encoder")
    if encoder is not None:
        _log.info("%s is left alone: several ranks take no images.", encoder.path)
    if backends:
        raise ConfigError.of(SETTING, settings.tensor_parallel, "nothing beside attention backends of your own")


def thread_shares(settings: BuildSettings) -> list[int]:
    """Return with how many threads each rank computes: together as many as one process would have."""
    size = settings.tensor_parallel
    each, more = divmod(settings.num_threads or usable_processors(), size)
    return [max(each + (rank < more), 1) for rank in range(size)]


def refuse_isq(isq: IsqType) -> NoReturn:
    """Say that the weights of several ranks cannot be quantized again.

    :raises ConfigError: always
    """
    raise ConfigError.of("isq", isq.value, f"a model without {SETTING}: quantize it while it is loaded, by with_isq()")
