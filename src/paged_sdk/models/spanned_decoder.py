"""Run a decoder whose layers are on several devices, one span of consecutive layers after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import RopeConfig
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.native.norm import NativeNorm
from paged_sdk.kernels.placement import LayerSpan, Placement, moved_to, working_on
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.norm import NoNorm, Norm
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.fused_decoder import FusedLayers, norm_in_float32
from paged_sdk.models.rank_head import RankHead

__all__ = ["SpannedDecoderModel"]


class SpannedDecoderModel:
    """Computes logits from token ids, copying the residual stream from device to device.

    A step's inputs for layers (rotary embeddings, the attention backend's indices) are made once per device, even for
    several spans.

    :param fused: spans that run in one native call, by their first layer; the other spans run one operation at a time
    :ivar config: the model's config; ``dtype`` and ``rank_head`` likewise
    :ivar device: the device of the embeddings
    """

    def __init__(self, model: DecoderModel, fused: Mapping[int, FusedLayers]) -> None:
        self.config: DecoderConfig = model.config
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.placement: Placement = model.placement
        self.rank_head: RankHead | None = model.rank_head
        self._model = model
        self._spans = self.placement.spans
        self._runs: list[_Run] = [
            _FusedRun(fused[first], is_last=span is self._spans[-1]) if first in fused else _PlainRun(model, span)
            for span, first in ((span, span.layers.start) for span in self._spans)
        ]
        self._ropes = {
            device: {settings: RotaryEmbedding(settings, device=device) for settings in model.ropes}
            for device in dict.fromkeys(self.placement.layers)
        }
        last = fused.get(self._spans[-1].layers.start)
        # Fused layers return float32, which the last norm takes without rounding.
        self._norm: Norm | NativeNorm = (
            model.norm if last is None else norm_in_float32(model.norm, last.workspace, model.config.norm_eps)
        )
        self._fused_spans = tuple(fused[span.layers.start].layers for span in self._spans if span.layers.start in fused)

    @property
    def fused_spans(self) -> tuple[range, ...]:
        """Return the layers of each native call."""
        return self._fused_spans

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Run all layers like :meth:`DecoderModel.forward`, but return the residual stream before the last norm."""
        with working_on(self.device):
            residual = self._model.embedded(token_ids, ctx)
            ctx = self._model.with_layer_inputs(token_ids, residual, ctx)
        steps: dict[torch.device, _StepThere] = {}
        for span, run in zip(self._spans, self._runs, strict=True):
            with working_on(span.device):
                if span.device not in steps:
                    steps[span.device] = self._step_on(span.device, positions, ctx)
                residual = run(moved_to(residual, span.device), steps[span.device])
        return residual

    def normed(self, hidden: Tensor) -> Tensor:
        """Apply the last norm to rows of :meth:`forward`'s result, and return float32."""
        return self._normed(hidden).float()

    def _normed(self, hidden: Tensor) -> Tensor:
        with working_on(self.placement.layers[-1]):
            return self._norm.forward(hidden)

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Compute logits like :meth:`DecoderModel.logits`, after the last norm, which :meth:`forward` leaves out."""
        normed, there = self._normed(hidden), self.placement.head
        own = None if adapted is None else adapted.on(there)
        with working_on(there):
            return self._model.logits(moved_to(normed, there), own)

    def _step_on(self, device: torch.device, positions: Tensor, ctx: StepContext) -> _StepThere:
        own, there = ctx.on(device), moved_to(positions, device)
        rotations = {settings: rope.at(there, own.is_long) for settings, rope in self._ropes[device].items()}
        return _StepThere(own, rotations)


@frozen
class _StepThere:
    """Holds a step's inputs for the layers on one device."""

    context: StepContext
    rotations: Mapping[RopeConfig, Rotation]


class _Run(Protocol):
    """Runs a span of layers."""

    def __call__(self, residual: Tensor, step: _StepThere) -> Tensor:
        """Return the residual stream after the layers.

        :param residual: the residual stream before the layers, on their device; may be overwritten
        """
        ...


class _PlainRun:
    def __init__(self, model: DecoderModel, span: LayerSpan) -> None:
        self._model = model
        self._layers = span.layers

    def __call__(self, residual: Tensor, step: _StepThere) -> Tensor:
        stream = residual.to(self._model.dtype)
        return self._model.run_layers(self._layers, stream, step.rotations, step.context, NoNorm())[1]


class _FusedRun:
    def __init__(self, layers: FusedLayers, *, is_last: bool) -> None:
        self._layers = layers
        self._is_last = is_last

    def __call__(self, residual: Tensor, step: _StepThere) -> Tensor:
        hidden, scale = residual.float(), self._layers.stream_scale
        if scale is not None:
            hidden *= scale
        self._layers.run(hidden, list(step.rotations.values()), step.context, reads_all=not self._is_last)
        return hidden if scale is None else hidden.div_(scale)
