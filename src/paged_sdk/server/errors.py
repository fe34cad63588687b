"""Writes error responses, in each API's form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from paged_sdk import EngineDeadError, PagedError
from paged_sdk.wire.problem import (
    Problem,
    ProblemError,
    anthropic_error,
    openai_error,
    problem_of,
    renamed,
    responses_error,
)

__all__ = ["LOGGER_NAME", "path_of", "problem_for", "problem_response"]

LOGGER_NAME: Final = "paged_sdk.server"

BODIES: Final[Mapping[str, Callable[[Problem], dict[str, Any]]]] = {
    "/v1/messages": anthropic_error,
    "/v1/responses": responses_error,
}
"""Maps prefixes of paths to their form of errors; all other paths have OpenAI's."""


def path_of(scope: Scope) -> str:
    """Return a request's path relative to where the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def problem_response(scope: Scope, problem: Problem) -> Response:
    """Return the error response to a request."""
    path = path_of(scope)
    bodies = [body for prefix, body in BODIES.items() if path.startswith(prefix)]
    body = (bodies or [openai_error])[0](problem)
    return JSONResponse(body, status_code=problem.status, headers=dict(problem.headers))


def problem_for(error: Exception, request_id: str, names: Mapping[str, str]) -> Problem:
    """Return what a client is told of an error, and log errors that concern the operator: unexpected exceptions and a
    dead engine.

    :param names: maps names of fields in errors to their names in the request's API
    """
    problem = renamed(problem_of(error), names)
    if not isinstance(error, PagedError | ProblemError) or isinstance(error, EngineDeadError):
        logging.getLogger(LOGGER_NAME).error(
            "request %s failed", request_id, exc_info=error, extra={"fields": {"request_id": request_id}}
        )
    return problem
