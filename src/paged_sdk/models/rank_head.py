"""Compute a text's score from its last hidden state, as transformers' ``ForSequenceClassification`` classes do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from paged_sdk.config.decoder import DecoderConfig
from paged_sdk.config.pooling import Pooling
from paged_sdk.errors import UnsupportedArchitectureError
from paged_sdk.models.weight_loader import WeightLoader

__all__ = ["RANK_HEAD", "RankHead", "load_rank_head"]

RANK_HEAD = "score"
"""Name of the layer in all these classes."""


@frozen(eq=False)
class RankHead:
    """Computes scores by a linear layer with one output, on last tokens' hidden states; implements
    :class:`~paged_sdk.models.causal_model.RankLayers`.

    :ivar weight: ``[1, hidden_size]`` float32
    :ivar bias: ``[1]`` float32; None: no bias
    """

    weight: Tensor
    bias: Tensor | None = None

    pooling: ClassVar[Pooling] = "last"
    takes_token_types: ClassVar[bool] = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return weight and bias by their names in the checkpoint."""
        bias = {} if self.bias is None else {f"{RANK_HEAD}.bias": self.bias}
        return {f"{RANK_HEAD}.weight": self.weight, **bias}

    def ranks(self, vectors: Tensor, replaced: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the scores, ``[num_texts, 1]``, of vectors ``[num_texts, hidden_size]``, both float32.

        :param replaced: tensors to use instead of some of :attr:`tensors`
        """
        used = self.tensors | dict(replaced or {})
        return F.linear(vectors, used[f"{RANK_HEAD}.weight"], used.get(f"{RANK_HEAD}.bias"))


def load_rank_head(loader: WeightLoader, config: DecoderConfig) -> RankHead:
    """Load the layer, which is never quantized.

    :raises UnsupportedArchitectureError: the layer has several labels, so it classifies rather than ranks
    :raises CheckpointError: the layer is missing, or has another shape
    """
    weight, bias = f"{RANK_HEAD}.weight", f"{RANK_HEAD}.bias"
    num_labels = loader.shape(weight)[0] if weight in loader else 1
    if num_labels != 1:
        raise UnsupportedArchitectureError(
            f"the classifier {weight} has {num_labels} labels; those with one label can rank texts",
            architecture=config.model_type,
        )
    return RankHead(
        loader.tensor(weight, 1, config.hidden_size).float(),
        loader.tensor(bias, 1).float() if bias in loader else None,
    )
