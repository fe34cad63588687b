"""Defines what is to be loaded, and what that takes."""

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
    """Says what is to be loaded, and where to.

    :ivar path: where the model's files lie
    :ivar devices: those that have part of it, and those of its draft model; the first of them has what the settings'
        topology puts on no other
    :ivar go_on: called before each tensor and each further step; what it raises ends the loading
    :ivar workspace: the scratch memory of the native CPU kernels; None: these are absent
    :ivar encoder: the image encoder of a GGUF model
    :ivar backends: what may keep its KV before what attention/choice.py lists
    """

    path: Path
    settings: BuildSettings
    environment: Environment
    devices: tuple[torch.device, ...]
    go_on: Callable[[], None] = lambda: None
    workspace: Workspace | None = None
    encoder: EncoderFile | None = None
    backends: tuple[Candidate, ...] = ()

    @property
    def device(self) -> torch.device:
        """Return the first device."""
        return self.devices[0]
