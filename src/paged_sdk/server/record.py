"""Collects what is known of one request, for its log line and metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from attrs import define, field
from starlette.types import Scope

from paged_sdk import Usage
from paged_sdk.server.errors import LOGGER_NAME

__all__ = ["RequestRecord"]

KEY: Final = "paged_sdk.record"
MAX_LABEL: Final = 256
"""Maximum characters of a label in the log, since clients choose labels."""


class Ended(Protocol):
    """Describes one choice of an answer."""

    @property
    def finish_reason(self) -> str: ...


class HasUsage(Protocol):
    """Describes an answer."""

    @property
    def usage(self) -> Usage: ...


@define
class RequestRecord:
    """Collects what happens to a request.

    :ivar model: name of the model, not of its adapter
    :ivar label: the client's label for the end user
    :ivar names: maps names of fields in errors to their names in the request's API
    :ivar usage: usage of the answer, or of its part that was generated
    :ivar finish: finish reason of each choice
    :ivar error: the error's code, or its type if it has none
    """

    request_id: str
    method: str
    model: str | None = None
    adapter: str | None = None
    label: str | None = None
    is_streamed: bool = False
    names: Mapping[str, str] = field(factory=dict)
    usage: Usage | None = None
    finish: tuple[str, ...] = ()
    error: str | None = None

    @classmethod
    def begin(cls, scope: Scope, request_id: str) -> RequestRecord:
        """Start the record of a request, and put it into the request's scope."""
        record = cls(request_id, scope["method"])
        scope[KEY] = record
        return record

    @classmethod
    def of(cls, scope: Scope) -> RequestRecord:
        """Return the record in a request's scope."""
        record = scope[KEY]
        assert isinstance(record, RequestRecord)
        return record

    def take(self, answer: HasUsage) -> None:
        """Take usage and finish reasons of an answer, which may be partial: unfinished choices count as canceled."""
        self.usage = answer.usage
        choices: Sequence[Ended] = getattr(answer, "choices", ())
        self.finish = tuple(choice.finish_reason for choice in choices)

    def log(self, route: str, status: int, seconds: float) -> None:
        """Write the request's log line; formatters find its fields in ``record.fields``.

        :param route: path of the matching route; empty: none matched
        """
        label = None if self.label is None else self.label[:MAX_LABEL]
        fields: dict[str, Any] = {
            "request_id": self.request_id,
            "method": self.method,
            "path": route or None,
            "status": status,
            "seconds": round(seconds, 4),
            "model": self.model,
            "adapter": self.adapter,
            "user": label,
            "stream": self.is_streamed,
            "error": self.error,
        }
        line = f"{self.request_id} {self.method} {route or '-'} {status} in {seconds:.3f} s"
        if self.usage is not None:
            cached = self.usage.prompt_tokens_details.cached_tokens
            fields |= {
                "prompt_tokens": self.usage.prompt_tokens,
                "cached_tokens": cached,
                "completion_tokens": self.usage.completion_tokens,
                "finish_reason": list(dict.fromkeys(self.finish)),
                "queue_seconds": round(self.usage.queue_time_sec, 4),
                "time_to_first_token_seconds": round(self.usage.time_to_first_token_sec, 4),
            }
            line += f", {self.usage.prompt_tokens} tokens ({cached} cached) and {self.usage.completion_tokens} more"
        if self.finish:
            line += f", {' and '.join(dict.fromkeys(self.finish))}"
        if self.error is not None:
            line += f", {self.error}"
        if label is not None:
            line += f" for {json.dumps(label)}"
        logging.getLogger(LOGGER_NAME).info("%s", line, extra={"fields": fields})
