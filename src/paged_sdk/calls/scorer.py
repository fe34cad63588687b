"""Scores texts by their likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from attrs import frozen

from paged_sdk.calls.preparation import in_thread
from paged_sdk.calls.reading_requests import ReadingRequests
from paged_sdk.errors import ContextLengthError, InvalidRequestError
from paged_sdk.kv.contiguous import common_prefix_length
from paged_sdk.types.prompt import PromptLike, name_of_prompt
from paged_sdk.types.reading import PromptScores
from paged_sdk.types.request_options import RequestOptions
from paged_sdk.types.score import ScoreResponse, TextScore

__all__ = ["Scorer"]


@frozen
class Scorer:
    """Scores texts, one engine request per text; the prefix that they share is computed once.

    :ivar model: the model's name, as responses have it
    """

    reader: ReadingRequests
    model: str

    async def score(
        self, texts: Sequence[PromptLike], prefix: PromptLike | None, options: RequestOptions, request_id: str
    ) -> ScoreResponse:
        """Implement :meth:`paged_sdk.Model.score`."""
        self.reader.preparer.check_generates("texts")
        before = "" if prefix is None else self.reader.checked("prefix", prefix)
        checked = [
            self.reader.checked(name_of_prompt("texts", place, len(texts)), text) for place, text in enumerate(texts)
        ]
        base = await in_thread(partial(self._encode, before))
        scored: list[tuple[int, ...]] = []

        def encode(place: int) -> tuple[list[int], PromptScores]:
            token_ids, first_token = self._split(before, base, checked[place], place)
            scored.append(tuple(token_ids[first_token:]))
            return token_ids, PromptScores(first_token)

        read, usage = await self.reader.read(encode, len(checked), options, request_id)
        return ScoreResponse(
            scores=tuple(
                TextScore(token_ids=token_ids, scores=each.scores) for token_ids, each in zip(scored, read, strict=True)
            ),
            model=self.model,
            usage=usage,
        )

    def _encode(self, text: str | list[int]) -> list[int]:
        """Return the tokens of a text that another text follows: without the tokenizer's suffix."""
        if not isinstance(text, str):
            return text
        tokenizer = self.reader.preparer.text.tokenizer
        token_ids = tokenizer.encode(text, add_special_tokens=True)
        return token_ids[: len(token_ids) - len(tokenizer.special.suffix)]

    def _split(
        self, before: str | list[int], base: list[int], text: str | list[int], place: int
    ) -> tuple[list[int], int]:
        """Return the tokens of a text after its prefix, and the index of the first that is scored.

        Prefix and text are tokenized together. Scores begin with the first token that differs from those of the prefix
        alone: if the text continues a word, with that word's token.

        :param base: the tokens of the prefix
        :raises InvalidRequestError: the text has no tokens
        :raises ContextLengthError: there are too many
        """
        if isinstance(before, str) and isinstance(text, str):
            token_ids = self._encode(before + text)
            first_token = common_prefix_length(base, token_ids)
        elif isinstance(text, str):
            token_ids = base + self.reader.preparer.text.tokenizer.encode(text, add_special_tokens=False)
            first_token = len(base)
        else:
            token_ids, first_token = base + text, len(base)
        if first_token >= len(token_ids):
            raise InvalidRequestError.of(f"texts[{place}]", text, "a text of at least one token")
        limit = self.reader.preparer.max_read_tokens
        if len(token_ids) > limit:
            raise ContextLengthError(
                f"texts[{place}] has {len(token_ids)} tokens with the prefix before it, {limit} fit",
                field=f"texts[{place}]",
                num_tokens=len(token_ids),
                limit=limit,
            )
        return token_ids, max(first_token, 1)
