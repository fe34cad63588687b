"""Hold the relevance of documents to a query."""

from __future__ import annotations

import math
from typing import Any

from attrs import frozen

from paged_sdk.types.response import Usage
from paged_sdk.types.wire import Wire

__all__ = ["RankResponse", "RankedDocument"]


@frozen(kw_only=True)
class RankedDocument(Wire):
    """Says how relevant a document is to the query.

    :ivar index: its index among the documents that were given
    :ivar logit: the model's raw output; larger is more relevant
    """

    index: int
    logit: float

    @property
    def score(self) -> float:
        """Return the logistic function of the logit, 0 to 1, which most rerankers are trained with."""
        if self.logit < 0:  # exp(-logit) may overflow
            return math.exp(self.logit) / (1 + math.exp(self.logit))
        return 1 / (1 + math.exp(-self.logit))

    def to_dict(self) -> dict[str, Any]:
        """Return the form that servers use."""
        return {"index": self.index, "relevance_score": self.score}


@frozen(kw_only=True)
class RankResponse(Wire):
    """Holds the relevance of each document to a query.

    :ivar results: the documents, the most relevant first; ties in the order that was given
    :ivar model: the model's name
    :ivar usage: of all documents together
    """

    results: tuple[RankedDocument, ...]
    model: str
    usage: Usage

    def to_dict(self) -> dict[str, Any]:
        """Return the form that servers use, as in Jina's and Cohere's APIs."""
        return {
            "model": self.model,
            "results": [each.to_dict() for each in self.results],
            "usage": {"prompt_tokens": self.usage.prompt_tokens, "total_tokens": self.usage.total_tokens},
        }
