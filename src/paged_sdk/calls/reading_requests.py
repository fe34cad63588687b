"""Makes requests that generate nothing: their result, such as an embedding, is read off the prompt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from attrs import frozen

from paged_sdk.calls.loaded_adapters import Adapters
from paged_sdk.calls.preparation import RequestPreparer, in_thread
from paged_sdk.calls.prompt_batch import PromptBatch, ReadPrompt, most_under_way
from paged_sdk.chat.token_healing import EncodedPrompt
from paged_sdk.config.checks import is_unicode
from paged_sdk.config.embedding import EmbeddingRecipe
from paged_sdk.errors import InvalidRequestError
from paged_sdk.scheduler.request import Request
from paged_sdk.types.prompt import PromptLike
from paged_sdk.types.reading import Reading
from paged_sdk.types.request_options import RequestOptions
from paged_sdk.types.response import Usage
from paged_sdk.worker.engine_access import EngineAccess

__all__ = ["ReadingRequests", "check_flag"]


def check_flag(name: str, value: object) -> None:
    """Check an argument of a call.

    :raises InvalidRequestError: it is not a bool
    """
    if not isinstance(value, bool):
        raise InvalidRequestError.of(name, value, "True or False")


@frozen
class ReadingRequests:
    """Makes requests that generate nothing, one per text, and waits for their results.

    :ivar adapters: the adapters that requests may use
    """

    worker: EngineAccess
    preparer: RequestPreparer
    adapters: Adapters

    def checked(self, name: str, text: PromptLike) -> str | list[int]:
        """Return a text, or a copy of token ids.

        :param name: the argument's name in errors
        :raises InvalidRequestError: the text has lone surrogates, or an id is outside the vocabulary
        """
        if not isinstance(text, str):
            return list(self.preparer.check_token_ids(name, text, or_text=True))
        if not is_unicode(text):
            raise InvalidRequestError.of(name, text, "Unicode without lone surrogates")
        return text

    def limit(self, recipe: EmbeddingRecipe) -> int:
        """Return how many tokens a text may have: as many as fit, but at most as many as the checkpoint names."""
        limit = self.preparer.max_read_tokens
        most = recipe.max_tokens or self.preparer.text.model_max_length
        return limit if most is None else min(limit, most)

    async def read(
        self,
        encode: Callable[[int], tuple[Sequence[int], Reading]],
        num_texts: int,
        options: RequestOptions,
        request_id: str,
    ) -> tuple[list[ReadPrompt], Usage]:
        """Return the results in the order of the texts, and their joint usage.

        :param encode: returns a text's tokens, by its index, and what to read off them; called in order, in a helper
            thread
        :raises RequestError: see :meth:`PromptBatch.read`, or what ``encode`` raises
        """
        adapter = self.adapters.use(options.adapter)
        sampling, has_ended = self.preparer.sampling(RequestOptions()), threading.Event()

        def make(first: int, end: int) -> list[Request]:
            arrival, made = time.monotonic(), []
            for place in range(first, end):
                if has_ended.is_set():
                    break
                token_ids, reading = encode(place)
                made.append(
                    self.preparer.prepare(
                        EncodedPrompt(token_ids),
                        options,
                        sampling,
                        request_id=f"{request_id}-{place}",
                        arrival=arrival,
                        field="prompt",
                        continues_prompt=True,
                        adapter=adapter,
                        reading=reading,
                    )
                )
            return made

        batch = PromptBatch(
            self.worker,
            lambda first, end: in_thread(partial(make, first, end)),
            num_texts,
            most=most_under_way(self.preparer.config),
            request_id=request_id,
            timeout=options.timeout,
        )
        try:
            return await batch.read(), batch.usage(time.monotonic())
        finally:  # if cancelled, the thread must stop
            has_ended.set()
