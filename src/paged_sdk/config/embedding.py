"""Describe how a model embeds texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import field, frozen

from paged_sdk.config.pooling import Pooling
from paged_sdk.config.ranking import RankRecipe

if TYPE_CHECKING:  # importing the package loads no numpy
    import numpy as np
    import numpy.typing as npt

__all__ = ["DenseLayer", "EmbeddingRecipe"]


@frozen(eq=False)
class DenseLayer:
    """Computes a dense layer on pooled vectors.

    :ivar weight: ``[out_features, in_features]`` float32
    :ivar bias: ``[out_features]`` float32; None: no bias
    :ivar tanh: whether tanh is applied to the result
    """

    weight: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32] | None = None
    tanh: bool = False

    def apply(self, vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return ``[num_vectors, out_features]``."""
        import numpy as np

        product = vectors @ self.weight.T
        if self.bias is not None:
            product += self.bias
        return np.tanh(product) if self.tanh else product


@frozen(kw_only=True)
class EmbeddingRecipe:
    """Holds a checkpoint's settings for embeddings.

    :ivar pooling: None: not specified
    :ivar dense: dense layers applied to the pooled vectors, in order
    :ivar normalize: whether vectors are divided by their L2 norm
    :ivar prompts: prefixes of texts, by name
    :ivar default_prompt: name of the prefix used if a call names none; None: no prefix
    :ivar pools_prompt: whether the prefix's tokens are pooled with those of the text
    :ivar max_tokens: maximum length of a text in tokens; None: not specified
    :ivar lower_case: whether texts are lower-cased first
    :ivar why_not: what the checkpoint requires that is not supported; None: nothing
    :ivar ranking: how documents are ranked; None: the model does not rank
    """

    pooling: Pooling | None = None
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = True
    prompts: Mapping[str, str] = field(factory=dict)
    default_prompt: str | None = None
    pools_prompt: bool = True
    max_tokens: int | None = None
    lower_case: bool = False
    why_not: str | None = None
    ranking: RankRecipe | None = None
