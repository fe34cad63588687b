"""Makes the requests that generate text, for chats and prompts, and the streams of their responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

from attrs import frozen

from paged_sdk.calls.answer_texts import AnswerTexts
from paged_sdk.calls.loaded_adapters import Adapters
from paged_sdk.calls.preparation import RequestPreparer, in_thread
from paged_sdk.calls.responses import ChatShape, CompletionShape, ResponseShape
from paged_sdk.chat.renderer import Interruption
from paged_sdk.chat.token_healing import EncodedPrompt
from paged_sdk.config.checks import is_unicode
from paged_sdk.constraints.grammar import Grammar, Language
from paged_sdk.errors import InvalidRequestError
from paged_sdk.scheduler.request import Request
from paged_sdk.streaming import ResponseStream
from paged_sdk.types.prompt import PromptLike, name_of_prompt
from paged_sdk.types.request import RequestBuilder
from paged_sdk.types.request_options import RequestOptions
from paged_sdk.types.response import (
    ChatCompletionChunkResponse,
    ChatCompletionResponse,
    CompletionChunkResponse,
    CompletionResponse,
)
from paged_sdk.worker.engine_access import EngineAccess

__all__ = ["ChatStream", "CompletionStream", "GenerationRequests"]

ChatStream: TypeAlias = ResponseStream[ChatCompletionResponse, ChatCompletionChunkResponse]
CompletionStream: TypeAlias = ResponseStream[CompletionResponse, CompletionChunkResponse]

ResponseT = TypeVar("ResponseT")
ChunkT = TypeVar("ChunkT")


@frozen
class GenerationRequests:
    """Makes the requests that generate text, and the streams of their responses.

    :ivar adapters: the adapters that requests may use
    :ivar model: the model's name, as responses have it
    """

    worker: EngineAccess
    preparer: RequestPreparer
    adapters: Adapters
    model: str

    def chat(self, request: RequestBuilder) -> ChatStream:
        """Return the stream of a chat's response.

        :raises InvalidRequestError: a request that this model does not support
        """
        interruption = Interruption()
        encode = partial(self.preparer.encode_chat, request.messages, request.options, interruption)
        return self._stream([encode], request.options, ChatShape(), is_chat=True, interruption=interruption)

    def completion(self, prompts: Sequence[PromptLike], options: RequestOptions) -> CompletionStream:
        """Return the stream of the completions of prompts.

        :raises InvalidRequestError: a request that this model does not support
        """
        encodes = [
            self._encode(prompt, options, name_of_prompt("prompt", place, len(prompts)))
            for place, prompt in enumerate(prompts)
        ]
        return self._stream(encodes, options, CompletionShape(), is_chat=False)

    def _encode(self, prompt: PromptLike, options: RequestOptions, field: str) -> Callable[[], EncodedPrompt]:
        if isinstance(prompt, str):
            if not is_unicode(prompt):
                raise InvalidRequestError.of(field, prompt, "Unicode without lone surrogates")
            return partial(self.preparer.encode_prompt, prompt, options, field)
        ids = list(self.preparer.check_token_ids(field, prompt, or_text=True))  # copied: the caller may change the list
        return lambda: EncodedPrompt(ids)

    def _stream(
        self,
        encodes: Sequence[Callable[[], EncodedPrompt]],
        options: RequestOptions,
        shape: ResponseShape[ResponseT, ChunkT],
        *,
        is_chat: bool,
        interruption: Interruption | None = None,
    ) -> ResponseStream[ResponseT, ChunkT]:
        """Return the stream of a response.

        :param encodes: one function per prompt that returns its tokens; every prompt becomes an engine request of its
            own
        :param interruption: set if the caller no longer waits for the prompts
        """
        preparer, field = self.preparer, "messages" if is_chat else "prompt"
        preparer.check_generates(field)
        preparer.check_prediction(options, len(encodes))
        adapter = self.adapters.use(options.adapter)
        request_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        part_ids = [request_id] if len(encodes) == 1 else [f"{request_id}-{place}" for place in range(len(encodes))]
        samplings = [preparer.sampling(options) for _ in encodes]  # each draws a seed if none is given
        texts = AnswerTexts.of(preparer.text, options, samplings, is_chat=is_chat)

        async def prepare() -> list[Request]:
            arrival = time.monotonic()
            try:
                prompts, prediction, language, grammar = await in_thread(partial(self._encoded, encodes, options))
            except BaseException:  # cancelled or timed out: the thread must stop
                if interruption is not None:
                    interruption.set()
                raise
            texts.note_prompts(prompts)
            return [
                preparer.prepare(
                    prompt,
                    options,
                    sampling,
                    prediction_token_ids=prediction,
                    request_id=part_id,
                    arrival=arrival,
                    field=name_of_prompt(field, place, len(prompts)),
                    continues_prompt=texts.continues_prompt,
                    kept_special_ids=texts.kept_special_ids,
                    may_reason=is_chat and options.answer_form.may_reason and not options.continue_final_message,
                    language=language,
                    grammar=grammar,
                    adapter=adapter,
                )
                for place, (part_id, prompt, sampling) in enumerate(zip(part_ids, prompts, samplings, strict=True))
            ]

        return ResponseStream(
            self.worker,
            prepare,
            shape,
            texts.parts(sorts_logprobs=is_chat),
            request_id=request_id,
            part_ids=part_ids,
            model=self.model,
            timeout=options.timeout,
        )

    def _encoded(
        self, encodes: Sequence[Callable[[], EncodedPrompt]], options: RequestOptions
    ) -> tuple[list[EncodedPrompt], Sequence[int], Language | None, Grammar | None]:
        """Return the tokens of prompts and of the prediction, and the constraint, compiled if that is done here."""
        preparer, prompts = self.preparer, [encode() for encode in encodes]
        prediction = preparer.encode_prediction(options)
        language = preparer.text.language(options, prompts[0].token_ids)
        grammar = preparer.grammar(language) if language is not None and preparer.compiles else None
        return prompts, prediction, language, grammar
