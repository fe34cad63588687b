"""Hold the likelihood of texts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

from paged_sdk.types.reading import TokenScores
from paged_sdk.types.response import Usage
from paged_sdk.types.wire import Wire

if TYPE_CHECKING:  # importing the package loads no numpy
    import numpy as np
    import numpy.typing as npt

__all__ = ["ScoreResponse", "TextScore"]


def _read_only(scores: TokenScores) -> TokenScores:
    scores.logprobs.setflags(write=False)
    scores.are_likeliest.setflags(write=False)
    return scores


@frozen(kw_only=True, eq=False)
class TextScore(Wire):
    """Says how likely a text is, token by token, each given those before it.

    :ivar token_ids: the tokens that have a score: those of the text, without the first if nothing comes before it
    """

    token_ids: tuple[int, ...]
    _scores: TokenScores = field(converter=_read_only, alias="scores", repr=False)

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Return the natural logarithm of each token's probability."""
        return self._scores.logprobs

    @property
    def are_likeliest(self) -> npt.NDArray[np.bool_]:
        """Return, for each token, whether it is the likeliest one at its place."""
        return self._scores.are_likeliest

    @property
    def logprob(self) -> float:
        """Return the natural logarithm of the probability of the whole text: the sum of ``logprobs``."""
        return float(self.logprobs.sum(dtype="float64"))

    @property
    def is_greedy(self) -> bool:
        """Tell whether greedy sampling would generate the text."""
        return bool(self.are_likeliest.all())

    @property
    def perplexity(self) -> float:
        """Return the geometric mean of the inverse token probabilities; infinity on overflow, 1 without tokens."""
        if not self.token_ids:
            return 1.0
        try:
            return math.exp(-self.logprob / len(self.token_ids))
        except OverflowError:
            return math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return a form for JSON; OpenAI's API has none of its own."""
        return {
            "object": "score",
            "token_ids": list(self.token_ids),
            "logprobs": self.logprobs.tolist(),
            "logprob": self.logprob,
            "is_greedy": self.is_greedy,
        }


@frozen(kw_only=True)
class ScoreResponse(Wire):
    """Holds a score for each text.

    :ivar scores: in the order of the texts
    :ivar model: the model's name
    :ivar usage: of all texts together, with their prefixes
    """

    scores: tuple[TextScore, ...]
    model: str
    usage: Usage
    object: Literal["list"] = "list"

    def to_dict(self) -> dict[str, Any]:
        """Return a form for JSON; OpenAI's API has none of its own."""
        return {
            "object": self.object,
            "data": [each.to_dict() | {"index": place} for place, each in enumerate(self.scores)],
            "model": self.model,
            "usage": {"prompt_tokens": self.usage.prompt_tokens, "total_tokens": self.usage.total_tokens},
        }
