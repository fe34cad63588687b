"""Computes the memory that a model would take."""

from __future__ import annotations

from typing import Protocol

from paged_sdk.config.build import BuildSettings, ModelSource
from paged_sdk.types.memory_plan import MemoryPlan

__all__ = ["Planned", "plan_memory"]


class Planned(Protocol):
    """Describes a model and its settings; builders implement this."""

    @property
    def source(self) -> ModelSource:
        """Return the model to load."""
        ...

    @property
    def settings(self) -> BuildSettings:
        """Return the settings."""
        ...


def plan_memory(builder: Planned) -> MemoryPlan:
    """Compute how much memory a model would take here, and how many tokens its KV cache would hold, as for a real
    build, environment variables included. No weights are read, but a model on the Hub is downloaded first.

    Memory for steps and images is only measured when a model is built, so a KV pool on a CUDA device that takes all
    free memory will have somewhat fewer blocks.

    :param builder: the model and its settings
    :raises ConfigError: a setting is invalid for this model or machine
    :raises ModelLoadError: the model cannot be read
    :raises OutOfMemoryError: weights and cache do not fit
    """
    from paged_sdk.build.planning import compute_plan  # imports the tensor libraries, which take over a second

    return compute_plan(builder.source, builder.settings)
