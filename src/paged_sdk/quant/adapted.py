"""Let requests' adapters change what a linear layer computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.kernels.activation import GatedActivation
from paged_sdk.kernels.lora import LoraWeights, add_lora_
from paged_sdk.kernels.step import StepContext
from paged_sdk.quant.linear import DecodedRows, Linear, NativeWeights

__all__ = ["AdaptableLinear", "AdaptableShape"]


@frozen(eq=False)
class AdaptableShape:
    """Describes a linear layer to adapters. It refers to no weights.

    :ivar modules: the names of its matrices in the checkpoint, without ``.weight``, with the outputs that are theirs
    :ivar in_features: columns of the weight
    :ivar device: where the layer is
    :ivar order: which rows of the one matrix that there is the layer's outputs are; None: all in their order
    :ivar whole: the shapes of matrices of which this process has a part, by name
    :ivar rows: which of their rows it has, where these are not all
    :ivar cols: which of their columns; None: all
    :ivar has_whole_rows: whether the rows that it has are here as a whole
    """

    modules: Mapping[str, slice]
    in_features: int
    device: torch.device
    order: Tensor | None = None
    whole: Mapping[str, tuple[int, int]] = field(factory=dict)
    rows: Mapping[str, Tensor] = field(factory=dict)
    cols: slice | None = None
    has_whole_rows: bool = True

    def shape_of(self, module: str) -> tuple[int, int]:
        """Return the shape of a matrix in the checkpoint."""
        rows = self.modules[module]
        return self.whole.get(module, (rows.stop - rows.start, self.in_features))

    @property
    def name(self) -> str:
        """Return the first of its names, under which an adapter has its update of the layer."""
        return next(iter(self.modules))


class AdaptableLinear(Linear):
    """Computes what another linear layer does, and adds to each row what its adapter says.

    :ivar base: the layer, which rows without an adapter go through alone
    :ivar name: see :class:`AdaptableShape`
    """

    def __init__(self, base: Linear, name: str) -> None:
        super().__init__(in_features=base.in_features, out_features=base.out_features, num_bytes=base.num_bytes)
        self.base = base
        self.name = name

    @property
    def native_weights(self) -> NativeWeights | None:
        """Return the weight as a native call multiplies it, which adds the adapters' updates by itself."""
        return self.base.native_weights

    def decoded(self, device: torch.device) -> Iterator[DecodedRows]:
        """Do what :meth:`Linear.decoded` says, of the base."""
        return self.base.decoded(device)

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Do what :meth:`Linear.forward` says."""
        out = self.base.forward(x, ctx)
        for weights, tokens in self._updates(ctx):
            add_lora_(out, x, weights, tokens)
        if ctx is not None and ctx.slots is not None:
            ctx.slots.slots.add_(out, x, ctx.slots.places, self.name)
        return out

    def forward_gated(self, x: Tensor, activation: GatedActivation, ctx: StepContext | None) -> Tensor:
        """Do what :meth:`Linear.forward_gated` says; in one launch, where a form has that, if no row is adapted."""
        if self._updates(ctx) or (ctx is not None and ctx.slots is not None):
            return super().forward_gated(x, activation, ctx)
        return self.base.forward_gated(x, activation, ctx)

    def _updates(self, ctx: StepContext | None) -> list[tuple[LoraWeights, Tensor]]:
        """Return the updates of this layer in a step, each with the indices of its tokens."""
        if ctx is None or ctx.adapted is None:
            return []
        adapted = ctx.adapted
        pairs = ((lora.of.get(self.name), tokens) for lora, tokens in zip(adapted.loras, adapted.tokens, strict=True))
        return [(weights, tokens) for weights, tokens in pairs if weights is not None]
