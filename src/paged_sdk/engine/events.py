"""What one step tells one request."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from attrs import frozen

from paged_sdk.types.response import FinishReason, Logprobs, TokenLogprob, Usage

__all__ = ["ChoiceDelta", "RequestEvent"]


@frozen(kw_only=True)
class ChoiceDelta:
    """What is new in one choice.

    :ivar finish_reason: set once, in the choice's last delta
    """

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@frozen(kw_only=True)
class RequestEvent:
    """News of one request.

    :ivar choices: at most one delta per choice, in order of index
    :ivar usage: set in the request's last event, unless that is an error
    :ivar error: the request ends with this
    """

    request_id: str
    choices: tuple[ChoiceDelta, ...] = ()
    prompt_logprobs: Logprobs | None = None
    usage: Usage | None = None
    error: Exception | None = None

    @property
    def is_last(self) -> bool:
        return self.usage is not None or self.error is not None

    @classmethod
    def merge(cls, events: Iterable[RequestEvent]) -> RequestEvent:
        """Several events of one request as one, for a reader that was slower than the engine."""
        ordered = list(events)
        if len(ordered) == 1:
            return ordered[0]
        deltas = sorted((delta for event in ordered for delta in event.choices), key=lambda delta: delta.index)
        last = ordered[-1]
        return cls(
            request_id=last.request_id,
            choices=tuple(_merge(list(group)) for _, group in groupby(deltas, key=lambda delta: delta.index)),
            prompt_logprobs=next((event.prompt_logprobs for event in ordered if event.prompt_logprobs), None),
            usage=last.usage,
            error=last.error,
        )


def _merge(deltas: list[ChoiceDelta]) -> ChoiceDelta:
    return ChoiceDelta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
    )
