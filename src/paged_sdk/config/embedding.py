"""Say how texts become vectors."""

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
    """Multiplies the vectors of texts.

    :ivar weight: ``[out_features, in_features]`` float32
    :ivar bias: ``[out_features]`` float32; None: nothing is added
    :ivar tanh: whether the hyperbolic tangent is taken of the product
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
    """Holds what a checkpoint says of how its texts become vectors.

    :ivar pooling: None: it says nothing
    :ivar dense: what multiplies the pooled vectors, in order
    :ivar normalize: whether vectors are divided by their length
    :ivar prompts: texts to put before a text, by name
    :ivar default_prompt: the name of the one that is put there where none is named; None: none is
    :ivar pools_prompt: whether the tokens of such a prompt are pooled with those of the text
    :ivar max_tokens: the longest text that the model is made for; None: it says nothing
    :ivar lower_case: whether texts are turned to lower case first
    :ivar why_not: what it asks for that is not computed here; None: nothing
    :ivar ranks: how texts are ranked; None: they are not
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
    ranks: RankRecipe | None = None
