"""Run the layer that some checkpoints have for multi-token prediction (MTP): it predicts one token further ahead.

See DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2, and for several tokens from one
such layer Li et al., 2024, "EAGLE", arXiv 2401.15077.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.kernels.placement import Placement
from paged_sdk.kernels.step import InsertedRows, StepContext
from paged_sdk.layers.norm import Norm
from paged_sdk.layers.rotary import RotaryEmbedding
from paged_sdk.models.checkpoint_layout import read_shape
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.decoder_layer import DecoderLayer, load_decoder_layer
from paged_sdk.models.drafting import DraftingDecoder, likeliest_tokens, projected, run_layers
from paged_sdk.models.norms import load_norm
from paged_sdk.models.tensor_names import MtpNames, TensorNames
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.weights.source import WeightSource

__all__ = ["MtpModule", "MtpWeights", "load_mtp_weights", "mtp_names"]


@frozen(eq=False, kw_only=True)
class MtpWeights:
    """Holds what a checkpoint has for multi-token prediction, without the embeddings and the output projection, which
    are the model's.

    :ivar config: the shape of the layer, as that of a decoder
    :ivar layer: the layer
    :ivar last_norm: norm after it
    :ivar embedding_norm: norm of the embedding that it reads
    :ivar hidden_norm: norm of the hidden state that it reads
    :ivar projection: makes the layer's input of both, the embedding first
    """

    config: DecoderConfig
    layer: DecoderLayer
    last_norm: Norm
    embedding_norm: Norm
    hidden_norm: Norm
    projection: Linear

    def beside(self, target: DecoderModel) -> DecoderModel:
        """Return the layer as a decoder, with a model's embeddings and output projection."""
        return DecoderModel(
            self.config,
            embedding=target.embedding,
            layers=[self.layer],
            norm=self.last_norm,
            head=target.head,
            ropes={settings: RotaryEmbedding(settings, device=target.device) for settings in self.config.ropes},
            dtype=target.dtype,
            placement=Placement.on(target.device, 1),
        )


@frozen(eq=False, kw_only=True)
class MtpModule:
    """Predicts the token after the next one, from the model's hidden state at a token and the token after it.

    Its own output, normed like the model's, can take the place of the model's hidden state, to predict further tokens
    one by one, as in transformers. Embeddings and output projection are the model's.

    :ivar weights: the layer's own
    :ivar embedding: the model's embeddings
    :ivar model: the layer as a decoder, as it runs
    """

    weights: MtpWeights
    embedding: Embedding
    model: DraftingDecoder

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
        own, dtype = self.weights, self.model.dtype
        if own.projection.native_weights is None:
            embedded, states = embedded.to(dtype), states.to(dtype)
        normed = [own.embedding_norm.forward(embedded), own.hidden_norm.forward(states)]
        return run_layers(self.model, projected(own.projection, normed, dtype), positions, ctx)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return rows of :meth:`forward`'s result after the last norm, float32."""
        return self.model.normed(hidden)

    def likeliest(self, hidden: Tensor) -> list[int]:
        """Return the likeliest token of each row of :meth:`forward`'s result; below 0: there is none."""
        return likeliest_tokens(self.model, hidden)


def mtp_names(source: WeightSource, names: TensorNames, num_layers: int) -> MtpNames | None:
    """Return the names of a checkpoint's layer for multi-token prediction; None if it has none that is known here.

    :param num_layers: number of the model's own layers
    """
    known = (each.after(names.layer(num_layers)) for each in names.mtp)
    return next((each for each in known if _is_there(source, names, each)), None)


def _is_there(source: WeightSource, names: TensorNames, own: MtpNames) -> bool:
    """Return whether a checkpoint has a layer of these names, and not only parts of it. The last norm may be missing in
    GGUF files, where it is the model's.
    """
    of_layer = (f"{own.layer}{name}" for name in (names.norms.attention, names.norms.mlp, names.output))
    needed = (own.projection, own.embedding_norm, own.hidden_norm, *of_layer)
    return all(f"{name}.weight" in source for name in needed) and f"{own.embedding}.weight" not in source


def load_mtp_weights(
    config: Mapping[str, Any], source: WeightSource, target: DecoderModel, policy: WeightPolicy
) -> MtpWeights:
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
    last_norm = own.last_norm if f"{own.last_norm}.weight" in source else names.body + names.norms.last
    weights = MtpWeights(
        config=layer_shape,
        layer=load_decoder_layer(loader, layer_shape, names, 0, prefix=own.layer),
        last_norm=load_norm(loader, shape, last_norm),
        embedding_norm=load_norm(loader, shape, own.embedding_norm),
        hidden_norm=load_norm(loader, shape, own.hidden_norm),
        projection=loader.linear([own.projection], in_features=2 * size, out_features=(size,)),
    )
    loader.close()
    return weights


def _shape_of_layer(shape: DecoderConfig) -> DecoderConfig:
    """Return the shape of a decoder with the one layer: it is like the model's last layer with attention, with experts
    if the model has any.
    """
    like = shape.of_layers([shape.attention_layers[-1]])
    moe = None if shape.moe is None else evolve(shape.moe, layers=frozenset({0}))
    return evolve(like, moe=moe, num_image_layers=0)
