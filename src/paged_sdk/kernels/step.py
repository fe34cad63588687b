"""Defines the per-step data that a model's layers receive.

The module is in ``kernels/`` because it must be below both ``attention/``, which makes the steps, and ``quant/``, whose
layers receive them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.kernels.attention_inputs import LearnedScores
from paged_sdk.kernels.lora import AdaptedRows
from paged_sdk.kernels.lora_slots import SlotRows
from paged_sdk.kernels.native.paged_attention import NativeRows
from paged_sdk.kernels.placement import moved_to
from paged_sdk.kernels.recurrent_step import RecurrentStep
from paged_sdk.kernels.rotary import Rotation

__all__ = ["AttentionStep", "InsertedRows", "StepContext"]


class AttentionStep(ABC):
    """Computes attention for all layers of one step, with indices that are made once per step.

    A step that others are made of passes every call on, also of the methods that are not abstract: it may be faster.
    """

    @abstractmethod
    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the keys and values of the step's tokens to the cache.

        :param key: ``[num_tokens, num_kv_heads, head_dim]``, already rotated, the tokens of all rows in the order of
            the rows; ``value`` likewise
        """

    @abstractmethod
    def attend(self, layer: int, query: Tensor, learned: LearnedScores | None = None) -> Tensor:
        """Attend over the cache, after the keys and values of the step's tokens were written: the layer's own, or those
        of an earlier layer that it shares (:attr:`~paged_sdk.config.layer_shape.LayerShape.kv_layer`).

        :param layer: the layer that attends
        :param query: ``[num_tokens, num_heads, head_dim]``, already rotated
        :param learned: what the layer adds to its scores; with a relative bias only if the model's config says that it
            has :attr:`~paged_sdk.config.decoder.DecoderConfig.relative_biases`
        :returns: ``[num_tokens, num_heads, head_dim]``, contiguous. The first
            :attr:`~paged_sdk.config.decoder.DecoderConfig.key_only` elements of a head are arbitrary
        """

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, learned: LearnedScores | None = None
    ) -> Tensor:
        """Write the new keys and values to the cache, then attend."""
        self.write(layer, key, value)
        return self.attend(layer, query, learned)

    @property
    def native_rows(self) -> NativeRows | None:
        """Return the step's rows in the native CPU kernels' form, or None if these kernels cannot read the cache."""
        return None

    @property
    def recurrent(self) -> RecurrentStep:
        """Return the states of the step's sequences, for models with recurrent layers."""
        raise AssertionError(f"{type(self).__name__} keeps no states")

    def rotate_and_forward(
        self, layer: int, query_key: Tensor, value: Tensor, rotation: Rotation, learned: LearnedScores | None = None
    ) -> Tensor:
        """Rotate queries and keys, then call :meth:`forward`.

        :param query_key: ``[num_tokens, num_heads + num_kv_heads, head_dim]``, changed in place
        :param rotation: the rotary embedding at the tokens' positions
        """
        rotation.rotate_(query_key)
        num_heads = query_key.shape[1] - value.shape[1]
        return self.forward(layer, query_key[:, :num_heads], query_key[:, num_heads:], value, learned)


@frozen(eq=False)
class InsertedRows:
    """Holds vectors that replace token embeddings, such as an encoder's output for an image.

    :ivar places: ``[n]`` int64: indices of the tokens within the step
    :ivar vectors: ``[n, hidden_size]``
    :ivar later: like ``vectors``, one tensor for each of the first layers: added to the layer's output
    """

    places: Tensor
    vectors: Tensor
    later: tuple[Tensor, ...] = ()

    def put_into(self, embedded: Tensor) -> None:
        """Overwrite rows of the step's embeddings, ``[num_tokens, hidden_size]``."""
        embedded.index_copy_(0, self.places, self.vectors.to(embedded.dtype))

    def part(self, tokens: Tensor) -> InsertedRows | None:
        """Return the vectors of a subset of the step's tokens, or None if there are none.

        :param tokens: ``[m]`` int64, ascending: the subset; the result's ``places`` are indices into it
        """
        places = torch.searchsorted(tokens, self.places)
        kept = tokens[places.clamp(max=len(tokens) - 1)] == self.places
        if not kept.any():
            return None
        return InsertedRows(places[kept], self.vectors[kept], tuple(each[kept] for each in self.later))

    def add_to(self, residual: Tensor, layer: int) -> None:
        """Add the layer's vectors to rows of the residual stream, ``[num_tokens, hidden_size]``."""
        residual.index_add_(0, self.places, self.later[layer].to(residual.dtype))

    def on(self, device: torch.device) -> InsertedRows:
        """Return the same on the given device."""
        places, vectors, *later = (moved_to(each, device) for each in (self.places, self.vectors, *self.later))
        return InsertedRows(places, vectors, tuple(later))


@frozen(kw_only=True)
class StepContext:
    """Holds the data of one step. It is passed as an argument, so that two models can live in one process.

    :ivar attention: computes attention for this step's rows
    :ivar is_long: ``[num_tokens]`` bool: whether each token's sequence is longer than LongRoPE's trained context; None:
        decide by the token's own position
    :ivar adapted: each token's adapter; None: no token has one
    :ivar slots: each token's adapter in a recorded step, whose adapters are not known at recording time
    :ivar inserted: vectors that replace token embeddings, or None
    :ivar layer_inputs: ``[num_tokens, num_layers, size]``, what each layer adds of a token besides its embedding; None:
        nothing, or not yet computed
    :ivar parts: ``[num_tokens]`` int64: token type ids, 1 for tokens of the second of two texts and 0 for others; None:
        no token is of a second text
    """

    attention: AttentionStep
    is_long: Tensor | None = None
    adapted: AdaptedRows | None = None
    slots: SlotRows | None = None
    inserted: InsertedRows | None = None
    layer_inputs: Tensor | None = None
    parts: Tensor | None = None

    def on(self, device: torch.device) -> StepContext:
        """Return the same for layers on the given device; ``attention`` handles devices itself."""
        return evolve(
            self,
            is_long=None if self.is_long is None else moved_to(self.is_long, device),
            adapted=None if self.adapted is None else self.adapted.on(device),
            inserted=None if self.inserted is None else self.inserted.on(device),
            layer_inputs=None if self.layer_inputs is None else moved_to(self.layer_inputs, device),
        )
