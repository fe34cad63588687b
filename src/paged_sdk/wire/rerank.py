"""Maps the rerank API of Jina and Cohere."""

from __future__ import annotations

from typing import Annotated, Any, Final, Required, TypedDict

from attrs import frozen

from paged_sdk import Model, RankResponse
from paged_sdk.wire.body import BodyReader, Bounds
from paged_sdk.wire.limits import NUM_INPUTS

__all__ = ["RERANK", "RerankCall", "read_rerank"]


class RerankBody(TypedDict, total=False):
    """Describes the body of ``/v1/rerank``."""

    model: Required[Annotated[str, "The name of a model or a loaded adapter."]]
    query: Required[Annotated[str, "The query."]]
    documents: Required[Annotated[list[str], NUM_INPUTS, "The texts to rank."]]
    top_n: Annotated[int | None, Bounds(1), "How many of the best to return."]
    return_documents: Annotated[bool | None, "Whether to return the documents' texts too."]
    user: Annotated[str | None, "A label for the end user, for the server's log."]
    truncate_sequence: Annotated[bool | None, "Extension: cut a document that is too long at its end."]
    cache_salt: Annotated[str | None, Bounds(1, 256), "Extension: share cached prefixes only with the same salt."]


RERANK: Final = BodyReader(RerankBody)


@frozen(kw_only=True)
class RerankCall:
    """Holds a parsed request.

    :ivar label: the client's label for the end user
    """

    model: str
    body: RerankBody
    label: str | None = None

    async def send(self, model: Model, *, adapter: str | None, timeout: float | None) -> RankResponse:
        """Send the request to a model.

        :param adapter: the loaded adapter to use
        :param timeout: time limit in seconds
        :raises PagedError: the model refuses the request, or fails
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
        """Return the ``top_n`` best documents in the form of these APIs."""
        form = answer.to_dict()
        results = form["results"][: self.body.get("top_n")]
        if self.body.get("return_documents"):
            texts = self.body["documents"]
            results = [{**each, "document": {"text": texts[each["index"]]}} for each in results]
        return {**form, "results": results, "model": self.model}


def read_rerank(value: object) -> RerankCall:
    """Parse a body.

    :raises InvalidRequestError: the body is malformed
    """
    body = RERANK.read(value)
    return RerankCall(model=body["model"], body=body, label=body.get("user"))
