"""Say what is read off a prompt for which no text is generated."""

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
    """Asks for the hidden states of a prompt, after the last norm, made one vector.

    :ivar first_token: tokens before it are not pooled
    :ivar is_ranked: whether the vector goes through the layers of a class that ranks texts, which make one number of it
    :ivar second_part: where the second text of a pair begins, for classes that tell the two apart; None: they do not,
        or there is one text
    """

    pooling: Pooling
    first_token: int = 0
    is_ranked: bool = False
    second_part: int | None = None

    def states(self, num_tokens: int) -> range:
        """Return the tokens of a prompt whose hidden states are read."""
        match self.pooling:
            case "last":
                return range(num_tokens - 1, num_tokens)
            case "cls":
                return range(self.first_token, self.first_token + 1)
        return range(self.first_token, num_tokens)


@frozen
class AnswerLogit:
    """Asks how much more a prompt is to be answered by one token than by another.

    :ivar tokens: the tokens, whose logits make one number
    """

    tokens: AnswerTokens

    def states(self, num_tokens: int) -> range:
        """Return the tokens of a prompt whose hidden states are read."""
        return range(num_tokens - 1, num_tokens)


@frozen
class PromptScores:
    """Asks how likely the tokens of a prompt are, each after those before it.

    :ivar first_token: the first token that is asked about, at least 1
    """

    first_token: int

    def states(self, num_tokens: int) -> range:
        """Return the tokens of a prompt whose hidden states are read."""
        return range(self.first_token - 1, num_tokens - 1)


@frozen(eq=False)
class TokenScores:
    """Says how likely tokens are.

    :ivar logprobs: float32, the natural logarithm of each one's probability
    :ivar are_likeliest: bool, whether greedy sampling would choose each: none is likelier, of equals it is the first
    """

    logprobs: npt.NDArray[np.float32]
    are_likeliest: npt.NDArray[np.bool_]


Reading: TypeAlias = PooledVector | AnswerLogit | PromptScores
ReadResult: TypeAlias = "npt.NDArray[np.float32] | TokenScores"
"""What comes of a :data:`Reading`: of a :class:`PooledVector` a vector, ``[hidden_size]``, or where that is ranked
``[1]``, as of an :class:`AnswerLogit`."""
