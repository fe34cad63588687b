"""Describe what to compute from a prompt instead of generating: an embedding, a relevance or scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from paged_sdk.config.pooling import Pooling
from paged_sdk.config.ranking import AnswerTokens

if TYPE_CHECKING:  # importing the package loads no numpy
    import numpy as np
    import numpy.typing as npt

__all__ = ["AnswerLogit", "PooledVector", "PromptScores", "ReadResult", "Reading", "TokenScores"]


@frozen
class PooledVector:
    """Asks for the hidden states of a prompt after the last norm, pooled to one vector.

    :ivar first_token: tokens before it are not pooled
    :ivar is_ranked: whether a sequence classification head turns the vector into one number
    :ivar second_part: where the second text of a pair begins, for models with token types; None: the model has none, or
        there is one text
    """

    pooling: Pooling
    first_token: int = 0
    is_ranked: bool = False
    second_part: int | None = None

    def states(self, num_tokens: int) -> range:
        """Return the positions whose hidden states are needed."""
        match self.pooling:
            case "last":
                return range(num_tokens - 1, num_tokens)
            case "cls":
                return range(self.first_token, self.first_token + 1)
        return range(self.first_token, num_tokens)


@frozen
class AnswerLogit:
    """Asks for the logit of one answer token, minus that of another if there is one.

    :ivar tokens: the answer tokens
    """

    tokens: AnswerTokens

    def states(self, num_tokens: int) -> range:
        """Return the positions whose hidden states are needed."""
        return range(num_tokens - 1, num_tokens)


@frozen
class PromptScores:
    """Asks for the log-probabilities of a prompt's tokens.

    :ivar first_token: the first token to score, at least 1
    """

    first_token: int

    def states(self, num_tokens: int) -> range:
        """Return the positions whose hidden states are needed."""
        return range(self.first_token - 1, num_tokens - 1)


@frozen(eq=False)
class TokenScores:
    """Holds the log-probabilities of tokens.

    :ivar logprobs: float32, the natural logarithm of each token's probability
    :ivar are_likeliest: bool, whether greedy sampling would choose each token: the first among the likeliest
    """

    logprobs: npt.NDArray[np.float32]
    are_likeliest: npt.NDArray[np.bool_]


Reading: TypeAlias = PooledVector | AnswerLogit | PromptScores
ReadResult: TypeAlias = "npt.NDArray[np.float32] | TokenScores"
"""The result of a :data:`Reading`: for a :class:`PooledVector` a vector ``[hidden_size]``, or ``[1]`` if it is ranked;
for an :class:`AnswerLogit` ``[1]``; for :class:`PromptScores` :class:`TokenScores`."""
