"""Decide what runs a checkpoint: the families' shared decoder, or a class of transformers."""

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
from paged_sdk.models.checkpoint_layout import names_in
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.family import find_family, has_family, read_config, supported_families, takes_images
from paged_sdk.models.loading import load_model
from paged_sdk.models.tensor_names import TensorNames
from paged_sdk.parallel.group import Group
from paged_sdk.quant.adapted import AdaptableShape
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.weights.source import WeightSource

__all__ = ["AnyModel", "ModelPlan", "plan_model"]


class AnyModel(CausalModel, Protocol):
    """Computes logits from token ids, and describes its KV cache, devices and adaptable layers."""

    @property
    def config(self) -> DecoderConfig:
        """Return the shape of the decoder."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of activations, keys and values."""
        ...

    @property
    def placement(self) -> Placement:
        """Return the devices of embeddings, layers and output projection."""
        ...

    @property
    def adaptable(self) -> tuple[AdaptableShape, ...]:
        """Return the linear layers that adapters may change."""
        ...

    def adaptable_linear(self, name: str) -> Linear:
        """Return the present linear layer of that name; requantization replaces layers."""
        ...


class ModelPlan(Protocol):
    """Describes a model whose weights are not loaded yet."""

    @property
    def config(self) -> DecoderConfig:
        """Return the shape of the decoder."""
        ...

    def tensor_names(self, source: WeightSource) -> TensorNames | None:
        """Return the checkpoint's tensor names; None if only transformers knows them."""
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
    """Choose what runs a checkpoint.

    :param config: config.json's content
    :param dtype: dtype of weights and activations
    :param images: whether the model must accept images
    :raises UnsupportedArchitectureError: neither a family nor transformers runs this ``model_type``
    :raises CheckpointError: the config is invalid
    """
    if has_family(config) and (takes_images(config) or not images):
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
    """Describes a model of a family.

    :ivar content: config.json's content
    """

    content: Mapping[str, Any]
    config: DecoderConfig

    def tensor_names(self, source: WeightSource) -> TensorNames:
        """Return the checkpoint's tensor names."""
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
            placement=placement,
            policy=policy,
            on_progress=on_progress,
            num_threads=num_threads,
            group=group,
        )
