"""Defines what to load, and with which resources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from attrs import frozen

from paged_sdk.attention.choice import Candidate
from paged_sdk.build.encoder_file import EncoderFile
from paged_sdk.config.build import BuildSettings
from paged_sdk.config.env import Environment
from paged_sdk.kernels.native.library import Workspace

__all__ = ["Loading"]


@frozen(kw_only=True)
class Loading:
    """Says what to load, and where.

    :ivar path: directory or file of the checkpoint
    :ivar devices: the devices of the model and of its draft model; the first is the default device, for everything that
        the topology does not place
    :ivar check_cancelled: called before each tensor and between stages; an exception that it raises stops loading
    :ivar workspace: scratch memory of the native CPU kernels; None: they are unavailable
    :ivar encoder: file of a GGUF model's image encoder
    :ivar backends: attention backends to try before those of attention/choice.py
    """

    path: Path
    settings: BuildSettings
    environment: Environment
    devices: tuple[torch.device, ...]
    check_cancelled: Callable[[], None] = lambda: None
    workspace: Workspace | None = None
    encoder: EncoderFile | None = None
    backends: tuple[Candidate, ...] = ()

    @property
    def device(self) -> torch.device:
        """Return the default device."""
        return self.devices[0]
