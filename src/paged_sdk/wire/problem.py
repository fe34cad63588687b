"""Maps errors to HTTP statuses and error bodies of each API."""

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
"""A full queue has room when a request finishes, which takes about a second."""

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
"""Maps names of the SDK's settings to names of fields in bodies."""

CONSTRAINT_NAMES: Final[Mapping[str, str]] = {
    "lark": "grammar",
    "llguidance": "grammar",
    "regex": "grammar",
    "tools": "tools",
}
"""Maps kinds of constraints to the fields of chat completions that set them; all other kinds: ``response_format``."""

OF_DRY: Final = ("multiplier", "base", "allowed_length")


@frozen(kw_only=True)
class Problem:
    """Describes an error to a client.

    :ivar status: HTTP status
    :ivar type: OpenAI's ``type`` of the error
    :ivar code: OpenAI's ``code`` of the error
    :ivar param: the field concerned
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(factory=dict)


class ProblemError(Exception):
    """Carries a problem that the server found itself, without an error of the SDK."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def problem_of(error: Exception) -> Problem:
    """Return what clients are told of an error. An unexpected error's text is not shown: it is in the server's log."""
    match error:
        case ProblemError():
            return error.problem
        case ContextLengthError():
            return _too_long(error)
        case InvalidRequestError():
            return _of_field(error.problem, error.field)
        case ConfigError():
            return _of_field(str(error), error.setting)
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
    """Return a problem as a body of OpenAI's API."""
    return {
        "error": {
            "message": problem.message,
            "type": problem.type,
            "param": problem.param,
            "code": problem.code,
        }
    }


def anthropic_error(problem: Problem) -> dict[str, Any]:
    """Return a problem as a body of Anthropic's API, which names the field in the message only."""
    named = renamed(problem, ANTHROPIC_NAMES)
    message = named.message
    if named.param is not None and named.param not in message:
        message = f"{named.param}: {message}"
    kind = ANTHROPIC_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def responses_error(problem: Problem) -> dict[str, Any]:
    """Return a problem as a body of OpenAI's responses API."""
    return openai_error(responses_problem(problem))


def responses_problem(problem: Problem) -> Problem:
    """Rename a problem's field to its name in OpenAI's responses API."""
    return renamed(problem, RESPONSES_NAMES)


def renamed(problem: Problem, names: Mapping[str, str]) -> Problem:
    """Rename a problem's field, in its message too, if ``names`` has it."""
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
"""Maps field names of chat completions to those of the responses API."""

ANTHROPIC_NAMES: Final[Mapping[str, str]] = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "tools.parameters": "tools.input_schema",
}
"""Maps field names of chat completions to those of Anthropic's messages."""

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
"""Maps HTTP statuses to Anthropic's types of errors."""


def _too_long(error: ContextLengthError) -> Problem:
    """Return the problem of a prompt that is too long. The message replaces the SDK's advice, which is for the
    application: a client can only shorten the prompt.
    """
    own, bracket, place = error.field.partition("[")
    field = f"{WIRE_NAMES.get(own, own)}[{place}" if bracket else own if own == "query" else None
    message = str(error)
    if error.num_tokens:  # set in all errors of the engine
        message = f"{field or 'the prompt'} has {error.num_tokens} tokens, {error.limit} fit: shorten it"
    return Problem(status=400, message=message, code="context_length_exceeded", param=field)


def _of_field(message: str, name: str) -> Problem:
    """Return the problem of a setting, with the name of its field in the body."""
    own = name.rpartition(".")[2] if name.startswith(("SamplingParams.", "DryParams.")) else name
    own, bracket, place = own.partition("[")  # of texts[17]
    wire_name = f"dry_{own}" if own in OF_DRY and name.startswith("DryParams.") else WIRE_NAMES.get(own, own)
    wire_name += bracket + place
    if name and message.startswith(name):
        message = wire_name + message[len(name) :]
    return Problem(status=400, message=message, param=wire_name or None)
