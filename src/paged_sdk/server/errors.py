"""Answer with problems, each API in its own form."""

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
"""Maps the beginnings of paths to the form of errors there; elsewhere it is OpenAI's."""


def path_of(scope: Scope) -> str:
    """Return the path of a request below where the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def problem_response(scope: Scope, problem: Problem) -> Response:
    """Return the answer to a request that has none."""
    path = path_of(scope)
    bodies = [body for prefix, body in BODIES.items() if path.startswith(prefix)]
    body = (bodies or [openai_error])[0](problem)
    return JSONResponse(body, status_code=problem.status, headers=dict(problem.headers))


def problem_for(error: Exception, request_id: str, names: Mapping[str, str]) -> Problem:
    """Return what a client is told of an error, and log what the operator has to know of.

    :param names: what the request calls fields that have other names in errors
    """
    problem = renamed(problem_of(error), names)
    if not isinstance(error, PagedError | ProblemError) or isinstance(error, EngineDeadError):
        logging.getLogger(LOGGER_NAME).error(
            "request %s failed", request_id, exc_info=error, extra={"fields": {"request_id": request_id}}
        )
    return problem
