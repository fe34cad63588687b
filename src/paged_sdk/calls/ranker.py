"""Ranks documents by their relevance to a query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import frozen

from paged_sdk.calls.reading_requests import ReadingRequests, check_flag
from paged_sdk.chat.pair_writer import PairWriter
from paged_sdk.chat.renderer import Interruption
from paged_sdk.chat.tokenizer import TextPair
from paged_sdk.config.embedding import EmbeddingRecipe
from paged_sdk.errors import ContextLengthError, InvalidRequestError
from paged_sdk.types.rank import RankedDocument, RankResponse
from paged_sdk.types.reading import AnswerLogit, PooledVector, Reading
from paged_sdk.types.request_options import RequestOptions

__all__ = ["Ranker"]

_HOW: Final = (
    "it has no layers for that and names no answer tokens: expected a ...ForSequenceClassification checkpoint with one "
    "label, a sentence-transformers checkpoint with a LogitScore module, or answer tokens where the model is built "
    "(with_ranking_tokens in Python, --ranking-tokens of paged-sdk serve, ranking_tokens in its file)"
)


@frozen
class Ranker:
    """Ranks documents; each is an engine request of its own, together with the query.

    :ivar recipe: the checkpoint's settings for embeddings and ranking
    :ivar model: the model's name, as responses have it
    """

    reader: ReadingRequests
    recipe: EmbeddingRecipe
    model: str

    async def rank(
        self, query: str, documents: Sequence[str], options: RequestOptions, request_id: str, *, truncation: bool
    ) -> RankResponse:
        """Implement :meth:`paged_sdk.Model.rank`."""
        ranking = self.recipe.ranking
        why_not = _HOW if ranking is None else ranking.why_not
        if ranking is None or why_not is not None:
            raise InvalidRequestError(f"{self.model} cannot rank documents: {why_not}", field="query")
        check_flag("truncation", truncation)
        checked = [self._checked("query", query)]
        if isinstance(documents, str | bytes | bytearray) or not isinstance(documents, Sequence) or not documents:
            raise InvalidRequestError.of("documents", documents, "a list of at least one text")
        checked += [self._checked(f"documents[{place}]", each) for place, each in enumerate(documents)]
        if self.recipe.lower_case:
            checked = [text.lower() for text in checked]

        interruption = Interruption()
        writer = PairWriter(self.reader.preparer.text, ranking, checked[0], interruption)

        def encode(place: int) -> tuple[list[int], Reading]:
            name = f"documents[{place}]"
            try:
                written = writer.encode(checked[1 + place])
            except InvalidRequestError as exc:
                raise InvalidRequestError(f"{name} with the query: {exc}", field=name) from exc
            pair = self._cut(written, name, truncation=truncation)
            if ranking.answer is not None:
                return pair.token_ids, AnswerLogit(ranking.answer)
            assert ranking.pooling is not None
            token_ids = _without_end(pair.token_ids, ranking.padding)
            return token_ids, PooledVector(ranking.pooling, is_ranked=True, second_part=pair.second_part)

        try:
            read, usage = await self.reader.read(encode, len(checked) - 1, options, request_id)
        except BaseException:  # cancelled: the thread must stop
            interruption.set()
            raise
        results = [RankedDocument(index=place, logit=float(each.vector[0])) for place, each in enumerate(read)]
        results.sort(key=lambda each: -each.logit)
        return RankResponse(results=tuple(results), model=self.model, usage=usage)

    def _checked(self, name: str, text: str) -> str:
        if not isinstance(text, str) or not text:
            raise InvalidRequestError.of(name, text, "a text")
        self.reader.checked(name, text)
        return text

    def _cut(self, pair: TextPair, name: str, *, truncation: bool) -> TextPair:
        """Return a query and document, truncated if necessary.

        :param name: the document's name in errors
        :raises ContextLengthError: the pair has too many tokens, or the query alone leaves no room for any document
        """
        limit = self.reader.limit(self.recipe)
        cut = pair.cut(limit)
        if cut is None:
            own = len(pair.token_ids) - len(pair.second)
            raise ContextLengthError(
                f"query has {own} tokens, {limit - 1} fit beside a document",
                field="query",
                num_tokens=own,
                limit=limit - 1,
                advice="shorten it",
            )
        if len(pair.token_ids) > limit and not truncation:
            raise ContextLengthError(
                f"{name} has {len(pair.token_ids)} tokens with the query, {limit} fit",
                field=name,
                num_tokens=len(pair.token_ids),
                limit=limit,
                advice="shorten it, or the query, or use truncation=True",
            )
        return cut


def _without_end(token_ids: list[int], padding: int | None) -> list[int]:
    """Return the tokens up to the last one that is not padding; at least the first token."""
    end = len(token_ids)
    while end > 1 and token_ids[end - 1] == padding:
        end -= 1
    return token_ids[:end]
