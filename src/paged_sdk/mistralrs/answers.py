"""Answers a runner's requests, with adapters and tool callbacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from attrs import evolve

from paged_sdk import BlockingModel, InvalidRequestError, RequestBuilder
from paged_sdk.mistralrs.adapters import LoraAdapterGeneration
from paged_sdk.mistralrs.callbacks import MAX_ROUNDS, Callbacks, Rounds, StreamedRounds, model_stays_loaded
from paged_sdk.mistralrs.generations import Generations, Selected
from paged_sdk.mistralrs.requests import ChatCompletionRequest, CompletionRequest, StreamT
from paged_sdk.mistralrs.responses import ChatCompletionResponse, CompletionResponse
from paged_sdk.mistralrs.stream import ChatCompletionStream, ChunkSource

__all__ = ["Answers"]

AnswerT = TypeVar("AnswerT")


class Answers:
    """Answers requests with a model. May be used from any thread.

    :param find_model: returns the model, which may have been unloaded and loaded again between two calls
    :param callbacks: functions that run tools, by the tools' names
    :param seed: seed of every request that samples; None: a random one per request
    """

    def __init__(
        self,
        find_model: Callable[[], BlockingModel],
        generations: Generations,
        callbacks: Callbacks,
        *,
        seed: int | None,
    ) -> None:
        self._find_model = find_model
        self._generations = generations
        self._callbacks = callbacks
        self._seed = seed

    @property
    def _model(self) -> BlockingModel:
        return self._find_model()

    def chat(self, request: ChatCompletionRequest[StreamT]) -> ChatCompletionResponse | ChatCompletionStream:
        """Answer a conversation, whole or as a stream.

        :raises ConfigError: sampling value out of range
        :raises RequestError: malformed or unsupported request
        """
        built = request.build(seed=self._seed, default_temperature=self._model.generation_defaults.temperature)
        done = [tool.name for tool in built.options.shown_tools if tool.name in self._callbacks]
        if request.max_tool_rounds is not None and not done:
            raise InvalidRequestError.of(
                "max_tool_rounds", request.max_tool_rounds, "None where no tool has a callback of the runner's"
            )
        if done and request.n_choices != 1:
            raise InvalidRequestError.of("n_choices", request.n_choices, "1 where tools have callbacks")
        rounds = None
        if done:
            rounds = MAX_ROUNDS if request.max_tool_rounds is None else request.max_tool_rounds
        send = self._stream if request.stream else self._answer
        return self._selecting(request.adapter, lambda selected: send(built, selected, rounds))

    def completion(self, request: CompletionRequest) -> CompletionResponse:
        """Continue a text.

        :raises ConfigError: sampling value out of range
        :raises RequestError: malformed or unsupported request
        """
        sampling = request.sampling(seed=self._seed, default_temperature=self._model.generation_defaults.temperature)
        constraint = request.constraint()

        def send(selected: Selected | None) -> CompletionResponse:
            with self._generations.leased(selected):
                response = self._model.send_completion_request(
                    request.prompt,
                    sampling,
                    truncation=request.truncate_sequence,
                    constraint=constraint,
                    adapter=None if selected is None else selected.name,
                )
            if request.echo_prompt:
                choices = tuple(evolve(choice, text=request.prompt + choice.text) for choice in response.choices)
                response = evolve(response, choices=choices)
            return CompletionResponse.of(response, adapter_generation=_generation(selected))

        return self._selecting(request.adapter, send)

    def _selecting(
        self, adapter: str | LoraAdapterGeneration | None, send: Callable[[Selected | None], AnswerT]
    ) -> AnswerT:
        """Send a request with the adapter that it names. If the adapter's content is replaced before the engine accepts
        the request, retry with the new content.
        """
        while True:
            selected = self._generations.select(self._model, adapter)
            try:
                return send(selected)
            except InvalidRequestError as error:
                if error.field != "adapter" or selected == self._generations.select(self._model, adapter):
                    raise

    def _answer(self, built: RequestBuilder, selected: Selected | None, rounds: int | None) -> ChatCompletionResponse:
        request, model = _through(built, selected), self._model
        with self._generations.leased(selected):
            run = Rounds(request, self._callbacks, rounds or 0)
            with model_stays_loaded():
                while run.goes_on(model.send_chat_request(run.request)):
                    pass
        response, records = run.whole(), run.records
        return ChatCompletionResponse.of(response, adapter_generation=_generation(selected), agentic_tool_calls=records)

    def _stream(self, built: RequestBuilder, selected: Selected | None, rounds: int | None) -> ChatCompletionStream:
        request, model = _through(built, selected), self._model
        source: ChunkSource = (
            model.stream_chat_request(request)
            if rounds is None
            else StreamedRounds(model.stream_chat_request, Rounds(request, self._callbacks, rounds))
        )
        goes_on = rounds is not None  # more requests may follow, which must use the same content of the adapter
        self._generations.lease(selected, is_held=goes_on)
        stream = ChatCompletionStream(
            source,
            adapter_generation=_generation(selected),
            when_ended=partial(self._generations.release, selected, is_held=goes_on),
        )
        if selected is not None:
            stream.read()  # an adapter that is gone raises here, so that _selecting can retry
        return stream


def _generation(selected: Selected | None) -> str | None:
    return None if selected is None else selected.generation


def _through(request: RequestBuilder, selected: Selected | None) -> RequestBuilder:
    return request if selected is None else request.with_adapter(selected.name)
