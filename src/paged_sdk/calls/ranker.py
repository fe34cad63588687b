"""Says how well documents go with a query."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from paged_sdk.calls.reading_requests import ReadingRequests
from paged_sdk.config.embedding import EmbeddingRecipe
from paged_sdk.errors import ContextLengthError, InvalidRequestError
from paged_sdk.types.rank import RankedDocument, RankResponse
from paged_sdk.types.reading import PooledVector
from paged_sdk.types.request import RequestOptions

__all__ = ["Ranker"]


@frozen
class Ranker:
    """Ranks documents: each is a request of its own for the engine, together with the query.

    :ivar recipe: what the checkpoint says of texts that are read
    :ivar model: the model's name, as responses have it
    """

    reader: ReadingRequests
    recipe: EmbeddingRecipe
    model: str

    async def rank(
        self, query: str, documents: Sequence[str], options: RequestOptions, request_id: str, *, truncation: bool
    ) -> RankResponse:
        """Do what :meth:`paged_sdk.Model.rank` says."""
        pooling = self.recipe.ranks
        if pooling is None:
            raise InvalidRequestError(
                f"{self.model} is not a reranker: expected an encoder whose class ends in ForSequenceClassification, "
                "with one label",
                field="query",
            )
        if not isinstance(truncation, bool):
            raise InvalidRequestError.of("truncation", truncation, "True or False")
        checked = [self._checked("query", query)]
        if isinstance(documents, str | bytes | bytearray) or not isinstance(documents, Sequence) or not documents:
            raise InvalidRequestError.of("documents", documents, "a list of at least one text")
        checked += [self._checked(f"documents[{place}]", each) for place, each in enumerate(documents)]

        def encode(place: int) -> tuple[list[int], PooledVector]:
            token_ids, second_part = self._encode(checked[0], checked[1 + place], place, truncation=truncation)
            return token_ids, PooledVector(pooling, is_ranked=True, second_part=second_part)

        read, usage = await self.reader.read(encode, len(checked) - 1, options, request_id)
        results = [RankedDocument(index=place, logit=float(each.vector[0])) for place, each in enumerate(read)]
        results.sort(key=lambda each: -each.logit)
        return RankResponse(results=tuple(results), model=self.model, usage=usage)

    def _checked(self, name: str, text: str) -> str:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError.of(name, text, "a text")
        self.reader.checked(name, text)
        return text

    def _encode(self, query: str, document: str, place: int, *, truncation: bool) -> tuple[list[int], int | None]:
        """Return the tokens of a query and a document, and where the second part begins.

        :raises ContextLengthError: there are too many, or so many of the query that no document can be cut to fit
        """
        text, name = self.reader.preparer.text, f"documents[{place}]"
        limit, most = self.reader.preparer.max_read_tokens, self.recipe.max_tokens or text.model_max_length
        limit = limit if most is None else min(limit, most)
        pair = text.tokenizer.encode_pair(query, document)
        if len(pair.token_ids) > limit and not truncation:
            raise ContextLengthError(
                f"{name} has {len(pair.token_ids)} tokens with the query, {limit} fit: shorten it, or the query, or "
                "use truncation=True",
                field=name,
                num_tokens=len(pair.token_ids),
                limit=limit,
            )
        cut = pair.cut(limit)
        if cut is None:
            own = len(pair.token_ids) - len(pair.second)
            raise ContextLengthError(
                f"query has {own} tokens, {limit - 1} fit beside a document: shorten it",
                field="query",
                num_tokens=own,
                limit=limit - 1,
            )
        return cut.token_ids, cut.second_part
