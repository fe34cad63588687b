"""Make one number of a text's last hidden state, as the classes for the classification of sequences do."""

from __future__ import annotations

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
"""What all these classes call the layer."""


@frozen(eq=False)
class RankHead:
    """Multiplies hidden states of last tokens by one row of numbers; it is
    :class:`~paged_sdk.models.causal_model.RankLayers`.

    :ivar weight: ``[1, hidden_size]`` float32
    :ivar bias: ``[1]`` float32; None: nothing is added
    """

    weight: Tensor
    bias: Tensor | None = None

    pooling: ClassVar[Pooling] = "last"
    tells_parts: ClassVar[bool] = False

    def ranks(self, vectors: Tensor) -> Tensor:
        """Return ``[num_texts, 1]`` of ``[num_texts, hidden_size]``, both float32."""
        return F.linear(vectors, self.weight, self.bias)


def load_rank_head(loader: WeightLoader, config: DecoderConfig) -> RankHead:
    """Load the layer, which is never quantized: it is one row.

    :raises UnsupportedArchitectureError: it has a row for each of several kinds of texts
    :raises CheckpointError: it is missing, or has another shape
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
