"""Makes the OpenAPI document from the TypedDicts that check bodies and describe answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any, Final

from attrs import frozen

from paged_sdk.wire.body import BodyReader, schema_of
from paged_sdk.wire.forms import Error

__all__ = ["Operation", "openapi_document"]

ERRORS: Final[Mapping[int, str]] = {
    400: "An invalid request: `param` names the field.",
    401: "A missing or wrong API key.",
    403: "Not enabled on this server.",
    404: "Unknown model.",
    405: "Wrong method.",
    408: "The body came too slowly.",
    413: "The body is too long.",
    415: "The body is not `application/json`.",
    429: "The queue is full: `Retry-After` says when to retry.",
    500: "The request failed.",
    503: "The server is shutting down, its engine has stopped, or the model is still loading.",
    504: "It took too long.",
}
END: Final = "[DONE]"


@frozen(kw_only=True)
class Operation:
    """Describes one path.

    :ivar answer: type of the answer; None: plain text
    :ivar event: type of the data of server-sent events, if the answer may be streamed
    :ivar has_names: whether events have names; if not, the last event's data is ``[DONE]``
    :ivar body: reader of the body; None: a GET request without a body
    :ivar parameter: name of the path's parameter
    :ivar error: type of errors
    :ivar unavailable: type of the answer with status 503, if it is not ``error``
    """

    path: str
    summary: str
    answer: Any = None
    event: Any = None
    has_names: bool = False
    body: BodyReader[Any] | None = None
    parameter: str | None = None
    error: Any = Error
    unavailable: Any = None

    def describe(self, schemas: dict[str, Any]) -> dict[str, Any]:
        """Return the operation's entry in the OpenAPI document.

        :param schemas: collects the schemas of objects
        """
        kinds = {"text/plain": {"schema": {"type": "string"}}} if self.answer is None else _json(self.answer, schemas)
        if self.event is not None:
            kinds["text/event-stream"] = {"schema": self._event(schemas)}
        responses: dict[str, Any] = {"200": {"description": "The answer.", "content": kinds}}
        for status, description in ERRORS.items():
            kind = self.unavailable if status == 503 and self.unavailable else self.error
            responses[str(status)] = {"description": description, "content": _json(kind, schemas)}
        responses["429"]["headers"] = {"Retry-After": {"schema": {"type": "string"}, "description": "Seconds."}}
        described: dict[str, Any] = {"summary": self.summary, "responses": responses}
        if self.body is not None:
            content = {"application/json": {"schema": self.body.schema(schemas)}}
            described["requestBody"] = {"required": True, "content": content}
        if self.parameter is not None:
            schema = {"type": "string", "minLength": 1}
            described["parameters"] = [{"name": self.parameter, "in": "path", "required": True, "schema": schema}]
        return {"get" if self.body is None else "post": described}

    def _event(self, schemas: dict[str, Any]) -> dict[str, Any]:
        """Return the schema of one event: an object of its fields, whose ``data`` is a string of JSON."""
        data: dict[str, Any] = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": schema_of(self.event, schemas),
        }
        fields: dict[str, Any] = {"data": data if self.has_names else {"anyOf": [data, {"const": END}]}}
        if self.has_names:
            fields["event"] = {"type": "string", "description": "The type of the data."}
        return {"type": "object", "properties": fields, "required": sorted(fields), "additionalProperties": False}


def _json(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema_of(kind, schemas)}}


def openapi_document(operations: Iterable[Operation], *, needs_key: bool) -> dict[str, Any]:
    """Return the OpenAPI document of a server.

    :param needs_key: whether clients must send an API key
    """
    schemas: dict[str, Any] = {}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "paged_sdk", "version": version("paged-sdk")},
        "paths": {operation.path: operation.describe(schemas) for operation in operations},
        "components": {"schemas": schemas},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document
