"""Hold how well documents go with a query."""

from __future__ import annotations

import math
from typing import Any

from attrs import frozen

from paged_sdk.types.response import Usage
from paged_sdk.types.wire import Wire

__all__ = ["RankResponse", "RankedDocument"]


@frozen(kw_only=True)
class RankedDocument(Wire):
    """Says how well a document goes with the query.

    :ivar index: its place among the documents that were given
    :ivar logit: the number that the model makes of both, any: the larger, the better
    """

    index: int
    logit: float

    @property
    def score(self) -> float:
        """Return the logistic function of the logit, from 0 to 1: what models are mostly trained to say."""
        if self.logit < 0:  # where the exponential of the other sign may be too large
            return math.exp(self.logit) / (1 + math.exp(self.logit))
        return 1 / (1 + math.exp(-self.logit))

    def to_dict(self) -> dict[str, Any]:
        """Return the form that servers have for it."""
        return {"index": self.index, "relevance_score": self.score}


@frozen(kw_only=True)
class RankResponse(Wire):
    """Holds how well each document goes with a query.

    :ivar results: the documents, the best first; of those that are as good, the first that was given
    :ivar model: the model's name
    :ivar usage: what all documents have cost
    """

    results: tuple[RankedDocument, ...]
    model: str
    usage: Usage

    def to_dict(self) -> dict[str, Any]:
        """Return the form that servers have for it, which is Jina's and Cohere's."""
        return {
            "model": self.model,
            "results": [each.to_dict() for each in self.results],
            "usage": {"prompt_tokens": self.usage.prompt_tokens, "total_tokens": self.usage.total_tokens},
        }
