"""Run an assistant, which drafts over the keys and values of its target (Gemma 4).

See ``SinglePositionMultiTokenCandidateGenerator`` in transformers, whose drafts these are.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen
from torch import Tensor

from paged_sdk.kernels.step import StepContext
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.drafting import DraftingDecoder, likeliest_tokens, projected, run_layers
from paged_sdk.models.tensor_names import AssistantNames
from paged_sdk.models.token_clusters import TokenClusters, load_token_clusters
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.embedding import Embedding
from paged_sdk.quant.linear import Linear
from paged_sdk.quant.policy import WeightPolicy
from paged_sdk.weights.source import WeightSource

__all__ = ["AssistantModule", "AssistantWeights", "load_assistant_weights"]

_NAMES: Final = AssistantNames()


@frozen(eq=False, kw_only=True)
class AssistantWeights:
    """Holds an assistant: its decoder, whose layers have no keys of their own, and what it has besides.

    :ivar decoder: its layers, and the output projection that its embeddings are
    :ivar input: projects the embedding of a token and a hidden state, both of the target's size, to its own size
    :ivar output: projects its hidden state after the last norm to the target's size
    :ivar clusters: finds the likeliest token among some; None: among all
    """

    decoder: DecoderModel
    input: Linear
    output: Linear
    clusters: TokenClusters | None = None


@frozen(eq=False, kw_only=True)
class AssistantModule:
    """Predicts the token after a text's last one, and further ones one by one.

    :ivar weights: the assistant's own
    :ivar embedding: the target's embeddings
    :ivar model: its decoder, as it runs
    """

    weights: AssistantWeights
    embedding: Embedding
    model: DraftingDecoder

    def forward(self, token_ids: Tensor, states: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """Compute hidden states.

        :param token_ids: of each row the last token, int64 ``[num_rows]``
        :param states: of each row, float32 ``[num_rows, target_size]``: the target's hidden state after its last norm,
            at the token before; for further drafts, :meth:`next_states`
        :param positions: of each row that of the text's last token, for further drafts, too; int64 ``[num_rows]``
        :param ctx: attends over the target's keys of all tokens before
        :returns: ``[num_rows, hidden_size]``, as :meth:`next_states` and :meth:`likeliest` take them
        """
        made = projected(self.weights.input, [self.embedding.in_float32(token_ids), states], self.model.dtype)
        return run_layers(self.model, made, positions, ctx)

    def next_states(self, hidden: Tensor) -> Tensor:
        """Return what takes the place of the target's hidden state for the next draft, float32.

        :param hidden: rows of :meth:`forward`'s result
        """
        return projected(self.weights.output, [self.model.normed(hidden)], self.model.dtype).float()

    def likeliest(self, hidden: Tensor) -> list[int]:
        """Return the likeliest token of each row of :meth:`forward`'s result; below 0: there is none."""
        if self.weights.clusters is not None:
            return self.weights.clusters.likeliest(self.model.normed(hidden), self.weights.decoder)
        return likeliest_tokens(self.model, hidden)


def load_assistant_weights(source: WeightSource, decoder: DecoderModel, policy: WeightPolicy) -> AssistantWeights:
    """Load what an assistant has besides its decoder.

    :param decoder: the decoder of the same checkpoint, on one device
    :param policy: chooses the form of each matrix
    :raises CheckpointError: a tensor is missing or has another shape
    """
    own, size = decoder.config.assistant, decoder.config.hidden_size
    assert own is not None, "the model is no assistant"
    loader = WeightLoader(source, policy, dtype=decoder.dtype, device=decoder.device, prefixes=_NAMES.prefixes)
    weights = AssistantWeights(
        decoder=decoder,
        input=loader.linear([_NAMES.input], in_features=2 * own.target_size, out_features=(size,)),
        output=loader.linear([_NAMES.output], in_features=size, out_features=(own.target_size,)),
        clusters=load_token_clusters(loader, source, decoder, own),
    )
    loader.close()
    return weights
