"""Run the layer that some checkpoints have for multi-token prediction (MTP): it predicts one token further ahead.

See DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2, and for several tokens from one
such layer Li et al., 2024, "EAGLE", arXiv 2401.15077.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.placement import Placement
from paged_sdk.kernels.sampling import NOT_DRAWN
from paged_sdk.kernels.step import InsertedRows, StepContext
from paged_sdk.layers.norm import Norm
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.checkpoint_layout import read_shape
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.decoder_layer import load_decoder_layer
from paged_sdk.models.family import MtpNames, TensorNames
from paged_sdk.models.fused_decoder import FusedDecoderModel
from paged_sdk.models.norms import load_norm
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.weights.source import WeightSource

__all__ = ["MtpModule", "load_mtp_module", "mtp_names"]


@frozen(eq=False, kw_only=True)
class MtpModule:
    """Predicts the token after the next one, from the model's hidden state at a token and the token after it.

    Its own output can take the place of the model's hidden state, to predict further tokens one by one. Embeddings and
    output projection are the model's.

    :ivar model: the layer with the norm after it, as a decoder of one layer
    :ivar embedding: the model's embeddings
    :ivar embedding_norm: norm of the embedding
    :ivar hidden_norm: norm of the hidden state
    :ivar projection: makes the layer's input of both, the embedding first
    """

    model: DecoderModel | FusedDecoderModel
    embedding: Embedding
    embedding_norm: Norm
    hidden_norm: Norm
    projection: Linear

    @property
    def config(self) -> DecoderConfig:
        """Return the shape of the layer, as that of a decoder."""
        return self.model.config

    def embedded(self, token_ids: Tensor, inserted: InsertedRows | None = None) -> Tensor:
        """Return embeddings, float32 ``[num_tokens, hidden_size]``.

        :param inserted: vectors that replace some of them
        """
        rows = self.embedding.in_float32(token_ids)
        if inserted is not None:
            inserted.put_into(rows)
        return rows

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Compute hidden states.

        :param embedded: the embedding of the token after each token, float32 ``[num_tokens, hidden_size]``
        :param states: of each token, likewise: the model's hidden state after its last norm, or :meth:`normed`
        :param positions: of the tokens; see :meth:`~paged_sdk.models.causal_model.CausalModel.forward`
        :returns: ``[num_tokens, hidden_size]``, as :meth:`normed` and :meth:`likeliest` take them; only rows that the
            step reads are defined
        """
        if self.projection.native_weights is None:  # it multiplies in the model's dtype
            embedded, states = embedded.to(self.model.dtype), states.to(self.model.dtype)
        both = torch.cat((self.embedding_norm.forward(embedded), self.hidden_norm.forward(states)), 1)
        made = self.projection.forward(both, None)
        wide = isinstance(self.model, FusedDecoderModel)
        return self.model.forward_embedded(made.float() if wide else made.to(self.model.dtype), positions, ctx)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return rows of :meth:`forward`'s result after the last norm, float32."""
        return self.model.normed(hidden)

    def likeliest(self, hidden: Tensor) -> list[int]:
        """Return the likeliest token of each row of :meth:`forward`'s result; below 0: there is none."""
        if isinstance(self.model, FusedDecoderModel):
            tokens: list[int] = self.model.likeliest(hidden).tolist()
            return tokens
        logits = self.model.logits(hidden)
        found: list[int] = logits.argmax(1).where(logits.isfinite().all(1), NOT_DRAWN).tolist()
        return found


def mtp_names(source: WeightSource, names: TensorNames, num_layers: int) -> MtpNames | None:
    """Return the names of a checkpoint's layer for multi-token prediction; None if it has none that is known here.

    :param num_layers: number of the model's own layers
    """
    known = (each.after(names.layer(num_layers)) for each in names.mtp)
    return next((each for each in known if f"{each.projection}.weight" in source), None)


def load_mtp_module(
    config: Mapping[str, Any], source: WeightSource, target: DecoderModel, policy: WeightPolicy
) -> MtpModule:
    """Load a checkpoint's first layer for multi-token prediction.

    :param config: ``config.json``'s content
    :param target: the checkpoint's model, on one device
    :param policy: chooses the form of each matrix
    :raises CheckpointError: a tensor is missing or has another shape
    """
    shape, names = read_shape(config, source)
    own = mtp_names(source, names, shape.num_layers)
    assert own is not None, "the checkpoint has no such layer"
    assert own.layer is not None, "names are whole"
    layer_shape, size = _shape_of_layer(shape), shape.hidden_size
    loader = WeightLoader(source, policy, dtype=target.dtype, device=target.device, prefixes=(own.layer,))
    model = DecoderModel(
        layer_shape,
        embedding=target.embedding,
        layers=[load_decoder_layer(loader, layer_shape, names, 0, prefix=own.layer)],
        norm=load_norm(loader, shape, own.last_norm),
        head=target.head,
        ropes={settings: RotaryEmbedding(settings, device=target.device) for settings in layer_shape.ropes},
        dtype=target.dtype,
        placement=Placement.on(target.device, 1),
    )
    module = MtpModule(
        model=model,
        embedding=target.embedding,
        embedding_norm=load_norm(loader, shape, own.embedding_norm),
        hidden_norm=load_norm(loader, shape, own.hidden_norm),
        projection=loader.linear([own.projection], in_features=2 * size, out_features=(size,)),
    )
    loader.close()
    return module


def _shape_of_layer(shape: DecoderConfig) -> DecoderConfig:
    """Return the shape of a decoder with the one layer: it is like the model's last layer with attention, with experts
    if the model has any.
    """
    like = shape.of_layers([shape.attention_layers[-1]])
    moe = None if shape.moe is None else evolve(shape.moe, layers=frozenset({0}))
    return evolve(like, moe=moe, num_image_layers=0)
