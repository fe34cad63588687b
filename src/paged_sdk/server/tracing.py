"""Describe requests to OpenTelemetry, where it is installed, by its conventions for generative AI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from paged_sdk import Usage

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["RequestSpan"]

INSTRUMENT: Final = "paged_sdk.server"


class RequestSpan:
    """Follows one request from its body to the end of its answer. Without OpenTelemetry it does nothing.

    :param operation: "chat", "text_completion", "embeddings" or "rerank"
    :param model: the name that the client asks
    :param headers: of the request, which may say what it is a part of
    """

    def __init__(self, operation: str, model: str, headers: Mapping[str, str]) -> None:
        self._span: Span | None = None
        try:
            from opentelemetry import propagate, trace
        except ImportError:
            return
        self._span = trace.get_tracer(INSTRUMENT).start_span(
            f"{operation} {model}",
            context=propagate.extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "paged_sdk",
                "gen_ai.request.model": model,
            },
        )

    def note_answer(
        self, model: str, usage: Usage, answer_id: str | None = None, *, finish: tuple[str, ...] = ()
    ) -> None:
        """Take in what an answer has cost.

        :param model: the model that has answered, without its adapter
        :param finish: why each text has ended
        """
        if self._span is None:
            return
        self._span.set_attribute("gen_ai.response.model", model)
        self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.prompt_tokens_details.cached_tokens)
        if answer_id is not None:
            self._span.set_attribute("gen_ai.response.id", answer_id)
        if finish:
            self._span.set_attribute("gen_ai.response.finish_reasons", finish)

    def end(self, error: BaseException | None = None) -> None:
        """End the span.

        :param error: why there is no answer; None: there is one, or the client has left
        """
        if self._span is None:
            return
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR))  # what it says may hold some of the prompt
        self._span.end()
