"""Defines the data that goes through a model with the tokens of one step.

It stands below ``attention/``, which makes the steps, and below ``quant/``, whose layers receive them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.lora_slots import SlotRows
from paged_sdk.kernels.native.paged_attention import NativeRows
from paged_sdk.kernels.placement import carried
from paged_sdk.kernels.rotary import Rotation

__all__ = ["AttentionStep", "InsertedRows", "StepContext"]


class AttentionStep(ABC):
    """Computes attention for all layers in one step: the indices are made once, and each layer uses them."""

    @abstractmethod
    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Write the new keys and values to the cache, then attend.

        :param query: ``[num_tokens, num_heads, head_dim]``, the tokens of all rows in the order of the rows
        :param key: ``[num_tokens, num_kv_heads, head_dim]``, position already applied; ``value`` likewise
        :param sinks: see :attr:`~paged_sdk.kernels.attention_inputs.ScoreOptions.sinks`
        :returns: ``[num_tokens, num_heads, head_dim]``, contiguous
        """

    @property
    def native_rows(self) -> NativeRows | None:
        """Return the step's rows as the native CPU kernels take them, or None where these cannot read the cache."""
        return None

    def rotate_and_forward(
        self, layer: int, query_key: Tensor, value: Tensor, rotation: Rotation, sinks: Tensor | None = None
    ) -> Tensor:
        """Apply the tokens' positions to queries and keys, then do what :meth:`forward` does.

        :param query_key: ``[num_tokens, num_heads + num_kv_heads, head_dim]``, changed in place
        :param rotation: the rotary embedding at the tokens' positions
        """
        rotation.rotate_(query_key)
        num_heads = query_key.shape[1] - value.shape[1]
        return self.forward(layer, query_key[:, :num_heads], query_key[:, num_heads:], value, sinks)


@frozen(eq=False)
class InsertedRows:
    """Holds vectors that take the place of the embeddings of some tokens: what an encoder has made of an image.

    :ivar places: ``[n]`` int64: which tokens of the step
    :ivar vectors: ``[n, hidden_size]``
    :ivar later: one for each of the first layers, like ``vectors``: what is added to what the layer gives
    """

    places: Tensor
    vectors: Tensor
    later: tuple[Tensor, ...] = ()

    def put_into(self, embedded: Tensor) -> None:
        """Overwrite rows of the step's embeddings, ``[num_tokens, hidden_size]``."""
        embedded.index_copy_(0, self.places, self.vectors.to(embedded.dtype))

    def part(self, tokens: Tensor) -> InsertedRows | None:
        """Return those of some of the step's tokens; None: there are none.

        :param tokens: ``[m]`` int64, ascending: which tokens, whose places are counted anew
        """
        places = torch.searchsorted(tokens, self.places)
        kept = tokens[places.clamp(max=len(tokens) - 1)] == self.places
        if not kept.any():
            return None
        return InsertedRows(places[kept], self.vectors[kept], tuple(each[kept] for each in self.later))

    def add_to(self, residual: Tensor, layer: int) -> None:
        """Add to rows of what a layer gives, ``[num_tokens, hidden_size]``."""
        residual.index_add_(0, self.places, self.later[layer].to(residual.dtype))

    def on(self, device: torch.device) -> InsertedRows:
        """Return the same on a device."""
        places, vectors, *later = (carried(each, device) for each in (self.places, self.vectors, *self.later))
        return InsertedRows(places, vectors, tuple(later))


@frozen(kw_only=True)
class StepContext:
    """Holds the data of one step; it is passed as an argument, so that two models can live in one process.

    :ivar attention: computes attention for this step's rows
    :ivar is_long: ``[num_tokens]`` bool: whether the text of each token has outgrown the length beyond which the model
        rotates its keys otherwise; None: it has where the token's own position lies beyond that length
    :ivar adapted: which adapter each token goes through; None: none has one
    :ivar slots: the same in a recorded step, whose adapters are not known when it is recorded
    :ivar inserted: what takes the place of tokens' embeddings; None: nothing does
    :ivar parts: ``[num_tokens]`` int64: 1 for tokens of the second of two texts, 0 for others; None: there are none
    """

    attention: AttentionStep
    is_long: Tensor | None = None
    adapted: AdaptedRows | None = None
    slots: SlotRows | None = None
    inserted: InsertedRows | None = None
    parts: Tensor | None = None

    def on(self, device: torch.device) -> StepContext:
        """Return the same for layers on a device; attention finds each layer's device by itself."""
        return evolve(
            self,
            is_long=None if self.is_long is None else carried(self.is_long, device),
            adapted=None if self.adapted is None else self.adapted.on(device),
            inserted=None if self.inserted is None else self.inserted.on(device),
        )
