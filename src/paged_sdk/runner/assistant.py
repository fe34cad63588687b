"""Holds an assistant as it runs over the keys and values of its target."""

from __future__ import annotations

from attrs import frozen

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.models.assistant import AssistantModule
from paged_sdk.models.causal_model import CausalModel

__all__ = ["Assistant"]


@frozen(eq=False)
class Assistant:
    """Holds an assistant as it runs.

    :ivar module: the assistant
    :ivar backend: holds the keys and values of its target, in the place of its own
    :ivar target: the target as it runs
    """

    module: AssistantModule
    backend: AttentionBackend
    target: CausalModel

    @property
    def own_backends(self) -> tuple[AttentionBackend, ...]:
        """See :class:`~paged_sdk.runner.beside_layers.BesideLayers`."""
        return ()
