"""Chooses how a model's layers run: in one native call, or one operation at a time."""

from __future__ import annotations

from paged_sdk.attention.backend import AttentionBackend
from paged_sdk.attention.divided import DividedBackend
from paged_sdk.config.build import BuildSettings
from paged_sdk.errors import ConfigError
from paged_sdk.logs import get_logger
from paged_sdk.models.any_model import AnyModel
from paged_sdk.models.causal_model import CausalModel
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedDecoderModel, FusedLayers
from paged_sdk.models.fusible import why_not_fused
from paged_sdk.models.spanned_decoder import SpannedDecoderModel

__all__ = ["fuse", "unfused"]

_log = get_logger(__name__)


def fuse(model: AnyModel, backend: AttentionBackend, settings: BuildSettings) -> CausalModel:
    """Fuse the model's layers into one native call if possible; otherwise log why not.

    :raises ConfigError: batch invariance was requested, but the layers cannot be fused
    """
    if not isinstance(model, DecoderModel):
        if settings.batch_invariance:
            kind = model.config.model_type
            raise ConfigError.of(
                "with_batch_invariance",
                True,
                f"a model of a family that has a decoder here; a class of transformers computes {kind}",
            )
        return model
    if isinstance(backend, DividedBackend):
        if settings.batch_invariance:
            raise ConfigError.of("with_batch_invariance", True, f"a model on one device; here {model.placement}")
        return _joined_spans(model, backend)
    reason = why_not_fused(model, backend)
    if model.group is not None and model.group.smallest(reason is None) == 0 and reason is None:
        reason = "those of another rank do"
    if settings.batch_invariance and reason is None:
        inputs = model.layer_inputs
        if model.head.native_weights is None:
            reason = "its output projection has no native kernel"
        elif inputs is not None and inputs.projection.native_weights is None:
            reason = "the projection to its layers' own inputs has no native kernel"
    if reason is not None:
        if settings.batch_invariance:
            raise ConfigError.of(
                "with_batch_invariance", True, f"a model of packed weights on the native CPU kernels; here {reason}"
            )
        _log.info("Layers run one operation at a time: %s.", reason)
        return model
    model.adapts_row_by_row = settings.batch_invariance
    return FusedDecoderModel(model, backend)


def unfused(model: AnyModel) -> CausalModel:
    """Return the model with layers that run one operation at a time."""
    if isinstance(model, DecoderModel) and not model.placement.is_one_device:
        return SpannedDecoderModel(model, {})
    return model


def _joined_spans(model: DecoderModel, backend: DividedBackend) -> SpannedDecoderModel:
    """Return the model for several devices, with spans of layers on the CPU fused if possible."""
    fused: dict[int, FusedLayers] = {}
    for span in model.placement.spans:
        part, places = backend.part_of(span.layers)
        reason = why_not_fused(model, part, span.layers)
        if reason is None and (pages := part.native_pages) is not None:
            fused[span.layers.start] = FusedLayers(model, pages.of_layers(places), span.layers)
        elif span.device.type == "cpu":
            layers = f"{span.layers.start}-{span.layers.stop}"
            _log.info("Layers %s run one operation at a time: %s.", layers, reason)
    return SpannedDecoderModel(model, fused)
