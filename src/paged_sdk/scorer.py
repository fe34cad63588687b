"""Says how likely texts are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from attrs import frozen

from paged_sdk.chat.token_healing import EncodedPrompt
from paged_sdk.config.checks import is_unicode
from paged_sdk.errors import ContextLengthError, InvalidRequestError
from paged_sdk.kv.contiguous import common_prefix_length
from paged_sdk.loaded_adapters import LoadedAdapters
from paged_sdk.preparation import RequestPreparer, in_thread
from paged_sdk.prompt_batch import PromptBatch, most_under_way
from paged_sdk.scheduler.request import Request
from paged_sdk.types.reading import PromptScores
from paged_sdk.types.request import PromptLike, RequestOptions
from paged_sdk.types.score import ScoreResponse, TextScore
from paged_sdk.worker.worker import Worker

__all__ = ["Scorer"]


@frozen
class Scorer:
    """Scores texts, each a request of its own for the engine; what comes before all of them is computed once.

    :ivar model: the model's name, as responses have it
    """

    worker: Worker
    preparer: RequestPreparer
    adapters: LoadedAdapters
    model: str

    async def score(
        self, texts: Sequence[PromptLike], prefix: PromptLike | None, options: RequestOptions, request_id: str
    ) -> ScoreResponse:
        """Do what :meth:`paged_sdk.Model.score` says."""
        preparer = self.preparer
        preparer.check_generates("texts")
        before = "" if prefix is None else self._checked("prefix", prefix)
        checked = [self._checked("texts", text) for text in texts]
        adapter = self.adapters.use(options.adapter)
        sampling = preparer.sampling(RequestOptions())
        scored: list[tuple[int, ...]] = []

        def make(first: int, end: int) -> list[Request]:
            arrival, made = time.monotonic(), []
            base = self._encode(before)
            for place in range(first, end):
                token_ids, first_token = self._split(before, base, checked[place], place)
                scored.append(tuple(token_ids[first_token:]))
                made.append(
                    preparer.prepare(
                        EncodedPrompt(token_ids),
                        options,
                        sampling,
                        request_id=f"{request_id}-{place}",
                        arrival=arrival,
                        continues_prompt=True,
                        adapter=adapter,
                        reading=PromptScores(first_token),
                    )
                )
            return made

        batch = PromptBatch(
            self.worker,
            lambda first, end: in_thread(partial(make, first, end)),
            len(checked),
            most=most_under_way(preparer.config),
            request_id=request_id,
            timeout=options.timeout,
        )
        read = await batch.read()
        return ScoreResponse(
            scores=tuple(
                TextScore(token_ids=token_ids, scores=each.scores) for token_ids, each in zip(scored, read, strict=True)
            ),
            model=self.model,
            usage=batch.usage(time.monotonic()),
        )

    def _checked(self, name: str, text: PromptLike) -> str | list[int]:
        """Return a text, or token ids that nobody changes meanwhile."""
        if not isinstance(text, str):
            return list(self.preparer.check_token_ids(name, text))
        if not is_unicode(text):
            raise InvalidRequestError.of(name, text, "Unicode without lone surrogates")
        return text

    def _encode(self, text: str | list[int]) -> list[int]:
        """Return the tokens of a text that goes on."""
        if not isinstance(text, str):
            return text
        tokenizer = self.preparer.text.tokenizer
        token_ids = tokenizer.encode(text, add_special_tokens=True)
        return token_ids[: len(token_ids) - len(tokenizer.special.suffix)]

    def _split(
        self, before: str | list[int], base: list[int], text: str | list[int], place: int
    ) -> tuple[list[int], int]:
        """Return the tokens of a text with what comes before it, and the place of the first that has a score.

        A text is tokenized together with the text before it. Its score begins with the first token that is not as it is
        without it: where a word goes on, with the word's.

        :param base: the tokens of what comes before
        :raises InvalidRequestError: the text has no tokens
        :raises ContextLengthError: there are too many
        """
        if isinstance(before, str) and isinstance(text, str):
            token_ids = self._encode(before + text)
            first_token = common_prefix_length(base, token_ids)
        elif isinstance(text, str):
            token_ids = base + self.preparer.text.tokenizer.encode(text, add_special_tokens=False)
            first_token = len(base)
        else:
            token_ids, first_token = base + text, len(base)
        if first_token >= len(token_ids):
            raise InvalidRequestError.of(f"texts[{place}]", text, "a text of at least one token")
        limit = self.preparer.max_prompt_tokens
        if len(token_ids) > limit:
            raise ContextLengthError(
                f"texts[{place}] has {len(token_ids)} tokens with the prefix before it, {limit} fit",
                num_tokens=len(token_ids),
                limit=limit,
            )
        return token_ids, max(first_token, 1)
