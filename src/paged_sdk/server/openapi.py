"""Describe what is served as an OpenAPI document, from what reads the bodies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any, Final

from attrs import frozen

from paged_sdk.wire.body import BodyReader

__all__ = ["Operation", "openapi_document"]

ERRORS: Final[Mapping[int, str]] = {
    400: "The request cannot be answered: `param` names the field.",
    401: "No API key, or a wrong one.",
    403: "The server does not do this.",
    404: "No such model.",
    405: "Another method is needed.",
    413: "The body is too long.",
    415: "The body is not `application/json`.",
    429: "The queue is full: `Retry-After` says when to come back.",
    500: "The request failed.",
    503: "The server is ending, or its engine has stopped.",
    504: "It took too long.",
}
ERROR_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANTHROPIC_ERROR_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


@frozen(kw_only=True)
class Operation:
    """Describes one path.

    :ivar body: reads what clients send; None: they send nothing
    :ivar is_streamed: whether the answer may be server-sent events
    :ivar parameter: the part of the path that clients fill in
    :ivar media_type: of the answer
    :ivar error: the schema of its errors
    """

    path: str
    summary: str
    body: BodyReader[Any] | None = None
    is_streamed: bool = False
    parameter: str | None = None
    media_type: str = "application/json"
    error: str = "Error"

    def describe(self) -> dict[str, Any]:
        """Return the operation as OpenAPI has it."""
        kinds: dict[str, Any] = {self.media_type: {"schema": {"type": "object"} if "json" in self.media_type else {}}}
        if self.is_streamed:
            kinds["text/event-stream"] = {"schema": {"type": "string"}}
        responses: dict[str, Any] = {"200": {"description": "The answer.", "content": kinds}}
        for status, says in ERRORS.items():
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{self.error}"}}}
            responses[str(status)] = {"description": says, "content": content}
        described: dict[str, Any] = {"summary": self.summary, "responses": responses}
        if self.body is not None:
            content = {"application/json": {"schema": self.body.schema()}}
            described["requestBody"] = {"required": True, "content": content}
        if self.parameter is not None:
            schema = {"type": "string", "minLength": 1}
            described["parameters"] = [{"name": self.parameter, "in": "path", "required": True, "schema": schema}]
        return {"get" if self.body is None else "post": described}


def openapi_document(operations: Iterable[Operation], *, needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI document of a server.

    :param needs_key: whether clients have to send an API key
    """
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "paged_sdk", "version": version("paged-sdk")},
        "paths": {operation.path: operation.describe() for operation in operations},
        "components": {"schemas": {"Error": dict(ERROR_SCHEMA), "AnthropicError": dict(ANTHROPIC_ERROR_SCHEMA)}},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document
