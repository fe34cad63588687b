"""Say in the terms of a wire what is wrong with a request, or with the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve, field, frozen

from paged_sdk import (
    AdapterError,
    ConfigError,
    ConstraintError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    ModelClosedError,
    PagedError,
    QueueFullError,
    RequestTimeoutError,
)

__all__ = [
    "Problem",
    "ProblemError",
    "anthropic_error",
    "openai_error",
    "problem_of",
    "renamed",
    "responses_error",
    "responses_problem",
]

RETRY_AFTER_SECONDS: Final = 1
"""A full queue moves on with every text that ends, which takes about so long."""

WIRE_NAMES: Final[Mapping[str, str]] = {
    "constraint": "response_format",
    "logits_bias": "logit_bias",
    "max_len": "max_tokens",
    "n_choices": "n",
    "sequence_breakers": "dry_sequence_breakers",
    "texts": "input",
    "top_n_logprobs": "top_logprobs",
    "truncation": "truncate_sequence",
}
"""Maps names of the SDK's settings to those of fields."""

CONSTRAINT_NAMES: Final[Mapping[str, str]] = {
    "lark": "grammar",
    "llguidance": "grammar",
    "regex": "grammar",
    "tools": "tools",
}
"""Maps kinds of constraints to the fields of chat completions that say them; a JSON schema is a response's format."""

OF_DRY: Final = ("multiplier", "base", "allowed_length")


@frozen(kw_only=True)
class Problem:
    """Says why there is no answer.

    :ivar status: HTTP's
    :ivar type: what OpenAI's API calls problems of this kind, and
    :ivar code: this one
    :ivar param: the field concerned
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(factory=dict)


class ProblemError(Exception):
    """Carries a problem that is no error of the SDK's to whoever answers the client."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def problem_of(error: Exception) -> Problem:
    """Return what clients are told of an error; of one that nobody foresaw, no more than that there was one."""
    match error:
        case ProblemError():
            return error.problem
        case ContextLengthError():
            return _too_long(error)
        case InvalidRequestError():
            return _of_field(error, error.field)
        case ConfigError():
            return _of_field(error, error.setting)
        case ConstraintError():
            return Problem(status=400, message=str(error), param=CONSTRAINT_NAMES.get(error.kind, "response_format"))
        case AdapterError():
            return Problem(status=400, message=str(error))
        case QueueFullError():
            return Problem(
                status=429,
                message=str(error),
                type="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
        case RequestTimeoutError():
            return Problem(status=504, message=str(error), type="server_error", code="timeout")
        case ModelClosedError() | EngineDeadError():
            return Problem(status=503, message=str(error), type="server_error", code="unavailable")
        case PagedError():
            return Problem(status=500, message=str(error), type="server_error", code="server_error")
        case _:
            return Problem(
                status=500, message="the server failed: its log says why", type="server_error", code="server_error"
            )


def openai_error(problem: Problem) -> dict[str, Any]:
    """Return the body that OpenAI's API has for a problem."""
    return {
        "error": {
            "message": problem.message,
            "type": problem.type,
            "param": problem.param,
            "code": problem.code,
        }
    }


def anthropic_error(problem: Problem) -> dict[str, Any]:
    """Return the body that Anthropic's API has for a problem. It has no place for a field but the message."""
    named = renamed(problem, ANTHROPIC_NAMES)
    message = named.message
    if named.param is not None and named.param not in message:
        message = f"{named.param}: {message}"
    kind = ANTHROPIC_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def responses_error(problem: Problem) -> dict[str, Any]:
    """Return the body that OpenAI's responses API has for a problem."""
    return openai_error(responses_problem(problem))


def responses_problem(problem: Problem) -> Problem:
    """Return a problem with the field's name in OpenAI's responses API."""
    return renamed(problem, RESPONSES_NAMES)


def renamed(problem: Problem, names: Mapping[str, str]) -> Problem:
    """Return a problem with another name of its field, if there is one."""
    param = problem.param
    if param is None or param not in names:
        return problem
    message = problem.message
    if message.startswith(param):
        message = names[param] + message[len(param) :]
    return evolve(problem, message=message, param=names[param])


RESPONSES_NAMES: Final[Mapping[str, str]] = {
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "truncate_sequence": "truncation",
}
"""Maps names of the fields of chat completions to those of responses."""

ANTHROPIC_NAMES: Final[Mapping[str, str]] = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "tools.parameters": "tools.input_schema",
}
"""Maps names of the fields of chat completions to those of Anthropic's."""

ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Maps statuses to what Anthropic's API calls the errors."""


def _too_long(error: ContextLengthError) -> Problem:
    """Return the problem of a prompt that does not fit. What an application does about it, a client cannot."""
    own, bracket, place = error.field.partition("[")
    field = f"{WIRE_NAMES.get(own, own)}[{place}" if bracket else own if own == "query" else None
    message = str(error)
    if error.num_tokens:  # as all of the engine's have
        message = f"{field or 'the prompt'} has {error.num_tokens} tokens, {error.limit} fit: shorten it"
    return Problem(status=400, message=message, code="context_length_exceeded", param=field)


def _of_field(error: Exception, name: str) -> Problem:
    """Return the problem of a field, by the name that it has on the wire."""
    own = name.rpartition(".")[2] if name.startswith(("SamplingParams.", "DryParams.")) else name
    own, bracket, place = own.partition("[")  # of texts[17]
    wire_name = f"dry_{own}" if own in OF_DRY and name.startswith("DryParams.") else WIRE_NAMES.get(own, own)
    wire_name += bracket + place
    message = str(error)
    if name and message.startswith(name):
        message = wire_name + message[len(name) :]
    return Problem(status=400, message=message, param=wire_name or None)
