"""Run a decoder-only transformer composed of shared blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import evolve
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.rope import RopeConfig
from paged_sdk.kernels.lora import AdaptedRows, add_embeddings_, add_lora_
from paged_sdk.kernels.placement import Placement
from paged_sdk.kernels.rotary import Rotation
from paged_sdk.kernels.step import StepContext
from paged_sdk.layers.norm import Norm
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.decoder_layer import DecoderLayer
from paged_sdk.models.layer_inputs import LayerInputs
from paged_sdk.models.rank_head import RankHead
from paged_sdk.parallel.group import Group
from paged_sdk.quant.adapted import AdaptableShape
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.linear import Linear

__all__ = ["DecoderModel"]


class DecoderModel:
    """Holds a decoder, and computes logits from token ids if the whole model is on one device.

    :param head: the output projection
    :param ropes: every rotary embedding that the layers use, by its settings, on the device of the embeddings
    :param embedding_norm: norm after the embeddings; None: there is none
    :param adaptable: the linear layers that adapters may change
    :param head_name: name of the output projection in ``adaptable``; ``embedding_name`` likewise
    :param group: the ranks that hold the other shards of the model; None: the model is not divided
    :param layer_inputs: computes what each layer adds of a token besides its embedding; None: nothing
    :param rank_head: computes a text's score, on the device of the last norm; None: the checkpoint has no such layer
    :ivar dtype: dtype of activations, keys and values
    :ivar adapts_row_by_row: whether adapters' updates of embeddings and logits are computed one row at a time, because
        the last bits of a row of torch's products depend on the number of rows
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: Linear,
        ropes: dict[RopeConfig, RotaryEmbedding],
        dtype: torch.dtype,
        placement: Placement,
        embedding_norm: Norm | None = None,
        adaptable: Sequence[AdaptableShape] = (),
        head_name: str = "",
        embedding_name: str = "",
        group: Group | None = None,
        rank_head: RankHead | None = None,
        layer_inputs: LayerInputs | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.placement = placement
        self._layers = list(layers)
        self.head = head
        self.embedding = embedding
        self.embedding_norm = embedding_norm
        self.layer_inputs = layer_inputs
        self.norm = norm
        self.ropes = ropes
        self.adaptable: tuple[AdaptableShape, ...] = tuple(adaptable)
        self.head_name = head_name
        self.embedding_name = embedding_name
        self.group = group
        self.rank_head: RankHead | None = rank_head
        self.adapts_row_by_row: bool = False

    @property
    def device(self) -> torch.device:
        """Return the device of the embeddings."""
        return self.placement.embedding

    @property
    def layers(self) -> tuple[DecoderLayer, ...]:
        """Return the layers, in order."""
        return tuple(self._layers)

    def adaptable_linear(self, name: str) -> Linear:
        """Return the present linear layer of that name; requantization replaces layers."""
        if name == self.head_name:
            return self.head
        return next(linear for layer in self.layers for linear in layer.adaptable if linear.name == name)

    def replace_layer(self, index: int, layer: DecoderLayer) -> None:
        """Replace one layer."""
        self._layers[index] = layer

    def forward(self, token_ids: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Run all layers over the tokens of a step.

        :param token_ids: ``[num_tokens]`` int64, of all rows in order
        :param positions: ``[num_tokens]`` int64, the position of each token within its sequence; ``[3, num_tokens]``:
            its rotary positions in time, height and width
        :returns: ``[num_tokens, hidden_size]`` after the last norm, as :meth:`logits` takes them
        """
        residual = self.embedded(token_ids, ctx)
        return self.forward_embedded(residual, positions, self.with_layer_inputs(token_ids, residual, ctx))

    def forward_embedded(self, embedded: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Run all layers like :meth:`forward`.

        :param embedded: the input of the first layer, ``[num_tokens, hidden_size]``; may be overwritten
        """
        rotations = {settings: rope.at(positions, ctx.is_long) for settings, rope in self.ropes.items()}
        normed, _ = self.run_layers(range(len(self._layers)), embedded, rotations, ctx, self.norm)
        return normed

    def embedded(self, token_ids: Tensor, ctx: StepContext) -> Tensor:
        """Return the input of the first layer, ``[num_tokens, hidden_size]``: embeddings, their norm, image vectors."""
        residual = self.looked_up(token_ids, ctx)
        if self.embedding_norm is not None:
            residual = self.embedding_norm.forward(residual)
        if ctx.inserted is not None:
            ctx.inserted.put_into(residual)
        return residual

    def with_layer_inputs(self, token_ids: Tensor, embedded: Tensor, ctx: StepContext) -> StepContext:
        """Return the step with what each layer adds of its tokens besides their embeddings, if anything.

        :param embedded: the input of the first layer, of :attr:`dtype`
        """
        if self.layer_inputs is None:
            return ctx
        return evolve(ctx, layer_inputs=self.layer_inputs.forward(token_ids, embedded, ctx))

    def looked_up(self, token_ids: Tensor, ctx: StepContext, *, in_float32: bool = False) -> Tensor:
        """Return the embeddings of a step's tokens, with adapters' updates.

        :param in_float32: see :meth:`Embedding.in_float32`; False: of :attr:`dtype`
        """
        rows = self.embedding.in_float32(token_ids) if in_float32 else self.embedding.forward(token_ids)
        if ctx.adapted is not None:
            for lora, tokens in zip(ctx.adapted.loras, ctx.adapted.tokens, strict=True):
                if lora.embedding is not None:
                    for together in self._multiplied_together(tokens):
                        add_embeddings_(rows, token_ids, lora.embedding, together, self.embedding.scale)
        return rows

    def run_layers(
        self,
        layers: range,
        residual: Tensor,
        rotations: Mapping[RopeConfig, Rotation],
        ctx: StepContext,
        last_norm: Norm,
    ) -> tuple[Tensor, Tensor]:
        """Run consecutive layers on one device.

        :param residual: the residual stream before the layers, ``[num_tokens, hidden_size]``; may be overwritten
        :param rotations: the layers' rotary embeddings at the tokens' positions, by settings
        :param last_norm: the norm after the last layer
        :returns: the residual stream after ``last_norm``, and before it
        """
        own = self._layers[layers.start : layers.stop]
        first_norm, *next_norms = (*(layer.attention_norm for layer in own), last_norm)
        normed = first_norm.forward(residual)
        num_image_layers = 0 if ctx.inserted is None else len(ctx.inserted.later)
        for index, layer, next_norm in zip(layers, own, next_norms, strict=True):
            normed, residual = layer.forward(normed, residual, rotations[self.config.ropes[index]], ctx, next_norm)
            if index < num_image_layers and ctx.inserted is not None:
                ctx.inserted.add_to(residual, index)
                normed = next_norm.forward(residual)
        return normed, residual

    def normed(self, hidden: Tensor) -> Tensor:
        """Return rows of :meth:`forward`'s result in float32: the last norm is already applied."""
        return hidden.float()

    def logits(self, hidden: Tensor, adapted: AdaptedRows | None = None) -> Tensor:
        """Compute logits.

        :param hidden: some rows of :meth:`forward`'s result, ``[num_rows, hidden_size]``, or the same in float32
        :param adapted: each row's adapter; None: no adapter updates the output projection
        :returns: ``[num_rows, vocab_size]`` float32, which the caller may change
        """
        # Native kernels take float32; a head without one multiplies in the model's dtype.
        hidden = hidden if self.head.native_weights is not None else hidden.to(self.dtype)
        logits = self.head.forward(hidden, None).float()
        if adapted is not None:
            for lora, rows in zip(adapted.loras, adapted.tokens, strict=True):
                if lora.head is not None:
                    for together in self._multiplied_together(rows):
                        add_lora_(logits, hidden, lora.head, together)
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        if scale is not None:
            logits.mul_(scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _multiplied_together(self, rows: Tensor) -> tuple[Tensor, ...]:
        return torch.split(rows, 1) if self.adapts_row_by_row else (rows,)
