"""Decide what runs a checkpoint: the decoder that families share, or a class of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from attrs import frozen

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.errors import UnsupportedArchitectureError, shown
from paged_sdk.kernels.placement import Placement
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.family import TensorNames, find_family, has_family, read_config, supported_families
from paged_sdk.models.loading import load_model, names_in
from paged_sdk.parallel.group import Group
from paged_sdk.quant.adapted import AdaptableShape
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.weights.source import WeightSource

__all__ = ["AnyModel", "ModelPlan", "plan_model"]


class AnyModel(CausalModel, Protocol):
    """Computes logits from token ids, and says what its cache has to hold and what adapters may change."""

    @property
    def config(self) -> DecoderConfig:
        """Return the shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of activations, keys and values."""
        ...

    @property
    def placement(self) -> Placement:
        """Return what is on which device."""
        ...

    @property
    def adaptable(self) -> tuple[AdaptableShape, ...]:
        """Return the linear layers that adapters may change."""
        ...

    def adaptable_linear(self, name: str) -> Linear:
        """Return one of them, as it is now."""
        ...


class ModelPlan(Protocol):
    """Stands for a model whose weights are not loaded yet."""

    @property
    def config(self) -> DecoderConfig:
        """Return the shape."""
        ...

    def tensor_names(self, source: WeightSource) -> TensorNames | None:
        """Return what the checkpoint calls its tensors; None: only transformers knows."""
        ...

    def load(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        placement: Placement,
        policy: WeightPolicy,
        on_progress: Callable[[int, int], None] | None,
        num_threads: int,
        group: Group | None = None,
    ) -> AnyModel:
        """Load the weights; see :func:`~paged_sdk.models.loading.load_model`."""
        ...


def plan_model(config: Mapping[str, Any], dtype: torch.dtype, *, images: bool = False) -> ModelPlan:
    """Find what runs a checkpoint.

    :param config: config.json's content
    :param dtype: of weights and activations
    :param images: whether it is to take images
    :raises UnsupportedArchitectureError: neither a family nor transformers runs this ``model_type``
    :raises CheckpointError: the config cannot be used
    """
    if has_family(config):
        return _FamilyPlan(config, read_config(config))
    if find_spec("transformers") is None:
        model_type = config.get("model_type")
        families = supported_families()
        raise UnsupportedArchitectureError(
            f"model_type {shown(model_type)} has no decoder here (there is one for {', '.join(families)}); "
            "transformers may have it: pip install 'paged-sdk[transformers]'",
            architecture=str(model_type),
            supported=families,
        )
    from paged_sdk.models.transformers_door.loading import open_door  # imports transformers, which takes 1.8 s

    return open_door(config, dtype, images=images)


@frozen
class _FamilyPlan:
    """Stands for a model of a family.

    :ivar content: config.json's content
    """

    content: Mapping[str, Any]
    config: DecoderConfig

    def tensor_names(self, source: WeightSource) -> TensorNames:
        """Return what the checkpoint calls its tensors."""
        return names_in(source, find_family(self.content))

    def load(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        placement: Placement,
        policy: WeightPolicy,
        on_progress: Callable[[int, int], None] | None,
        num_threads: int,
        group: Group | None = None,
    ) -> DecoderModel:
        """Load the weights; see :func:`~paged_sdk.models.loading.load_model`."""
        return load_model(
            self.content,
            source,
            dtype=dtype,
            device=placement,
            policy=policy,
            on_progress=on_progress,
            num_threads=num_threads,
            group=group,
        )
