"""Load a checkpoint into a class of transformers, with matrices in this package's weight forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.placement import Placement
from paged_sdk.logs import get_logger
from paged_sdk.models.transformers_door.class_weights import ClassWeights, sees_tokens
from paged_sdk.models.transformers_door.model import TransformersModel
from paged_sdk.models.transformers_door.modules import Body, CurrentStep
from paged_sdk.models.transformers_door.probe import Findings, probe
from paged_sdk.models.transformers_door.renamed_source import RenamedSource
from paged_sdk.models.transformers_door.row_check import check_rows
from paged_sdk.models.transformers_door.seam import attach
from paged_sdk.models.transformers_door.skeleton import make_skeleton
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.parallel.group import Group
from paged_sdk.quant.policy import DENSE, WeightPolicy
from paged_sdk.weights.source import WeightSource

__all__ = ["TransformersDoor", "open_door", "reload_door"]

_log = get_logger(__name__)


class TransformersDoor:
    """Describes a model of transformers whose weights are not loaded yet."""

    def __init__(self, model: PreTrainedModel, findings: Findings) -> None:
        self._model = model
        self._findings = findings

    @property
    def config(self) -> DecoderConfig:
        """Return the model's shape, as the engine sees it."""
        return self._findings.config

    @property
    def has_experts(self) -> bool:
        """Return whether layers have experts that follow transformers' interface for them."""
        return bool(self._findings.experts)

    def tensor_names(self, source: WeightSource) -> None:
        """Return None: only the class knows its tensor names."""

    def load(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        placement: Placement,
        policy: WeightPolicy = DENSE,
        on_progress: Callable[[int, int], None] | None = None,
        num_threads: int = 1,
        group: Group | None = None,
    ) -> TransformersModel:
        """Load the weights, once per model, and check that tokens interact only in attention.

        :param source: the weights; stays open
        :param dtype: dtype of weights, activations, keys and values
        :param placement: must have a single device
        :param policy: chooses the form of each matrix
        :param on_progress: see :func:`~paged_sdk.models.loading.load_model`
        :param group: must be None: classes of transformers are not divided among ranks
        :raises CheckpointError: a tensor is missing or has another shape than the class expects
        :raises UnsupportedArchitectureError: rows of a step would affect each other
        """
        assert group is None
        model, step, device = self._model, CurrentStep(), placement.embedding
        weights, loader = _weights(model, source, policy, step, self._findings, dtype, device, on_progress)
        weights.run(num_threads)
        body = Body(model.get_submodule(self._findings.body))
        if self._findings.body:
            model.set_submodule(self._findings.body, body)
        is_encoder = not self._findings.body or self._findings.is_ranker
        seam = attach(model)
        seam.experts.update(weights.experts)
        made = TransformersModel(
            body if is_encoder else model,
            body,
            seam,
            step,
            self._findings,
            self.config,
            dtype=dtype,
            device=device,
            adaptable=[shape for shape in loader.adaptable if self._is_adaptable(shape.name)],
            blocks=self._blocks(),
            first_position=self._findings.first_position,
            ranker=model if self._findings.is_ranker else None,
            parts=weights.parts,
        )
        check_rows(made)
        return made

    def _blocks(self) -> list[str]:
        """Return the names of the layers' modules inside the wrapped body; empty if unknown or unneeded."""
        if not hasattr(self._model, "get_image_features") or "" in self._findings.blocks:
            return []
        body = self._findings.body
        return [f"{body}.layers{name.removeprefix(body)}" for name in self._findings.blocks]

    def _is_adaptable(self, name: str) -> bool:
        # Layers after the body get only the rows whose logits are read, not a step's tokens.
        return (
            sees_tokens(name)
            and name not in self._findings.shared
            and name.startswith(f"{self._findings.body}." if self._findings.body else "")
        )


def open_door(config: Mapping[str, Any], dtype: torch.dtype, *, images: bool = False) -> TransformersDoor:
    """Prepare a model without a family to run by a class of transformers, and check all that needs no weights.

    :param config: config.json's content
    :param dtype: dtype of weights and activations
    :param images: whether the model must accept images
    :raises UnsupportedArchitectureError: transformers has no such class, or the class needs attention that this package
        does not compute
    """
    model = make_skeleton(config, dtype, images=images)
    findings = probe(model)
    _log.info("%s has no decoder here: transformers' %s runs it.", findings.config.model_type, type(model).__name__)
    return TransformersDoor(model, findings)


def reload_door(
    model: TransformersModel,
    config: Mapping[str, Any],
    source: WeightSource,
    *,
    policy: WeightPolicy,
    parts: Iterable[int],
    on_replaced: Callable[[int], None],
    on_progress: Callable[[int, int], None] | None = None,
    num_threads: int = 1,
    images: bool = False,
) -> None:
    """Reload the matrices of a model's own parts, one by one; see :func:`~paged_sdk.models.loading.reload_model`.

    :param images: whether the model accepts images
    """
    # The model's own modules have lost their parameters, by which a checkpoint's tensors are found.
    skeleton = make_skeleton(config, model.dtype, images=images)
    step, dtype, device = model.step, model.dtype, model.device
    weights, _ = _weights(skeleton, source, policy, step, model.findings, dtype, device, on_progress)
    weights.replace(model.parts, model.seam.experts, parts, on_replaced, num_threads)


def _weights(
    model: PreTrainedModel,
    source: WeightSource,
    policy: WeightPolicy,
    step: CurrentStep,
    findings: Findings,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None,
) -> tuple[ClassWeights, WeightLoader]:
    transposed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    renamed = RenamedSource(source, model, transposed)
    loader = WeightLoader(
        renamed,
        policy,
        dtype=dtype,
        device=device,
        prefixes=("",),
        stored_name=renamed.stored_name,
        on_progress=on_progress,
    )
    return ClassWeights(model, loader, renamed, step, findings, dtype=dtype, device=device), loader
