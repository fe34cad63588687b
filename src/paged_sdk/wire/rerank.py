"""Maps the ranking of documents, as Jina's and Cohere's APIs have it."""

from __future__ import annotations

from typing import Annotated, Any, Final, Required, TypedDict

from attrs import frozen

from paged_sdk import Model, RankResponse
from paged_sdk.wire.body import BodyReader, Bounds
from paged_sdk.wire.embeddings import FEW

__all__ = ["RERANK", "RerankCall", "read_rerank"]


class RerankBody(TypedDict, total=False):
    """Is what a client sends to ``/v1/rerank``."""

    model: Required[Annotated[str, "The name of a model or a loaded adapter."]]
    query: Required[Annotated[str, "The query."]]
    documents: Required[Annotated[list[str], FEW, "The texts to rank."]]
    top_n: Annotated[int | None, Bounds(1), "How many of the best to return."]
    return_documents: Annotated[bool | None, "Whether to return the documents' texts too."]
    user: Annotated[str | None, "A label for the end user, for the server's log."]
    truncate_sequence: Annotated[bool | None, "Extension: cut a document that is too long at its end."]
    cache_salt: Annotated[str | None, Bounds(1, 256), "Extension: share cached prefixes only with the same salt."]


RERANK: Final = BodyReader(RerankBody)


@frozen(kw_only=True)
class RerankCall:
    """Is what a body asks of a model.

    :ivar label: for whom it is
    """

    model: str
    body: RerankBody
    label: str | None = None

    async def send(self, model: Model, *, adapter: str | None, timeout: float | None) -> RankResponse:
        """Ask a model.

        :param adapter: the loaded adapter that the texts go through
        :param timeout: seconds that it may take
        :raises PagedError: the model refuses it, or fails
        """
        return await model.rank(
            self.body["query"],
            self.body["documents"],
            truncation=self.body.get("truncate_sequence") or False,
            cache_salt=self.body.get("cache_salt"),
            adapter=adapter,
            timeout=timeout,
        )

    def response(self, answer: RankResponse) -> dict[str, Any]:
        """Return the best documents as these APIs have them."""
        form = answer.to_dict()
        results = form["results"][: self.body.get("top_n")]
        if self.body.get("return_documents"):
            texts = self.body["documents"]
            results = [{**each, "document": {"text": texts[each["index"]]}} for each in results]
        return {**form, "results": results, "model": self.model}


def read_rerank(value: object) -> RerankCall:
    """Return what a body asks for.

    :raises InvalidRequestError: it is malformed
    """
    body = RERANK.read(value)
    return RerankCall(model=body["model"], body=body, label=body.get("user"))
