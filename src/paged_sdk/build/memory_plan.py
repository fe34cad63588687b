"""Says what memory a model would take."""

from __future__ import annotations

from typing import Protocol

from paged_sdk.config.build import BuildSettings, ModelSource
from paged_sdk.types.memory_plan import MemoryPlan

__all__ = ["Planned", "plan_memory"]


class Planned(Protocol):
    """Says which model is to run, and how: a builder does."""

    @property
    def source(self) -> ModelSource:
        """Return which model it is."""
        ...

    @property
    def settings(self) -> BuildSettings:
        """Return how it is to run."""
        ...


def plan_memory(builder: Planned) -> MemoryPlan:
    """Compute what memory a model would take here, and how many tokens its KV cache would have room for, as it is
    computed when the model is built, the environment's settings included. No weight is read; a model on the hub is
    downloaded first.

    What steps and images need beside is measured when a model is built, so a pool on a CUDA device that is to take what
    is free will have somewhat fewer blocks.

    :param builder: the model and its settings
    :raises ConfigError: a setting cannot be used with this model or machine
    :raises ModelLoadError: the model cannot be read
    :raises OutOfMemoryError: weights and cache do not fit
    """
    from paged_sdk.build.planning import compute_plan  # imports the tensor libraries, which take over a second

    return compute_plan(builder.source, builder.settings)
