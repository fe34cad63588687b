"""Find an assistant's likeliest token among those of a few clusters (``use_ordered_embeddings`` of Gemma 4's)."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from paged_sdk.config.assistant import AssistantConfig
from paged_sdk.kernels.sampling import NOT_DRAWN
from paged_sdk.models.decoder import DecoderModel
from paged_sdk.models.drafting import projected
from paged_sdk.models.tensor_names import AssistantNames
from paged_sdk.models.weight_loader import WeightLoader
from paged_sdk.quant.linear import Linear
from paged_sdk.weights.source import WeightSource, malformed

__all__ = ["TokenClusters", "load_token_clusters"]


@frozen(eq=False, kw_only=True)
class TokenClusters:
    """Finds the likeliest token without computing the logits of all: among the tokens of the clusters that score best.

    :ivar centroids: scores each cluster, ``[num_clusters, hidden_size]``
    :ivar members: the tokens of each cluster, int64 ``[num_clusters, tokens_per_cluster]``
    :ivar num_searched: number of clusters to look into
    """

    centroids: Linear
    members: Tensor
    num_searched: int

    def likeliest(self, states: Tensor, decoder: DecoderModel) -> list[int]:
        """Return the likeliest token of each hidden state; below 0: there is none.

        :param states: ``[num_rows, hidden_size]`` float32 after the last norm
        :param decoder: has the rows of the output projection, times a factor, as its embeddings
        """
        scores = projected(self.centroids, [states], decoder.dtype)
        best = scores.topk(self.num_searched, sorted=False).indices
        found = []
        for state, clusters in zip(states, best, strict=True):
            tokens = self.members[clusters].flatten()
            logits = decoder.embedding.in_float32(tokens) @ state
            found.append(int(tokens[logits.argmax()]) if logits.isfinite().all() else NOT_DRAWN)
        return found


def load_token_clusters(
    loader: WeightLoader, source: WeightSource, decoder: DecoderModel, own: AssistantConfig
) -> TokenClusters | None:
    """Load how an assistant's tokens are clustered; None if they are not, or not by the rows of its output projection.

    :raises CheckpointError: a tensor is missing or has another shape, or the clusters lack a token
    """
    names, vocab_size = AssistantNames(), decoder.config.vocab_size
    if own.num_clusters == 0 or not decoder.config.tie_embeddings:
        return None
    order = loader.integers(names.order, vocab_size)
    if not torch.equal(order.sort().values, torch.arange(vocab_size)):
        what = f"tensor {names.order} is no order of the {vocab_size} tokens: one is missing"
        raise malformed(source, names.order, what)
    return TokenClusters(
        centroids=loader.linear(
            [names.centroids], in_features=decoder.config.hidden_size, out_features=(own.num_clusters,)
        ),
        members=order.view(own.num_clusters, -1),
        num_searched=own.num_searched,
    )
