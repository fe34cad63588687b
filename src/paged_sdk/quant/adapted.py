"""Apply requests' LoRA adapters to linear layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from attrs import field, frozen
from torch import Tensor

from paged_sdk.kernels.activation import KernelActivation
from paged_sdk.kernels.lora import LoraWeights, add_lora_
from paged_sdk.kernels.step import StepContext
from paged_sdk.quant.linear import DecodedRows, Linear, NativeWeights

__all__ = ["AdaptableLinear", "AdaptableShape"]


@frozen(eq=False)
class AdaptableShape:
    """Describes a linear layer to adapters, without its weights.

    :ivar modules: maps the name of each of the layer's matrices in the checkpoint, without ``.weight``, to its outputs
    :ivar in_features: columns of the weight
    :ivar device: the device of the layer
    :ivar order: for a layer of one matrix, the matrix row of each output; None: the outputs are the rows in order
    :ivar whole: for matrices of which this rank has a shard, maps the name to the full shape
    :ivar rows: maps the name to the rows that this rank has, unless it has all
    :ivar cols: the columns that this rank has; None: all
    :ivar has_whole_rows: whether this rank has all columns of its rows
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
        """Return the full shape of a matrix in the checkpoint."""
        rows = self.modules[module]
        return self.whole.get(module, (rows.stop - rows.start, self.in_features))

    @property
    def name(self) -> str:
        """Return the first module name, under which adapters store their update of the layer."""
        return next(iter(self.modules))


class AdaptableLinear(Linear):
    """Computes a linear layer, and adds to each row the update of its adapter.

    :ivar base: the layer; rows without an adapter use only this
    :ivar name: see :class:`AdaptableShape`
    """

    def __init__(self, base: Linear, name: str) -> None:
        super().__init__(in_features=base.in_features, out_features=base.out_features, num_bytes=base.num_bytes)
        self.base = base
        self.name = name

    @property
    def native_weights(self) -> NativeWeights | None:
        """Return the base's weights. A native call that uses them adds the adapters' updates itself."""
        return self.base.native_weights

    def decoded(self, device: torch.device) -> Iterator[DecodedRows]:
        """Implement :meth:`Linear.decoded`: yield the rows of the base."""
        return self.base.decoded(device)

    def forward(self, x: Tensor, ctx: StepContext | None) -> Tensor:
        """Implement :meth:`Linear.forward`."""
        out = self.base.forward(x, ctx)
        for weights, tokens in self._updates(ctx):
            add_lora_(out, x, weights, tokens)
        if ctx is not None and ctx.slots is not None:
            ctx.slots.slots.add_(out, x, ctx.slots.places, self.name)
        return out

    def forward_gated(self, x: Tensor, activation: KernelActivation, ctx: StepContext | None) -> Tensor:
        """Implement :meth:`Linear.forward_gated`. If no row has an adapter, use the base's fused form."""
        if self._updates(ctx) or (ctx is not None and ctx.slots is not None):
            return super().forward_gated(x, activation, ctx)
        return self.base.forward_gated(x, activation, ctx)

    def apart_by_adapter(self, x: Tensor, product: Tensor, ctx: StepContext) -> list[tuple[Tensor, Tensor]]:
        """Apply the layer to rows that are no tokens of the step with each of the step's adapters that change it.

        :param x: ``[num_rows, in_features]``
        :param product: ``[num_rows, out_features]``: what the layer computes of them without an adapter
        :returns: for each of the adapters the indices of its tokens, and the rows' result
        """
        found, rows = [], torch.arange(len(x), device=x.device)
        for weights, tokens in self._updates(ctx):
            changed = product.clone()
            add_lora_(changed, x, weights, rows)
            found.append((tokens, changed))
        return found

    def _updates(self, ctx: StepContext | None) -> list[tuple[LoraWeights, Tensor]]:
        """Return the step's updates of this layer, each with the indices of its tokens."""
        if ctx is None or ctx.adapted is None:
            return []
        adapted = ctx.adapted
        updates = (lora.by_layer.get(self.name) for lora in adapted.loras)
        pairs = zip(updates, adapted.tokens, strict=True)
        return [(weights, tokens) for weights, tokens in pairs if weights is not None]
