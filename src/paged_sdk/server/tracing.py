"""Traces requests with OpenTelemetry, if installed, by its semantic conventions for generative AI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from paged_sdk import Usage

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["RequestSpan"]

INSTRUMENT: Final = "paged_sdk.server"


class RequestSpan:
    """Traces one request from its parsed body to the end of its answer. Does nothing without OpenTelemetry.

    :param operation: "chat", "text_completion", "embeddings" or "rerank"
    :param model: the model's name in the request
    :param headers: the request's headers, which may hold the context of a trace
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
        """Add an answer's usage to the span.

        :param model: name of the model, not of its adapter
        :param finish: finish reason of each choice
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

        :param error: why the request failed; None: it succeeded, or the client disconnected
        """
        if self._span is None:
            return
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR))  # no message: it may quote the prompt
        self._span.end()
